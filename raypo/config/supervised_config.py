"""The run files of the recipes that learn from examples: sft, reward_model and dpo."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from raypo.config.base import Config
from raypo.config.rollout_section import SamplingSection
from raypo.config.run_config import RecipeConfig
from raypo.config.sections import (
    Attention,
    DataSection,
    Dtype,
    EvalSection,
    LoraSection,
    Periodic,
    WorkersSection,
)
from raypo.config.sources import HeldOutSources, functions_of


class TrainedModelSection(Config):
    """The model that is trained."""

    policy: str
    """The model to start from: a Hugging Face folder or a hub id."""
    dtype: Dtype = "auto"
    """As PPO's `model.dtype`: bfloat16 on GPUs, float32 on CPUs, unless it is set."""
    attention: Attention = "auto"
    """Attention of all passes, as PPO's `model.attention` has it."""
    lora: LoraSection | None = None
    """Train an adapter (and a reward model's score head); {} for the defaults, null: all
    weights."""


class ExamplesLearnerSection(WorkersSection):
    """The workers that train on examples."""

    lr: float = Field(default=1e-5, ge=0.0)
    """Highest learning rate (AdamW)."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "linear"
    """The learning rate after the warm-up: constant, or down to `lr_floor` at num_steps, on a line
    or half a cosine."""
    batch_size: int = Field(default=32, ge=1)
    """Examples of one optimizer step, over all workers."""


class ResponsesSection(DataSection):
    """Where prompts and responses come from."""

    response_key: str = "response"
    """Column of the response: a text, or one chat message of the assistant."""
    messages_key: str | None = None
    """Column of whole conversations: chat messages, of which all of the assistant are learned, and
    no others; null: `prompt_key` and `response_key`. What the assistant wrote is what the chat
    template marks by `{% generation %}`, else what each of its messages adds behind the generation
    prompt. Each of its turns is learned up to the stop token behind it."""
    max_response_tokens: int = Field(default=1024, ge=1)
    """Longest response in tokens, its end included; longer ones follow `too_long`. A conversation
    may have as many as max_prompt_tokens and this together."""


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


class PairsEvalSection(Periodic):
    """Held-out pairs."""

    prompts: HeldOutSources | None = None
    """Sources like data.prompts, with the same columns; null: no evaluation."""
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

    num_epochs: float | None = Field(default=None, gt=0.0)
    """Passes over the examples, in place of `num_steps`, which follows from it when the run starts:
    an epoch is as many examples as data.prompts has rows. null: num_steps counts."""
    model: TrainedModelSection
    data: ResponsesSection | PairsSection
    learner: ExamplesLearnerSection = ExamplesLearnerSection()

    @property
    def scheduled_steps(self) -> tuple[int, str] | None:
        """None where `num_epochs` will say how many."""
        return super().scheduled_steps if self.num_epochs is None else None

    def _problems(self) -> Iterator[str]:
        yield from super()._problems()
        learner, data, evaluation = self.learner, self.data, vars(self)["eval"]
        if learner.num_workers > learner.batch_size:
            yield (
                f"learner.num_workers ({learner.num_workers}): every worker needs an example of "
                f"each step (learner.batch_size = {learner.batch_size}). Set learner.num_workers "
                f"to at most {learner.batch_size}."
            )
        sources = {"data.prompts": data.prompts, "eval.pairs": getattr(evaluation, "pairs", None)}
        if not isinstance(evaluation, EvalSection):
            sources["eval.prompts"] = evaluation.prompts
        for key, given in sources.items():
            if functions := functions_of(given):
                yield (
                    f"{key}.function ({next(iter(functions.values()))}): has no effect, nobody "
                    f"answers these rows, the recipe {self.recipe} learns from them. Remove it."
                )
        count, times = (2, "2 x ") if isinstance(data, PairsSection) else (1, "")  # one prompt
        longest = data.max_prompt_tokens + count * data.max_response_tokens
        keys = f"data.max_prompt_tokens + {times}data.max_response_tokens"
        yield from learner.no_room_for(longest, keys)


class PolicyExamplesConfig(ExamplesConfig):
    """What the run files of the recipes have in common that learn a policy from examples."""

    functions: ClassVar[tuple[str, ...]] = ("eval.function", "eval.prompts.function")

    rollout: SamplingSection = SamplingSection()
    eval: EvalSection = EvalSection()

    @property
    def needs_engine(self) -> bool:
        """Whether engines answer held-out prompts: a function judges the answers."""
        judges = self.eval.function or functions_of(self.eval.prompts)
        return bool(self.eval.prompts and judges)


class SFTConfig(PolicyExamplesConfig):
    """The whole run file of the `sft` recipe: supervised fine-tuning on responses."""

    recipe: Literal["sft"] = "sft"  # pyright: ignore[reportIncompatibleVariableOverride]
    data: ResponsesSection  # pyright: ignore[reportIncompatibleVariableOverride]


class RewardModelConfig(ExamplesConfig):
    """The whole run file of the `reward_model` recipe: a sequence classifier from pairs."""

    recipe: Literal["reward_model"] = "reward_model"  # pyright: ignore[reportIncompatibleVariableOverride]
    data: PairsSection  # pyright: ignore[reportIncompatibleVariableOverride]
    reward_model: RewardModelSection = RewardModelSection()
    eval: PairsEvalSection = PairsEvalSection()
