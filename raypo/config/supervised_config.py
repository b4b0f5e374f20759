"""The run files of the recipes that learn from examples: sft and reward_model."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from raypo.config.base import Config
from raypo.config.rollout_section import SamplingSection
from raypo.config.run_config import RecipeConfig
from raypo.config.sections import (
    DataSection,
    EvalSection,
    LoraSection,
    PromptSources,
    WorkersSection,
)


class TrainedModelSection(Config):
    """The model that is trained."""

    policy: str
    """The model to start from: a Hugging Face folder or a hub id."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """float32 is exact; bfloat16 is faster where the processor has it."""
    attention: Literal[
        "auto", "eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3"
    ] = "auto"
    """Of all passes of the torch models. auto: raypo's own over packed rows, where a prompt is read
    once and nothing is padded: flex attention on GPUs, SDPA on CPUs; transformers' choice for a
    model that it cannot stand in for. A name: transformers' attention of that name, which reads a
    padded row for each response. flash_attention_2 and 3 need GPUs and packages of their own."""
    lora: LoraSection | None = None
    """Train an adapter (and a reward model's score head); {} for the defaults, null: all
    weights."""


class ExamplesLearnerSection(WorkersSection):
    """The workers that train on examples."""

    lr: float = Field(default=1e-5, ge=0.0)
    """Highest learning rate (AdamW)."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "linear"
    """After the warm-up: constant, or down to zero at num_steps, on a line or half a cosine."""
    lr_warmup_steps: int = Field(default=0, ge=0)
    """Steps on which the learning rate rises from zero on a line."""
    batch_size: int = Field(default=32, ge=1)
    """Examples of one optimizer step, over all workers."""


class ResponsesSection(DataSection):
    """Where prompts and responses come from."""

    response_key: str = "response"
    """Column of the response: a text, or one chat message of the assistant."""
    max_response_tokens: int = Field(default=1024, ge=1)
    """Longest response in tokens, its end included; longer ones follow `too_long`."""


class PairsSection(DataSection):
    """Where pairs of responses come from."""

    chosen_key: str = "chosen"
    """Column of the better response: a text, or one chat message of the assistant."""
    rejected_key: str = "rejected"
    """Column of the worse one."""
    margin_key: str | None = None
    """Column of how much better the chosen one is (arXiv:2307.09288, eq. 2); null: 0."""
    max_response_tokens: int = Field(default=1024, ge=1)
    """Longest response in tokens, its end included; longer ones follow `too_long`."""


class PairsEvalSection(Config):
    """Held-out pairs."""

    prompts: PromptSources | None = None
    """Files or data sets like data.prompts, with the same keys; null: no evaluation."""
    every: Annotated[int, Field(ge=1)] = 50
    """Steps between evaluations; the first is before the first update, the last after the last."""


class RewardModelSection(Config):
    """How a reward model learns from pairs."""

    centering_coef: float = Field(default=0.0, ge=0.0)
    """Weight of the mean square of a pair's summed scores, which keeps them around zero
    (arXiv:2312.09244)."""


class ExamplesConfig(RecipeConfig):
    """What the run files of the recipes that learn from examples have in common."""

    paths: ClassVar[tuple[str, ...]] = ("model.policy", "data.prompts", "eval.prompts")

    model: TrainedModelSection
    data: ResponsesSection | PairsSection
    learner: ExamplesLearnerSection = ExamplesLearnerSection()

    @model_validator(mode="after")
    def _every_worker_has_work(self) -> Self:
        learner = self.learner
        if learner.num_workers > learner.batch_size:
            raise ValueError(
                f"learner.num_workers ({learner.num_workers}): every worker needs an example of "
                f"each step (learner.batch_size = {learner.batch_size}). Set learner.num_workers "
                f"to at most {learner.batch_size}."
            )
        return self

    @model_validator(mode="after")
    def _longest_sequence_fits_a_microbatch(self) -> Self:
        longest = self.data.max_prompt_tokens + self.data.max_response_tokens
        self.learner.require_room_for(longest, "data.max_prompt_tokens + data.max_response_tokens")
        return self


class SFTConfig(ExamplesConfig):
    """The whole run file of the `sft` recipe: supervised fine-tuning on responses."""

    functions: ClassVar[tuple[str, ...]] = ("eval.function",)

    recipe: Literal["sft"] = "sft"  # pyright: ignore[reportIncompatibleVariableOverride]
    data: ResponsesSection  # pyright: ignore[reportIncompatibleVariableOverride]
    rollout: SamplingSection = SamplingSection()
    eval: EvalSection = EvalSection()


class RewardModelConfig(ExamplesConfig):
    """The whole run file of the `reward_model` recipe: a sequence classifier from pairs."""

    recipe: Literal["reward_model"] = "reward_model"  # pyright: ignore[reportIncompatibleVariableOverride]
    data: PairsSection  # pyright: ignore[reportIncompatibleVariableOverride]
    reward_model: RewardModelSection = RewardModelSection()
    eval: PairsEvalSection = PairsEvalSection()
