"""The run files: one root class a recipe, and the rules between sections."""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from raypo.config.base import ImportPath, RunFile, is_import_path
from raypo.config.placement_section import FrozenSection, PlacementSection, RoleKind
from raypo.config.ppo_section import PPOSection
from raypo.config.rollout_section import RolloutSection
from raypo.config.sections import (
    CheckpointSection,
    ClusterSection,
    DataSection,
    EvalSection,
    LearnerSection,
    LoggingSection,
    ModelSection,
    RewardSection,
    StopSection,
    WorkersSection,
)
from raypo.config.sources import functions_of, one_or_many

NUMBERS_DO_NOT_DEPEND_ON = (
    "checkpoint",
    "cluster",
    "learner.max_skipped_updates",
    "learner.save_critic",
    "logging",
    "max_failures",
    "placement",
    "stop",
    "storage_path",
)
"""Sections and keys that may change when a run is resumed; `num_steps` may where no learning rate
follows from it."""
MAX_KL_ERROR = 0.2
"""Of the adaptive KL controller: `raypo.ppo.kl.MAX_RELATIVE_ERROR`, from a floor above."""


class RecipeConfig(RunFile):
    """What the run files of all recipes have in common."""

    name: str = Field(min_length=1, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Run folder: <storage_path>/<name>/."""
    recipe: str
    """What the file is of: ppo, sft, reward_model, dpo, rejection_sampling, iterative_dpo or
    distillation; without the key it is ppo."""
    seed: int = Field(default=0, ge=0)
    """Seed of sampling, data order, dealing and new weights."""
    num_steps: int = Field(default=40, ge=1)
    """ppo: one rollout batch and its updates; sft, reward_model, dpo: one optimizer step; the
    others: one round. A run that is given more of them goes on."""
    from_checkpoint: str | None = None
    """Begin with the whole state of another run of this recipe, whatever other values this one has:
    the folder or URI of that run (its newest checkpoint), its `best/`, or one of its checkpoints.
    Steps count on from there. Weights alone: name that run's policy/ as model.policy."""
    max_failures: int = Field(default=0, ge=-1)
    """How often a run whose learner worker or Ray Train controller is lost goes on from its last
    checkpoint by itself, as Ray's `FailureConfig(max_failures)` counts; -1: every time. An error
    that a worker raises (of a reward function, say) counts as its loss, and may come again. In a
    sweep each trial has as many."""
    callbacks: Annotated[tuple[ImportPath, ...], BeforeValidator(one_or_many)] = ()
    """Functions, `file.py:name`, that are called after each step, with a
    `raypo.run.callbacks.StepView`; the numbers that they return become metrics."""
    checkpoint: CheckpointSection = CheckpointSection()
    stop: StopSection = StopSection()
    placement: PlacementSection = PlacementSection()
    cluster: ClusterSection = ClusterSection()
    logging: LoggingSection = LoggingSection()

    @property
    def may_change_length(self) -> bool:
        """Whether no step's numbers depend on `num_steps`, so that it may change on the way."""
        return getattr(getattr(self, "learner", None), "lr_schedule", "constant") == "constant"

    @property
    def measures_held_out(self) -> bool:
        """Whether there are `eval/*` metrics."""
        return bool(getattr(getattr(self, "eval", None), "prompts", None))

    @property
    def scheduled_steps(self) -> tuple[int, str] | None:
        """Steps that learning rates follow, and the keys that say so; None: not known yet."""
        return self.num_steps, "num_steps"

    @model_validator(mode="after")
    def _learning_rates_reach_their_highest(self) -> Self:
        learner, steps = getattr(self, "learner", None), self.scheduled_steps
        if isinstance(learner, WorkersSection) and steps:
            learner.require_steps(*steps)
        return self

    @model_validator(mode="after")
    def _held_out_metrics_are_measured(self) -> Self:
        watched = {"checkpoint.best_by": self.checkpoint.best_by}
        watched["stop.metric"] = self.stop.metric if self.stop.watches else None
        for key, metric in watched.items():
            if metric and metric.startswith("eval/") and not self.measures_held_out:
                raise ValueError(
                    f"{key} ({metric}): is measured on held-out prompts, and eval.prompts is null. "
                    f"Set eval.prompts, or {key} to a metric of the steps, like rollout/score_mean."
                )
        return self

    def with_dtype(self, *, use_gpu: bool) -> Self:
        """The config with `model.dtype: auto` decided: bfloat16 on GPUs, float32 on CPUs.

        On GPUs attention computes float32 in TF32, so engine and learner could not agree in it.
        """
        model: Any = vars(self)["model"]
        if model.dtype != "auto":
            return self
        decided = {"dtype": "bfloat16" if use_gpu else "float32"}
        return self.model_copy(update={"model": model.model_copy(update=decided)})

    @model_validator(mode="after")
    def _only_online_recipes_place_roles(self) -> Self:
        if not isinstance(self, OnlineConfig) and self.placement.is_dedicated:
            raise ValueError(
                f"placement.mode (dedicated): the recipe {self.recipe} has nothing that could live "
                f"in a group of its own. Set placement.mode to colocated."
            )
        return self


class OnlineConfig(RecipeConfig):
    """What the run files of the recipes have in common that train on what their engines sample."""

    paths: ClassVar[tuple[str, ...]] = (
        "model.policy",
        "model.critic",
        "model.reward.path",
        "model.reference",
        "data.prompts",
        "eval.prompts",
    )
    functions: ClassVar[tuple[str, ...]] = (
        "reward.function",
        "data.prompts.function",
        "eval.function",
        "eval.prompts.function",
        "rollout.environment",
        "rollout.agent",
    )

    model: ModelSection
    data: DataSection
    reward: RewardSection = RewardSection()
    rollout: RolloutSection = RolloutSection()
    learner: WorkersSection
    eval: EvalSection = EvalSection()

    @property
    def pushes_adapter(self) -> bool:
        """Whether engines hold the policy's LoRA adapter beside the weights below it."""
        return self.model.lora is not None and self.model.lora.push == "adapter"

    @property
    def responses_per_step(self) -> int:
        """Responses sampled in a step, over all workers."""
        return self.rollout.prompts_per_step * self.rollout.samples_per_prompt

    @property
    def own_functions(self) -> dict[str, str]:
        """Config key -> import path, of the functions that stand in the place of raypo's."""
        return {}

    @property
    def reference(self) -> str | None:
        """Path of the model that a reference deployment holds; None: no deployment is needed."""
        return None

    @property
    def references(self) -> dict[str, str]:
        """Role of each reference deployment -> the path of the model that it holds."""
        return {"reference": self.reference} if self.reference else {}

    @property
    def judges(self) -> dict[str, Any]:
        """Config key -> value, of what scores responses in training."""
        of_sources = functions_of(self.data.prompts)
        judges = {
            "reward.function": self.reward.function,
            "reward.url": self.reward.url,
            "model.reward": self.model.reward,
            "data.prompts.function": next(iter(of_sources.values()), None),
        }
        return {key: value for key, value in judges.items() if value is not None}

    @property
    def needs_critic(self) -> bool:
        """Whether a critic is trained beside the policy."""
        return False

    @property
    def is_refilled(self) -> bool:
        """Whether a step may draw more prompts than `rollout.prompts_per_step`."""
        return False

    @property
    def trained_temperature(self) -> float:
        """Of the distribution whose log-probs learner and reference give."""
        return self.rollout.temperature

    @property
    @abstractmethod
    def rows_per_update(self) -> int:
        """Most responses of one optimizer step, over all workers."""

    @model_validator(mode="after")
    def _every_engine_has_a_worker(self) -> Self:
        engine, num_workers = self.rollout.engine, self.learner.num_workers
        if self.placement.group_of("engine") == "dedicated":
            return self
        if num_workers % engine.tensor_parallel:
            raise ValueError(
                f"rollout.engine.tensor_parallel ({engine.tensor_parallel}): must divide "
                f"learner.num_workers ({num_workers}), whose devices a colocated engine takes. Set "
                f"it to 1, or placement.mode to dedicated."
            )
        most = num_workers // engine.tensor_parallel
        if engine.count != "auto" and engine.count > most:
            raise ValueError(
                f"rollout.engine.count ({engine.count}): a colocated engine lives beside "
                f"{engine.tensor_parallel} of the {num_workers} learner workers "
                f"(rollout.engine.tensor_parallel, learner.num_workers). Set rollout.engine.count "
                f"to at most {most}, or placement.mode to dedicated."
            )
        return self

    @model_validator(mode="after")
    def _engines_that_sample_ahead_have_their_own_resources(self) -> Self:
        if self.rollout.mode != "sync" and self.placement.group_of("engine") == "colocated":
            raise ValueError(
                f"rollout.mode ({self.rollout.mode}): samples while the learner updates, and "
                f"colocated engines take turns with it. Set placement.mode to dedicated (or to "
                f"{{engine: dedicated}}), or rollout.mode to sync."
            )
        return self

    @model_validator(mode="after")
    def _workers_that_share_a_replica_share_a_node(self) -> Self:
        strategy = self.placement.strategy
        for key, (role, size) in self.devices_of_replicas().items():
            is_colocated = self.placement.group_of(role) == "colocated"
            if size > 1 and is_colocated and strategy == "STRICT_SPREAD":
                raise ValueError(
                    f"placement.strategy ({strategy}): every learner worker has a node of its own, "
                    f"and {size} of them share a replica ({key}). Set placement.strategy to PACK, "
                    f"or placement.mode to dedicated for it."
                )
        return self

    def devices_of_replicas(self) -> dict[str, tuple[RoleKind, int]]:
        """By key: the role that it is about, and how many devices share one replica of it."""
        frozen = self.placement.frozen
        return {
            "rollout.engine.tensor_parallel": ("engine", self.rollout.engine.tensor_parallel),
            "placement.frozen.reference.tensor_parallel": (
                "reference",
                frozen.reference.tensor_parallel,
            ),
            "placement.frozen.reward.tensor_parallel": ("reward", frozen.reward.tensor_parallel),
        }

    @model_validator(mode="after")
    def _replicas_on_several_gpus_have_whole_ones(self) -> Self:
        for key, (role, size) in self.devices_of_replicas().items():
            share = getattr(self.placement.gpus, role)
            is_dedicated = self.placement.group_of(role) == "dedicated"
            if size > 1 and share < 1.0 and (is_dedicated or role == "engine"):
                raise ValueError(
                    f"placement.gpus.{role} ({share:g}): a replica on several GPUs "
                    f"({key} = {size}) takes whole ones. Set it to 1."
                )
        return self

    @model_validator(mode="after")
    def _frozen_models_on_several_devices_find_them(self) -> Self:
        num_workers = self.learner.total_workers
        for role in ("reference", "reward"):
            frozen: FrozenSection = getattr(self.placement.frozen, role)
            size = frozen.tensor_parallel
            replicas = 1 if frozen.num_replicas == "auto" else frozen.num_replicas
            is_colocated = self.placement.group_of(role) == "colocated"
            if replicas * size > num_workers and is_colocated:
                raise ValueError(
                    f"placement.frozen.{role}.tensor_parallel ({size}): each colocated replica "
                    f"lies on the devices of {size} learner workers, and there are {num_workers} "
                    f"(learner.num_workers) for "
                    f"{replicas} of them (placement.frozen.{role}.num_replicas). Set one of the "
                    f"two lower, or placement.mode to dedicated for it."
                )
        return self

    @model_validator(mode="after")
    def _vllm_knows_prompts_at_temperature_1_alone(self) -> Self:
        backend = self.placement.frozen.reference.backend
        temperature = self.trained_temperature
        if backend == "vllm" and temperature != 1.0 and self.references:
            raise ValueError(
                f"placement.frozen.reference.backend (vllm): gives log-probs of prompts at "
                f"temperature 1 alone, and rollout.temperature is {temperature:g}. Set it to torch."
            )
        return self

    @model_validator(mode="after")
    def _weights_reach_the_engines(self) -> Self:
        if self.learner.use_gpu != "auto":  # else it is checked where the GPUs are known
            self.rollout.engine.resolved_transport(
                colocated=self.placement.group_of("engine") == "colocated",
                use_gpu=self.learner.use_gpu,
                share_gpus=self.engines_share_gpus,
            )
        return self

    @property
    def engines_share_gpus(self) -> bool:
        """Whether a dedicated bundle of one GPU holds several engines."""
        engine, share = self.rollout.engine, self.placement.gpus.engine
        count = engine.resolved_count(num_workers=self.learner.num_workers, use_gpu=True)
        is_dedicated = self.placement.group_of("engine") == "dedicated"
        return is_dedicated and count > 1 and 2 * share <= 1.0

    @model_validator(mode="after")
    def _longest_sequence_fits_a_microbatch(self) -> Self:
        longest = self.data.max_prompt_tokens + self.rollout.max_response_tokens
        keys = f"data.max_prompt_tokens + {self.rollout.length_key}"
        self.learner.require_room_for(longest, keys)
        return self


class PPOConfig(OnlineConfig):
    """The whole run file of the `ppo` recipe; each part of the program gets its own section."""

    functions: ClassVar[tuple[str, ...]] = (
        *OnlineConfig.functions,
        "ppo.policy_loss",
        "ppo.advantage",
        "ppo.shaping.function",
    )

    recipe: Literal["ppo"] = "ppo"  # pyright: ignore[reportIncompatibleVariableOverride]
    ppo: PPOSection = PPOSection()
    learner: LearnerSection = LearnerSection()  # pyright: ignore[reportIncompatibleVariableOverride]

    @property
    def own_functions(self) -> dict[str, str]:
        """Config key -> import path of a loss, an advantage or a shaping of the user's own."""
        named = {
            "ppo.policy_loss": self.ppo.policy_loss,
            "ppo.advantage": self.ppo.advantage,
            "ppo.shaping.function": self.ppo.shaping.function or "",
        }
        return {key: name for key, name in named.items() if is_import_path(name)}

    @property
    def reference(self) -> str | None:
        """Path of the model that a reference deployment holds; None: no deployment is needed.

        With `model.lora` the learner itself is the reference, its adapter off.
        """
        if not self.ppo.needs_reference or self.model.is_own_reference:
            return None
        return self.model.reference or self.model.policy

    @property
    def needs_critic(self) -> bool:
        """Whether `ppo.advantage` has values."""
        return self.ppo.needs_critic

    @property
    def is_refilled(self) -> bool:
        """Whether `ppo.filter` drops groups."""
        return self.ppo.filter.enabled

    @property
    def rows_per_update(self) -> int:
        """Responses of a minibatch."""
        return self.ppo.minibatch_size

    @property
    def scheduled_steps(self) -> tuple[int, str]:
        """Those that update the policy; without any, those of the critic."""
        waits = self.ppo.critic_warmup_steps
        if not 0 < waits < self.num_steps:
            return self.num_steps, "num_steps"
        return self.num_steps - waits, "num_steps - ppo.critic_warmup_steps"

    @model_validator(mode="after")
    def _the_policy_has_steps_of_its_own(self) -> Self:
        warmup = self.ppo.critic_warmup_steps
        if warmup >= self.num_steps and not self.learner.save_critic:
            raise ValueError(
                f"ppo.critic_warmup_steps ({warmup}): leaves no step of num_steps "
                f"({self.num_steps}) to the policy. Set num_steps to {warmup + 1} or more, "
                f"ppo.critic_warmup_steps lower, or learner.save_critic to true for a run that "
                f"trains its critic alone."
            )
        return self

    @model_validator(mode="after")
    def _step_is_whole_minibatches(self) -> Self:
        if self.responses_per_step % self.ppo.minibatch_size:
            divisor = _largest_divisor(self.responses_per_step, at_most=self.ppo.minibatch_size)
            raise ValueError(
                f"ppo.minibatch_size ({self.ppo.minibatch_size}): must divide the responses of a "
                f"step (rollout.prompts_per_step x rollout.samples_per_prompt = "
                f"{self.responses_per_step}). Set ppo.minibatch_size to {divisor}."
            )
        return self

    @model_validator(mode="after")
    def _what_kl_cov_penalises_can_happen(self) -> Self:
        is_one_update = self.ppo.num_epochs == 1 and (
            self.responses_per_step == self.ppo.minibatch_size
        )
        is_unmoved = is_one_update and self.ppo.old_log_probs == "learner"
        if self.ppo.policy_loss == "kl_cov" and is_unmoved:
            raise ValueError(
                f"ppo.policy_loss (kl_cov): penalises how log-probs change from update to update "
                f"of a step, and a step has one (ppo.num_epochs 1, ppo.minibatch_size "
                f"{self.ppo.minibatch_size} of {self.responses_per_step} responses), before which "
                f"nothing has changed. Set ppo.minibatch_size lower, ppo.num_epochs to 2 or more, "
                f"or ppo.policy_loss to clip_cov."
            )
        return self

    @model_validator(mode="after")
    def _every_worker_has_work(self) -> Self:
        learner, prompts = self.learner, self.rollout.prompts_per_step
        fewest = min(prompts, self.ppo.minibatch_size)
        apart, in_all = learner.critic_workers, learner.total_workers
        if apart and (in_all > prompts or apart > self.ppo.minibatch_size):
            raise ValueError(
                f"learner.critic_workers ({apart}): every worker needs a prompt of each step "
                f"(learner.num_workers + learner.critic_workers = {in_all}, "
                f"rollout.prompts_per_step = {prompts}) and a response of each minibatch "
                f"(ppo.minibatch_size = {self.ppo.minibatch_size}). Set it lower, or to 0."
            )
        if learner.num_workers > fewest:
            raise ValueError(
                f"learner.num_workers ({self.learner.num_workers}): every worker needs a prompt of "
                f"each step (rollout.prompts_per_step = {self.rollout.prompts_per_step}) and a "
                f"response of each minibatch (ppo.minibatch_size = {self.ppo.minibatch_size}). "
                f"Set learner.num_workers to at most {fewest}."
            )
        return self

    @model_validator(mode="after")
    def _a_critic_with_workers_exists(self) -> Self:
        apart = self.learner.critic_workers
        if apart and not self.ppo.needs_critic:
            raise ValueError(
                f"learner.critic_workers ({apart}): ppo.advantage: {self.ppo.advantage} has no "
                f"critic. Set learner.critic_workers to 0, or ppo.advantage to gae."
            )
        is_uri = "://" in self.storage_path
        if apart and is_uri and self.learner.save_critic and self.checkpoint.best_by:
            raise ValueError(
                f"learner.critic_workers ({apart}): writes the critic on another worker than the "
                f"policy, and best/ takes both from one disk (storage_path: {self.storage_path}). "
                f"Set checkpoint.best_by to null, learner.save_critic to false, or storage_path "
                f"to a folder that all nodes see."
            )
        return self

    @model_validator(mode="after")
    def _a_critic_that_is_kept_exists(self) -> Self:
        if self.learner.save_critic and not self.ppo.needs_critic:
            raise ValueError(
                f"learner.save_critic (true): ppo.advantage: {self.ppo.advantage} has no critic. "
                f"Set learner.save_critic to false, or ppo.advantage to gae."
            )
        return self

    @model_validator(mode="after")
    def _an_agent_gives_the_score_itself(self) -> Self:
        for key, value in self.judges.items() if self.rollout.agent else ():
            raise ValueError(
                f"{key} ({value}): judges single responses, and an episode of rollout.agent "
                f"may have several, with one score that the agent returns. Remove {key}."
            )
        if self.rollout.agent and self.ppo.needs_group and self.ppo.has_kl_in_reward:
            raise ValueError(
                "ppo.kl.placement (reward): the KL of a response is taken off its score, and an "
                "episode of rollout.agent may have several responses with one score. Set "
                "ppo.kl.placement to loss."
            )
        shaping = self.ppo.shaping
        of_a_response = {"overlong_buffer_tokens", "truncated_score", "truncated_scale", "function"}
        set_keys = shaping.model_dump(include=of_a_response, exclude_defaults=True)
        for key, value in set_keys.items():
            if self.rollout.agent and self.ppo.needs_group:
                raise ValueError(
                    f"ppo.shaping.{key} ({value}): changes the score of a single response, and an "
                    f"episode of rollout.agent may have several with one score. Remove it, and "
                    f"let the agent's score say it."
                )
        return self

    @model_validator(mode="after")
    def _turn_rewards_keep_their_scale(self) -> Self:
        of_the_total = {"normalize", "clip_low", "clip_high", "function"}
        set_keys = self.ppo.shaping.model_dump(include=of_the_total, exclude_defaults=True)
        for key, value in set_keys.items():
            if self.rollout.environment and not self.ppo.needs_group:
                raise ValueError(
                    f"ppo.shaping.{key} ({value}): changes the score of a whole episode, and "
                    f"ppo.advantage: {self.ppo.advantage} credits the rewards of its turns. Remove "
                    f"it, and scale the environment's rewards."
                )
        if self.ppo.discount_by == "turn" and not self.rollout.is_episodic:
            raise ValueError(
                "ppo.discount_by (turn): a response is one turn where there is no environment and "
                "no agent. Remove it, or set rollout.environment."
            )
        return self

    @model_validator(mode="after")
    def _groups_have_samples_to_compare(self) -> Self:
        samples = self.rollout.samples_per_prompt
        comparing = f"ppo.advantage: {self.ppo.advantage}" if self.ppo.needs_group else None
        comparing = comparing or ("ppo.filter.enabled" if self.ppo.filter.enabled else None)
        if comparing and samples < 2:
            raise ValueError(
                f"rollout.samples_per_prompt ({samples}): {comparing} compares the samples of a "
                "prompt. Set rollout.samples_per_prompt to 2 or more."
            )
        return self

    @model_validator(mode="after")
    def _the_adaptive_kl_coefficient_stays_positive(self) -> Self:
        horizon = self.ppo.kl.horizon
        if horizon is not None and horizon <= MAX_KL_ERROR * self.responses_per_step:
            raise ValueError(
                f"ppo.kl.horizon ({horizon:g}): must be above {MAX_KL_ERROR} x the responses of a "
                f"step ({self.responses_per_step}), or the coefficient could turn negative. "
                f"Set ppo.kl.horizon to {self.responses_per_step} or more."
            )
        return self

    @model_validator(mode="after")
    def _correction_sees_whole_distributions(self) -> Self:
        section, truncation = self.ppo.correction, self.rollout.truncation
        if truncation and (section.acts or self.ppo.old_log_probs == "engine"):
            key, value, off = "ppo.correction.kind", section.kind, "none"
            if self.ppo.old_log_probs == "engine":
                key, value, off = "ppo.old_log_probs", "engine", "learner"
            elif section.kind == "none":
                key, value, off = "ppo.correction.token_veto", section.token_veto, "null"
            cutting, at = truncation
            usual = {"rollout.top_p": "1", "rollout.top_k": "null", "rollout.min_p": "0"}[cutting]
            raise ValueError(
                f"{key} ({value}): compares the engine's log-probs with the learner's, and "
                f"{cutting} ({at:g}) makes the engine's those of a truncated distribution. Set "
                f"{cutting} to {usual}, or {key} to {off}."
            )
        return self

    @model_validator(mode="after")
    def _a_token_can_be_too_stale(self) -> Self:
        most, bound = self.ppo.correction.max_staleness, self.rollout.staleness
        if most is not None and most >= bound:
            raise ValueError(
                f"ppo.correction.max_staleness ({most}): no token is staler than {bound} "
                f"(rollout.mode {self.rollout.mode}, rollout.max_staleness). Set it lower, or to "
                f"null."
            )
        return self

    @model_validator(mode="after")
    def _the_overlong_buffer_fits_a_response(self) -> Self:
        limit = self.rollout.max_response_tokens
        buffer = self.ppo.shaping.overlong_tokens(limit)
        if buffer is not None and self.rollout.is_episodic:
            raise ValueError(
                f"ppo.shaping.overlong_buffer_tokens ({self.ppo.shaping.overlong_buffer_tokens}): "
                f"counts what the policy samples, and rollout.max_episode_tokens ({limit}) limits "
                f"what others write too. Set ppo.shaping.overlong_buffer_tokens to null, and let "
                f"the episode's score say it."
            )
        if buffer is not None and buffer > limit:
            raise ValueError(
                f"ppo.shaping.overlong_buffer_tokens ({buffer}): must be at most "
                f"rollout.max_new_tokens ({limit}). Set ppo.shaping.overlong_buffer_tokens to auto."
            )
        return self


def _largest_divisor(number: int, *, at_most: int) -> int:
    return next(d for d in range(min(at_most, number), 0, -1) if number % d == 0)
