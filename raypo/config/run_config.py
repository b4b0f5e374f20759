"""The run files: one root class a recipe, and the rules between sections."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from raypo.config.base import RunFile
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
)

NUMBERS_DO_NOT_DEPEND_ON = (
    "checkpoint",
    "cluster",
    "learner.max_skipped_updates",
    "learner.save_critic",
    "logging",
    "max_failures",
    "placement",
    "storage_path",
)
"""Sections and keys that may change when a run is resumed."""
MAX_KL_ERROR = 0.2
"""Of the adaptive KL controller: `raypo.ppo.kl.MAX_RELATIVE_ERROR`, from a floor above."""


class RecipeConfig(RunFile):
    """What the run files of all recipes have in common."""

    name: str = Field(min_length=1, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Run folder: <storage_path>/<name>/."""
    recipe: str
    """What the file is of: ppo, sft or reward_model; without the key it is ppo."""
    seed: int = Field(default=0, ge=0)
    """Seed of sampling, data order, dealing and new weights."""
    num_steps: int = Field(default=40, ge=1)
    """ppo: one rollout batch and its updates; sft, reward_model: one optimizer step."""
    max_failures: int = Field(default=0, ge=-1)
    """How often a run whose learner worker or Ray Train controller is lost goes on from its last
    checkpoint by itself, as Ray's `FailureConfig(max_failures)` counts; -1: every time. An error
    that a worker raises (of a reward function, say) counts as its loss, and may come again. In a
    sweep each trial has as many."""
    checkpoint: CheckpointSection = CheckpointSection()
    placement: PlacementSection = PlacementSection()
    cluster: ClusterSection = ClusterSection()
    logging: LoggingSection = LoggingSection()

    @model_validator(mode="after")
    def _only_ppo_places_roles(self) -> Self:
        if self.recipe != "ppo" and self.placement.is_dedicated:
            raise ValueError(
                f"placement.mode (dedicated): the recipe {self.recipe} has nothing that could live "
                f"in a group of its own. Set placement.mode to colocated."
            )
        return self


class PPOConfig(RecipeConfig):
    """The whole run file of the `ppo` recipe; each part of the program gets its own section."""

    paths: ClassVar[tuple[str, ...]] = (
        "model.policy",
        "model.critic",
        "model.reward.path",
        "model.reference",
        "data.prompts",
        "eval.prompts",
    )
    functions: ClassVar[tuple[str, ...]] = ("reward.function", "eval.function")

    recipe: Literal["ppo"] = "ppo"  # pyright: ignore[reportIncompatibleVariableOverride]
    model: ModelSection
    data: DataSection
    reward: RewardSection = RewardSection()
    rollout: RolloutSection = RolloutSection()
    ppo: PPOSection = PPOSection()
    learner: LearnerSection = LearnerSection()
    eval: EvalSection = EvalSection()

    @property
    def responses_per_step(self) -> int:
        """Responses sampled in a step, over all workers."""
        return self.rollout.prompts_per_step * self.rollout.samples_per_prompt

    @property
    def reference(self) -> str | None:
        """Path of the model that a reference deployment holds; None: no deployment is needed.

        With `model.lora` the learner itself is the reference, its adapter off.
        """
        if not self.ppo.needs_reference or self.model.is_own_reference:
            return None
        return self.model.reference or self.model.policy

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
    def _every_worker_has_work(self) -> Self:
        fewest = min(self.rollout.prompts_per_step, self.ppo.minibatch_size)
        if self.learner.num_workers > fewest:
            raise ValueError(
                f"learner.num_workers ({self.learner.num_workers}): every worker needs a prompt of "
                f"each step (rollout.prompts_per_step = {self.rollout.prompts_per_step}) and a "
                f"response of each minibatch (ppo.minibatch_size = {self.ppo.minibatch_size}). "
                f"Set learner.num_workers to at most {fewest}."
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
        num_workers = self.learner.num_workers
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
        backend, temperature = self.placement.frozen.reference.backend, self.rollout.temperature
        if backend == "vllm" and temperature != 1.0 and self.reference:
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
            )
        return self

    @model_validator(mode="after")
    def _longest_sequence_fits_a_microbatch(self) -> Self:
        longest = self.data.max_prompt_tokens + self.rollout.max_new_tokens
        self.learner.require_room_for(longest, "data.max_prompt_tokens + rollout.max_new_tokens")
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
        section, top_p = self.ppo.correction, self.rollout.top_p
        if section.acts and top_p < 1.0:
            key, off = ("token_veto", "null") if section.kind == "none" else ("kind", "none")
            raise ValueError(
                f"ppo.correction.{key} ({getattr(section, key)}): compares the engine's log-probs "
                f"with the learner's, and rollout.top_p ({top_p:g}) makes the engine's those of a "
                f"truncated distribution. Set rollout.top_p to 1, or ppo.correction.{key} to {off}."
            )
        return self

    @model_validator(mode="after")
    def _the_overlong_buffer_fits_a_response(self) -> Self:
        limit = self.rollout.max_new_tokens
        buffer = self.ppo.shaping.overlong_tokens(limit)
        if buffer is not None and buffer > limit:
            raise ValueError(
                f"ppo.shaping.overlong_buffer_tokens ({buffer}): must be at most "
                f"rollout.max_new_tokens ({limit}). Set ppo.shaping.overlong_buffer_tokens to auto."
            )
        return self


def _largest_divisor(number: int, *, at_most: int) -> int:
    return next(d for d in range(min(at_most, number), 0, -1) if number % d == 0)
