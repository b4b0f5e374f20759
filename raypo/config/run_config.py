"""Root config classes of the run files, one per recipe, and the rules between sections."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field

from raypo.config.base import ConfigError, ImportPath, RunFile, is_import_path
from raypo.config.learner_section import (
    LearnerSection,
    WorkersSection,
)
from raypo.config.only_if import value_at
from raypo.config.paths import is_uri
from raypo.config.placement_section import FrozenSection, PlacementSection, RoleKind
from raypo.config.ppo_section import PPOSection
from raypo.config.ppo_subsections import MAX_KL_ERROR
from raypo.config.reward_section import (
    RewardSection,
)
from raypo.config.rollout_section import EngineSection, RolloutSection
from raypo.config.sections import (
    CheckpointSection,
    ClusterSection,
    CurriculumSection,
    DataSection,
    EvalSection,
    HeldOutSection,
    LoggingSection,
    ModelSection,
    RatedDataSection,
    RewardModelEntry,
    SampledModelSection,
    StopSection,
    TrainedModelSection,
)
from raypo.config.sources import functions_of, one_or_many

NUMBERS_DO_NOT_DEPEND_ON = (
    "checkpoint",
    "cluster",
    "learner.activation_checkpointing",
    "learner.critic_workers",
    "learner.max_skipped_updates",
    "learner.min_workers",
    "learner.mlp_tile_tokens",
    "learner.num_workers",
    "learner.save_critic",
    "learner.sequence_parallel",
    "learner.zero_stage",
    "logging",
    "max_failures",
    "placement",
    "stop",
    "storage_path",
)
"""Sections and keys that may change when a run is resumed. `num_steps` may change too if no
learning rate depends on it. Worker counts, the ZeRO stage, and where activations are kept or
computed again change only the rounding of sums."""

OWN_LIMIT_FACTOR = 1.05
"""Factor from the longest limit of a piece of work to the limit of the run, so that the first is
reached first."""


class RecipeConfig(RunFile):
    """Base class of the run files of all recipes."""

    name: str = Field(min_length=1, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the run; its folder is <storage_path>/<name>/."""
    recipe: str
    """Recipe of the run: ppo, sft, reward_model, dpo, rejection_sampling, iterative_dpo or
    distillation. A file without this key is a ppo run."""
    seed: int = Field(default=0, ge=0)
    """Random seed of sampling, data order, minibatches and newly initialized weights."""
    num_steps: int = Field(default=40, ge=1)
    """Number of steps. ppo: a step is one rollout batch and its updates; sft, reward_model, dpo:
    one optimizer step; other recipes: one round. A larger number extends a finished run."""
    from_checkpoint: str | None = None
    """Training state of another run of this recipe to start from: the folder or URI of that run
    (its newest checkpoint), its `best/`, or one of its checkpoints. The config may differ, except
    in keys on which the state depends. Step numbers continue. To start from only the weights of
    that run, set model.policy to its policy/. null means a fresh start."""
    max_failures: int = Field(default=0, ge=-1)
    """Maximum number of automatic resumes from the last checkpoint, as in Ray's
    `FailureConfig(max_failures)`. Each resume follows the loss of a learner worker or of the Ray
    Train controller. -1 means no limit. An error that a worker raises (in a reward function, say)
    counts as the loss of that worker, although it may recur after every resume. In a sweep the
    number applies to each trial."""
    callbacks: Annotated[tuple[ImportPath, ...], BeforeValidator(one_or_many)] = ()
    """Callbacks, `file.py:name`, that are called after each step with a
    `raypo.run.callbacks.StepView`. The numbers that they return become metrics."""
    checkpoint: CheckpointSection = CheckpointSection()
    stop: StopSection = StopSection()
    placement: PlacementSection = PlacementSection()
    cluster: ClusterSection = ClusterSection()
    logging: LoggingSection = LoggingSection()
    if TYPE_CHECKING:  # each subclass defines these sections with its own classes
        model: TrainedModelSection
        learner: WorkersSection
        eval: HeldOutSection

    @property
    def may_change_length(self) -> bool:
        """True if `num_steps` may change during the run, because no learning rate depends on it."""
        return self.learner.lr_schedule == "constant"

    @property
    def measures_held_out(self) -> bool:
        """True if there are `eval/*` metrics."""
        return bool(self.eval.prompts)

    @property
    def hang_limit_s(self) -> float | None:
        """Seconds without progress after which the run hangs, or None for no limit.

        This is `placement.hang_timeout_s`. Work with a limit of its own has until then.
        """
        limit_s = self.placement.hang_timeout_s
        if limit_s is None:
            return None
        sections: list[tuple[Any, str]] = [
            (getattr(self, "reward", None), "timeout_s"),
            (self.eval, "timeout_s"),
            (getattr(self, "rollout", None), "step_timeout_s"),
            (self.placement.deployment, "stall_timeout_s"),
        ]
        for section, key in sections:
            own_s = getattr(section, key, None)  # recipes on examples lack some of them
            if own_s is None:
                continue
            # A default does not raise a shorter limit of the run, which somebody has set.
            is_default = own_s == type(section).model_fields[key].default
            if own_s == limit_s or not is_default:
                limit_s = max(limit_s, own_s * OWN_LIMIT_FACTOR)
        return limit_s

    @property
    def scheduled_steps(self) -> tuple[int, str] | None:
        """Number of steps in the learning-rate schedule, and the config keys that determine it.

        None means that the number is still unknown.
        """
        return self.num_steps, "num_steps"

    def _problems(self) -> Iterator[str]:
        yield from super()._problems()
        if steps := self.scheduled_steps:
            yield from self.learner.endless_warmup(*steps)
        if self.model.lora is not None and self.learner.optimizer == "muon":
            yield (
                "learner.optimizer (muon): updates whole matrices, but model.lora trains two "
                "low-rank factors of each. Remove model.lora, or set learner.optimizer to adamw."
            )
        shares = self.learner.sequence_parallel
        if shares > 1 and self.model.attention != "auto":
            yield (
                f"learner.sequence_parallel ({shares}): needs raypo's own attention over packed "
                f"rows, but model.attention is {self.model.attention}. Set model.attention to "
                "auto, or learner.sequence_parallel to 1."
            )
        metrics_by_key = {"checkpoint.best_by": self.checkpoint.best_by}
        metrics_by_key["stop.metric"] = self.stop.metric if self.stop.watches else None
        for key, metric in metrics_by_key.items():
            if metric and metric.startswith("eval/") and not self.measures_held_out:
                yield (
                    f"{key} ({metric}): is measured on held-out prompts, but eval.prompts is "
                    f"null. Set eval.prompts, or set {key} to a metric of training steps, like "
                    "rollout/score_mean."
                )
        if not isinstance(self, OnlineConfig) and self.placement.is_dedicated:
            yield (
                f"placement.mode (dedicated): the recipe {self.recipe} has no role that could "
                "have a dedicated group. Set placement.mode to colocated."
            )

    def _idle_workers(self, rows: Mapping[str, int]) -> Iterator[str]:
        """Yield a problem if a worker would have no row in a step.

        Args:
            rows: Number of rows that the workers share, by config key.
        """
        count, max_workers = self.learner.num_workers, min(rows.values())
        max_workers *= self.learner.sequence_parallel
        if count > max_workers:
            limits = ", ".join(f"{key} = {row_count}" for key, row_count in rows.items())
            yield (
                f"learner.num_workers ({count}): every worker needs a row of each step ({limits}). "
                f"Set learner.num_workers to at most {max_workers}."
            )

    @property
    def needs_engine(self) -> bool:
        """True if the run has engines."""
        return False

    def with_workers(self, count: int) -> Self:
        """Return the config of an elastic run for a period with `count` workers.

        Raises:
            ConfigError: a rule does not hold with this number of workers.
        """
        values = self.model_dump()
        low, high = values["learner"]["min_workers"], values["learner"]["num_workers"]
        values["learner"] |= {"num_workers": count, "min_workers": None}
        origin = f"learner.num_workers ([{low}, {high}]) with {count}"
        return type(self).parse(values, origin=origin)

    def with_dtype(self, *, use_gpu: bool) -> Self:
        """Return the config with `model.dtype: auto` resolved: bfloat16 on GPUs, float32 on CPUs.

        On GPUs float32 is slower, and vLLM rounds it to TF32 there anyway.
        """
        if self.model.dtype != "auto":
            return self
        dtype = "bfloat16" if use_gpu else "float32"
        return self.model_copy(update={"model": self.model.model_copy(update={"dtype": dtype})})


class OnlineConfig(RecipeConfig):
    """Base class of the run files of recipes that train on responses sampled by engines."""

    model: SampledModelSection  # pyright: ignore[reportIncompatibleVariableOverride]
    data: DataSection
    reward: RewardSection = RewardSection()
    rollout: RolloutSection = RolloutSection()
    learner: WorkersSection
    eval: EvalSection = EvalSection()  # pyright: ignore[reportIncompatibleVariableOverride]

    @property
    def pushes_adapter(self) -> bool:
        """True if engines hold the base weights and the policy's LoRA adapter separately."""
        return self.model.lora is not None and self.model.lora.push == "adapter"

    @property
    def responses_per_step(self) -> int:
        """Responses sampled in a step, over all workers."""
        return self.rollout.prompts_per_step * self.rollout.samples_per_prompt

    @property
    def max_model_len(self) -> int:
        """Maximum number of tokens of a prompt and its response."""
        return self.data.max_prompt_tokens + self.rollout.max_response_tokens

    @property
    def max_reference_len(self) -> int:
        """Maximum sequence length of a reference model or a teacher, in tokens."""
        return self.max_model_len

    @property
    def own_functions(self) -> dict[str, str]:
        """Import path of each user function that replaces one of raypo's, by config key."""
        keys = (key for key in self.functions if key.startswith(f"{self.recipe}."))
        specs = {key: value_at(self, key) or "" for key in keys}
        return {key: spec for key, spec in specs.items() if is_import_path(spec)}

    @property
    def reference(self) -> str | None:
        """Path of the reference model to deploy, or None if no deployment is needed."""
        return None

    @property
    def references(self) -> dict[str, str]:
        """Path of the model of each reference deployment, by role."""
        return {"reference": self.reference} if self.reference else {}

    @property
    def reward_models(self) -> dict[str, RewardModelEntry]:
        """Entry of each reward model in `model.reward`, by the role of its deployment."""
        return {f"reward_{index}": entry for index, entry in enumerate(self.model.reward or ())}

    @property
    def judge_models(self) -> dict[str, str]:
        """Path of a deployed judge's model, by role. Empty if the run deploys no judge."""
        judge = self.reward.judge
        return {"judge": judge.path} if judge and judge.path else {}

    @property
    def judged_tokens(self) -> int:
        """Maximum number of tokens that a deployed judge reads and writes, without its template."""
        judge = self.reward.judge
        assert judge is not None, "only for runs with a judge"
        response_tokens = int(judge.merged_sampling.get("max_tokens", 1))
        prompt_tokens = self.data.max_prompt_tokens if "{prompt}" in judge.template else 0
        return prompt_tokens + self.rollout.max_response_tokens + response_tokens

    @property
    def judges(self) -> dict[str, Any]:
        """Values of the settings that score training responses, by config key."""
        source_functions = functions_of(self.data.prompts)
        judges = {
            "reward.function": self.reward.function,
            "reward.url": self.reward.url,
            "reward.judge": self.reward.judge and self.reward.judge.name,
            "model.reward": self.model.reward,
            "data.prompts.function": next(iter(source_functions.values()), None),
        }
        return {key: value for key, value in judges.items() if value is not None}

    @property
    def needs_critic(self) -> bool:
        """True if a critic is trained together with the policy."""
        return False

    @property
    def prompts_answered(self) -> int:
        """Number of prompts in a step for which the policy samples responses."""
        return self.rollout.prompts_per_step

    @property
    def is_refilled(self) -> bool:
        """True if a step may sample more prompts than `rollout.prompts_per_step`, to replace groups
        that a filter drops.
        """
        return False

    @property
    def curriculum(self) -> CurriculumSection | None:
        """Settings for choosing prompts by pass rate. None means shuffled epochs."""
        return None

    @property
    def draws_in_flight(self) -> int:
        """Maximum number of prompts that may still lack samples when a step draws its prompts."""
        steps = self.rollout.staleness + 1 if self.rollout.has_requests_in_flight else 0
        return max(steps, int(self.is_refilled)) * self.rollout.prompts_per_step

    @property
    def trained_temperature(self) -> float:
        """Temperature of the log-probs that learner and reference compute."""
        return self.rollout.temperature

    @property
    def needs_engine(self) -> bool:
        """True: engines sample the responses to train on."""
        return True

    @property
    @abstractmethod
    def rows_per_update(self) -> int:
        """Maximum number of responses in an optimizer step, over all workers."""

    @property
    def engines_share_gpus(self) -> bool:
        """True if a dedicated bundle of one GPU holds several engines."""
        engine, share = self.rollout.engine, self.placement.gpus.engine
        count = engine.resolved_count(num_workers=self.learner.num_workers, use_gpu=True)
        is_dedicated = self.placement.group_of("engine") == "dedicated"
        return is_dedicated and count > 1 and 2 * share <= 1.0

    def _problems(self) -> Iterator[str]:
        yield from super()._problems()
        yield from self._problems_of_engines()
        yield from self._problems_of_replicas()
        if self.learner.is_elastic and self.placement.is_dedicated:
            yield (
                f"learner.min_workers ({self.learner.min_workers}): Ray Train decides how many "
                "workers fit, and it would count the devices of the dedicated group as free. "
                "Set learner.min_workers to null, or placement.mode to colocated."
            )
        reference, temperature = self.placement.frozen.reference, self.trained_temperature
        if reference.backend == "vllm" and temperature != 1.0 and self.references:
            yield (
                "placement.frozen.reference.backend (vllm): gives log-probs at temperature 1 "
                f"only, but rollout.temperature is {temperature:g}. Set it to torch."
            )
        judge = self.reward.judge
        if judge and judge.path and self.judged_tokens > judge.max_model_len:
            yield (
                f"reward.judge.max_model_len ({judge.max_model_len}): the judge may have to read "
                f"and write {self.judged_tokens} tokens, besides its template "
                f"(data.max_prompt_tokens, {self.rollout.length_key}, max_tokens of "
                f"reward.judge.sampling). Raise it, or lower one of these."
            )
        max_tokens = self.data.max_prompt_tokens + self.rollout.max_response_tokens
        keys = f"data.max_prompt_tokens + {self.rollout.length_key}"
        yield from self.learner.no_room_for(max_tokens, keys)

    def _problems_of_engines(self) -> Iterator[str]:
        engine, num_workers = self.rollout.engine, self.learner.num_workers
        is_colocated = self.placement.group_of("engine") == "colocated"
        if is_colocated and num_workers % engine.tensor_parallel:
            yield (
                f"rollout.engine.tensor_parallel ({engine.tensor_parallel}): must divide "
                f"learner.num_workers ({num_workers}), whose devices a colocated engine uses. "
                "Set it to 1, or placement.mode to dedicated."
            )
        max_count = num_workers // engine.tensor_parallel
        if is_colocated and engine.count != "auto" and engine.count > max_count:
            yield (
                f"rollout.engine.count ({engine.count}): a colocated engine shares the devices "
                f"of {engine.tensor_parallel} of the {num_workers} learner workers "
                "(rollout.engine.tensor_parallel, learner.num_workers). Set "
                f"rollout.engine.count to at most {max_count}, or placement.mode to dedicated."
            )
        if is_colocated and self.rollout.mode != "sync":
            yield (
                f"rollout.mode ({self.rollout.mode}): samples while the learner updates, but "
                "colocated engines take turns with the learner. Set placement.mode to dedicated "
                "(or to {engine: dedicated}), or rollout.mode to sync."
            )
        yield from engine.problems_of_dtype(self.model.dtype)
        if engine.low_precision and self.pushes_adapter:
            key, value = engine.low_precision
            yield (
                f"{key} ({value}): is untested, and so refused, with adapters in the engines. Set "
                "model.lora.push to merged."
            )
        if engine.speculation.kind != "none" and self.pushes_adapter:
            yield (
                f"rollout.engine.speculation.kind ({engine.speculation.kind}): is untested, and "
                "so refused, with adapters in the engines. Set model.lora.push to merged."
            )
        if self.learner.use_gpu != "auto":  # auto is checked once the GPUs are known
            try:
                engine.resolved_transport(
                    colocated=is_colocated,
                    use_gpu=self.learner.use_gpu,
                    share_gpus=self.engines_share_gpus,
                )
            except ConfigError as error:
                yield str(error)

    def _problems_of_replicas(self) -> Iterator[str]:
        strategy, num_workers = self.placement.strategy, self.learner.total_workers
        frozen, engine = self.placement.frozen, self.rollout.engine
        sections: dict[RoleKind, tuple[str, EngineSection | FrozenSection]] = {
            "engine": ("rollout.engine", engine),
            "reference": ("placement.frozen.reference", frozen.reference),
            "reward": ("placement.frozen.reward", frozen.reward),
            "judge": ("placement.frozen.judge", frozen.judge),
        }
        for role, (section_key, replica) in sections.items():
            key, size = f"{section_key}.tensor_parallel", replica.tensor_parallel
            is_colocated = self.placement.group_of(role) == "colocated"
            if size > 1 and is_colocated and strategy == "STRICT_SPREAD":
                yield (
                    f"placement.strategy ({strategy}): every learner worker has its own node, "
                    f"but {size} of them share a replica ({key}). Set placement.strategy to "
                    "PACK, or placement.mode to dedicated for it."
                )
            share = getattr(self.placement.gpus, role)
            if role == "engine" and self.engines_share_gpus and engine.gpu_memory_fraction >= share:
                yield (
                    f"rollout.engine.gpu_memory_fraction ({engine.gpu_memory_fraction:g}): "
                    f"engines share a GPU (placement.gpus.engine: {share:g}), and each also uses "
                    f"memory for the CUDA runtime. Set it below {share:g}, like "
                    f"{0.9 * share:.2g}."
                )
            if size > 1 and share < 1.0 and (not is_colocated or replica is engine):
                yield (
                    f"placement.gpus.{role} ({share:g}): a replica on several GPUs ({key} = "
                    f"{size}) uses whole GPUs. Set it to 1."
                )
            if isinstance(replica, EngineSection) or not is_colocated:
                continue
            replicas = 1 if replica.num_replicas == "auto" else replica.num_replicas
            if replicas * size > num_workers:
                yield (
                    f"placement.frozen.{role}.tensor_parallel ({size}): each colocated replica "
                    f"uses the devices of {size} learner workers, but there are {num_workers} of "
                    f"these (learner.num_workers) for {replicas} replicas "
                    f"(placement.frozen.{role}.num_replicas). Lower one of the two "
                    "placement.frozen keys, or placement.mode to dedicated for it."
                )


class PPOConfig(OnlineConfig):
    """Run file of the `ppo` recipe."""

    recipe: Literal["ppo"] = "ppo"  # pyright: ignore[reportIncompatibleVariableOverride]
    model: ModelSection  # pyright: ignore[reportIncompatibleVariableOverride]
    data: RatedDataSection  # pyright: ignore[reportIncompatibleVariableOverride]
    ppo: PPOSection = PPOSection()
    learner: LearnerSection = LearnerSection()  # pyright: ignore[reportIncompatibleVariableOverride]

    @property
    def reference(self) -> str | None:
        """Path of the reference model to deploy, or None if no deployment is needed.

        With `model.lora` and no model.reference, the learner with its adapter off is the reference.
        """
        if not self.ppo.needs_reference or self.model.is_own_reference:
            return None
        return self.model.reference or self.model.policy

    @property
    def curriculum(self) -> CurriculumSection | None:
        """Settings for choosing prompts by pass rate. None means shuffled epochs."""
        return self.data.curriculum

    @property
    def needs_critic(self) -> bool:
        """True if `ppo.advantage` uses values."""
        return self.ppo.needs_critic

    @property
    def is_refilled(self) -> bool:
        """True if `ppo.filter` is enabled: a step then samples more prompts to replace dropped
        groups.
        """
        return self.ppo.filter.enabled

    @property
    def rows_per_update(self) -> int:
        """Responses in a minibatch."""
        return self.ppo.minibatch_size

    @property
    def scheduled_steps(self) -> tuple[int, str]:
        """Number of steps that update the policy, and the config keys that determine it.

        If only the critic is trained, all steps count.
        """
        warmup = self.ppo.critic_warmup_steps
        if not 0 < warmup < self.num_steps:
            return self.num_steps, "num_steps"
        return self.num_steps - warmup, "num_steps - ppo.critic_warmup_steps"

    def _problems(self) -> Iterator[str]:
        yield from super()._problems()
        yield from self._problems_of_minibatches()
        yield from self._problems_of_the_critic()
        yield from self._problems_of_episodes()
        yield from self._problems_of_scores()
        yield from self._problems_of_corrections()

    def _problems_of_minibatches(self) -> Iterator[str]:
        responses, size = self.responses_per_step, self.ppo.minibatch_size
        if responses % size:
            divisor = next(d for d in range(min(size, responses), 0, -1) if responses % d == 0)
            yield (
                f"ppo.minibatch_size ({size}): must divide the responses of a step "
                f"(rollout.prompts_per_step x rollout.samples_per_prompt = {responses}). "
                f"Set ppo.minibatch_size to {divisor}."
            )
        is_one_update = self.ppo.num_epochs == 1 and responses == size
        has_no_change = is_one_update and self.ppo.old_log_probs == "learner"
        if self.ppo.policy_loss == "kl_cov" and has_no_change:
            yield (
                "ppo.policy_loss (kl_cov): penalises changes of log-probs between the updates "
                "of a step, but a step has only one update (ppo.num_epochs 1, "
                f"ppo.minibatch_size {size} of {responses} responses), and before it nothing has "
                "changed. Set ppo.minibatch_size lower, ppo.num_epochs to 2 or more, or "
                "ppo.policy_loss to clip_cov."
            )
        prompts = self.rollout.prompts_per_step
        critic_workers, total_workers = self.learner.critic_workers, self.learner.total_workers
        shares = self.learner.sequence_parallel  # so many workers have the same rows
        if critic_workers and (total_workers > prompts * shares or critic_workers > size * shares):
            every = "every worker" if shares == 1 else f"every group of {shares} workers"
            yield (
                f"learner.critic_workers ({critic_workers}): {every} needs a prompt of each "
                f"step (learner.num_workers + learner.critic_workers = {total_workers}, "
                f"rollout.prompts_per_step = {prompts}) and a response of each minibatch "
                f"(ppo.minibatch_size = {size}). Lower it, or set it to 0."
            )
        rows = {"rollout.prompts_per_step": prompts, "ppo.minibatch_size": size}
        yield from self._idle_workers(rows)

    def _problems_of_the_critic(self) -> Iterator[str]:
        warmup, critic_workers = self.ppo.critic_warmup_steps, self.learner.critic_workers
        if warmup >= self.num_steps and not self.learner.save_critic:
            yield (
                f"ppo.critic_warmup_steps ({warmup}): leaves no step of num_steps "
                f"({self.num_steps}) to the policy. Set num_steps to {warmup + 1} or more, "
                f"ppo.critic_warmup_steps lower, or learner.save_critic to true for a run that "
                f"trains only its critic."
            )
        is_stored_remotely = is_uri(self.storage_path) and self.learner.save_critic
        if critic_workers and is_stored_remotely and self.checkpoint.best_by:
            yield (
                f"learner.critic_workers ({critic_workers}): the critic is written by another "
                "worker than the policy, but best/ copies both from one disk (storage_path: "
                f"{self.storage_path}). Set checkpoint.best_by to null, learner.save_critic to "
                "false, or storage_path to a folder that all nodes see."
            )

    def _problems_of_episodes(self) -> Iterator[str]:
        shaping, limit = self.ppo.shaping, self.rollout.max_response_tokens
        if self.rollout.has_agent:
            yield from self._problems_of_agents()
        names = ("normalize", "clip_low", "clip_high", "function")
        score_keys = [f"ppo.shaping.{name}" for name in names]
        answers_turns = self.rollout.is_episodic and not self.rollout.has_agent
        credits_turns = not self.ppo.needs_group or self.ppo.advantage == "gigpo"
        is_credited_by_turn = answers_turns and credits_turns
        for key, value in self.set_keys(*score_keys) if is_credited_by_turn else ():
            yield (
                f"{key} ({value}): changes the score of a whole episode, but ppo.advantage: "
                f"{self.ppo.advantage} assigns credit by the rewards of its turns. Remove it, "
                "and scale the environment's rewards."
            )
        if self.ppo.advantage == "gigpo" and not answers_turns:
            yield (
                "ppo.advantage (gigpo): compares the turns of episodes with an environment. Set "
                "rollout.environment to a class whose turns have rewards, or ppo.advantage to grpo."
            )
        buffer, key = shaping.overlong_tokens(limit), "ppo.shaping.overlong_buffer_tokens"
        if buffer is not None and self.rollout.is_episodic:
            yield (
                f"{key} ({shaping.overlong_buffer_tokens}): counts only the policy's tokens, but "
                f"rollout.max_episode_tokens ({limit}) also limits the environment's texts. Set "
                f"{key} to null, and penalise length in the episode's score."
            )
        elif buffer is not None and buffer > limit:
            yield (
                f"{key} ({buffer}): must be at most rollout.max_new_tokens ({limit}). "
                f"Set {key} to auto."
            )

    def _problems_of_agents(self) -> Iterator[str]:
        agent = "rollout.agent" if self.rollout.agent else self.rollout.environment
        held_out = {
            "eval.function": self.eval.function,
            "eval.prompts.function": next(iter(functions_of(self.eval.prompts).values()), None),
        }
        score_sources = self.judges | {key: value for key, value in held_out.items() if value}
        for key, value in score_sources.items():
            yield (
                f"{key} ({value}): scores single responses, but an episode of {agent} may have "
                f"several, with one score that the agent returns. Remove {key}."
            )
        if not self.ppo.needs_group:
            return
        if self.ppo.has_kl_in_reward:
            yield (
                "ppo.kl.placement (reward): the KL of a response is subtracted from its score, "
                f"but an episode of {agent} may have several responses with one score. Set "
                "ppo.kl.placement to loss."
            )
        names = ("truncated_score", "truncated_scale", "function")
        for key, value in self.set_keys(*(f"ppo.shaping.{name}" for name in names)):
            yield (
                f"{key} ({value}): changes the score of a single response, but an episode of "
                f"{agent} may have several with one score. Remove it, and apply it in the "
                "agent's score."
            )

    def _problems_of_scores(self) -> Iterator[str]:
        for index, entry in enumerate(self.model.reward or ()):
            if self.ppo.advantage == "gdpo" and entry.weight != 1.0:
                yield (
                    f"model.reward.{index}.weight ({entry.weight:g}): weights the score, but "
                    "ppo.advantage: gdpo trains on the parts of the score. Remove it, and set "
                    "ppo.part_weights."
                )
        samples, horizon = self.rollout.samples_per_prompt, self.ppo.kl.horizon
        compared_by = f"ppo.advantage: {self.ppo.advantage}" if self.ppo.needs_group else None
        compared_by = compared_by or ("ppo.filter.enabled" if self.ppo.filter.enabled else None)
        if compared_by and samples < 2:
            yield (
                f"rollout.samples_per_prompt ({samples}): {compared_by} compares the samples of a "
                "prompt. Set rollout.samples_per_prompt to 2 or more."
            )
        if self.ppo.advantage == "pass_at_k" and self.ppo.pass_k > samples >= 2:
            yield (
                f"ppo.pass_k ({self.ppo.pass_k}): the best of this many samples counts, but "
                f"rollout.samples_per_prompt is {samples}. Set ppo.pass_k to at most {samples}."
            )
        if horizon is not None and horizon <= MAX_KL_ERROR * self.responses_per_step:
            yield (
                f"ppo.kl.horizon ({horizon:g}): must be above {MAX_KL_ERROR} x the responses of a "
                f"step ({self.responses_per_step}), or the coefficient could turn negative. "
                f"Set ppo.kl.horizon to {self.responses_per_step} or more."
            )

    def _problems_of_corrections(self) -> Iterator[str]:
        section, truncation = self.ppo.correction, self.rollout.truncation
        comparisons = (
            ("ppo.old_log_probs", self.ppo.old_log_probs, "learner"),
            ("ppo.correction.kind", section.kind, "none"),
            ("ppo.correction.token_veto", section.token_veto, "null"),
            ("ppo.correction.off_policy_mask", section.off_policy_mask, "null"),
        )
        active = [
            comparison
            for comparison in comparisons
            if comparison[1] not in ("learner", "none", None)
        ]
        if truncation and active:
            key, value, off = active[0]
            truncation_key, limit = truncation
            neutral = {"rollout.top_p": "1", "rollout.top_k": "null", "rollout.min_p": "0"}[
                truncation_key
            ]
            yield (
                f"{key} ({value}): compares the engine's log-probs with the learner's, but "
                f"{truncation_key} ({limit:g}) truncates the engine's distribution. Set "
                f"{truncation_key} to {neutral}, or {key} to {off}."
            )
        low_precision = self.rollout.engine.low_precision
        if low_precision and not self.ppo.allows_for_staleness:
            key, value = low_precision
            yield (
                f"{key} ({value}): engine and learner then give other log-probs to the same "
                "tokens, and ppo.correction.kind (none) does not correct that. Set "
                "ppo.correction.kind to tis, or another kind."
            )
        max_staleness, staleness_bound = section.max_staleness, self.rollout.staleness
        if max_staleness is not None and max_staleness >= staleness_bound:
            yield (
                f"ppo.correction.max_staleness ({max_staleness}): no token is staler than "
                f"{staleness_bound} (rollout.mode {self.rollout.mode}, rollout.max_staleness). "
                "Lower it, or set it to null."
            )
