"""The run files of the recipes that learn from examples: sft, reward_model and dpo."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from raypo.config.base import Config
from raypo.config.learner_section import (
    WorkersSection,
)
from raypo.config.only_if import unless
from raypo.config.rollout_section import SamplingSection
from raypo.config.run_config import RecipeConfig
from raypo.config.sections import (
    DataSection,
    EvalSection,
    HeldOutSection,
    TrainedModelSection,
)
from raypo.config.sources import functions_of


class ExamplesLearnerSection(WorkersSection):
    """Learner workers that train on examples."""

    lr: float = Field(default=1e-5, ge=0.0)
    """Highest learning rate."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "linear"
    batch_size: int = Field(default=32, ge=1)
    """Examples per optimizer step, over all workers."""


class ResponsesSection(DataSection):
    """Prompts with responses."""

    response_key: str = "response"
    """Column of the response: a string, or one chat message of the assistant."""
    messages_key: str | None = None
    """Column of whole conversations, as lists of chat messages. The loss covers only the
    assistant's messages, each up to and including its stop token. `{% generation %}` marks in the
    chat template delimit these messages. Without such marks, the loss covers the text that each
    assistant message adds after the generation prompt. null means that rows have `prompt_key` and
    `response_key`."""
    max_response_tokens: int = Field(default=1024, ge=1)
    """Maximum response length in tokens, including the end of sequence. `too_long` applies to
    longer responses. The limit of a conversation is max_prompt_tokens plus this number."""


class PairsSection(DataSection):
    """Prompts with pairs of responses."""

    chosen_key: str = "chosen"
    """Column of the better response: a string, or one chat message of the assistant."""
    rejected_key: str = "rejected"
    """Column of the worse response."""
    margin_key: Annotated[str | None, unless("dpo.loss", "ipo", "kto")] = None
    """Column of the margin by which the chosen response is better (arXiv:2307.09288, eq. 2). null
    means margin 0."""
    max_response_tokens: int = Field(default=1024, ge=1)
    """Maximum response length in tokens, including the end of sequence. `too_long` applies to
    longer responses."""


class RewardModelSection(Config):
    """Training of a reward model on pairs."""

    centering_coef: float = Field(default=0.0, ge=0.0)
    """Coefficient of the mean squared sum of a pair's two scores, which keeps scores centred around
    zero (arXiv:2312.09244). 0 means no such term."""


class ExamplesConfig(RecipeConfig):
    """Base class of the run files of recipes that learn from examples."""

    num_epochs: float | None = Field(default=None, gt=0.0)
    """Passes over the examples, as an alternative to `num_steps`. `num_steps` is then computed when
    the run starts. The number of examples in an epoch is the number of rows in data.prompts. null
    means that `num_steps` sets the length."""
    model: TrainedModelSection
    data: ResponsesSection | PairsSection
    learner: ExamplesLearnerSection = ExamplesLearnerSection()  # pyright: ignore[reportIncompatibleVariableOverride]

    @property
    def scheduled_steps(self) -> tuple[int, str] | None:
        """Number of steps in the learning-rate schedule, and the config keys that determine it.

        The result is None if `num_epochs` is set, because the number of steps is then computed at
        the start of the run.
        """
        return super().scheduled_steps if self.num_epochs is None else None

    def _problems(self) -> Iterator[str]:
        yield from super()._problems()
        learner, data = self.learner, self.data
        yield from self._idle_workers({"learner.batch_size": learner.batch_size})
        sources = {"data.prompts": data.prompts, "eval.pairs": getattr(self.eval, "pairs", None)}
        if not isinstance(self.eval, EvalSection):
            sources["eval.prompts"] = self.eval.prompts
        for key, entries in sources.items():
            if functions := functions_of(entries):
                yield (
                    f"{key}.function ({next(iter(functions.values()))}): has no effect, because "
                    f"the recipe {self.recipe} trains on these rows without sampling responses. "
                    "Remove it."
                )
        count, times = (
            (2, "2 x ") if isinstance(data, PairsSection) else (1, "")
        )  # both responses share a prompt
        longest = data.max_prompt_tokens + count * data.max_response_tokens
        keys = f"data.max_prompt_tokens + {times}data.max_response_tokens"
        yield from learner.no_room_for(longest, keys)


class PolicyExamplesConfig(ExamplesConfig):
    """Base class of the run files of recipes that train a policy on examples."""

    rollout: SamplingSection = SamplingSection()
    eval: EvalSection = EvalSection()  # pyright: ignore[reportIncompatibleVariableOverride]

    def _problems(self) -> Iterator[str]:
        yield from super()._problems()
        yield from self.rollout.engine.problems_of_dtype(self.model.dtype)

    @property
    def max_model_len(self) -> int:
        """Maximum number of tokens of a prompt and its response."""
        return self.data.max_prompt_tokens + self.rollout.max_response_tokens

    @property
    def needs_engine(self) -> bool:
        """True if engines sample responses to held-out prompts, which a function scores."""
        judges = self.eval.function or functions_of(self.eval.prompts)
        return bool(self.eval.prompts and judges)


class SFTConfig(PolicyExamplesConfig):
    """Run file of the `sft` recipe: supervised fine-tuning on responses."""

    recipe: Literal["sft"] = "sft"  # pyright: ignore[reportIncompatibleVariableOverride]
    data: ResponsesSection  # pyright: ignore[reportIncompatibleVariableOverride]


class RewardModelConfig(ExamplesConfig):
    """Run file of the `reward_model` recipe: train a sequence classifier on pairs."""

    recipe: Literal["reward_model"] = "reward_model"  # pyright: ignore[reportIncompatibleVariableOverride]
    data: PairsSection  # pyright: ignore[reportIncompatibleVariableOverride]
    reward_model: RewardModelSection = RewardModelSection()
    eval: HeldOutSection = HeldOutSection()

    def _problems(self) -> Iterator[str]:
        yield from super()._problems()
        if self.learner.router_aux_coef:
            yield (
                f"learner.router_aux_coef ({self.learner.router_aux_coef}): is not supported for "
                "reward models. Set it to 0."
            )
