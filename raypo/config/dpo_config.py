"""The run file of the dpo recipe."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from raypo.config.base import Config
from raypo.config.fields import FUNCTION, PATH
from raypo.config.only_if import SET, only_if, unless
from raypo.config.sections import EvalSection, TrainedModelSection
from raypo.config.sources import HeldOutSources, path_of
from raypo.config.supervised_config import (
    ExamplesLearnerSection,
    PairsSection,
    PolicyExamplesConfig,
)

PAIR_LOSSES = ("sigmoid", "sigmoid_norm", "robust", "hinge", "ipo", "simpo")
"""Losses of pairs of responses."""


class DPOModelSection(TrainedModelSection):
    """The policy and its reference model."""

    reference: Annotated[
        str | None, PATH, unless("dpo.loss", "simpo"), only_if("data.ref_chosen_key", None)
    ] = None
    """Reference model of the log-ratios: a Hugging Face folder or a hub id, with the policy's
    tokenizer. Its log-probs are computed once, before the first update. null means the initial
    policy."""


class PreferencesSection(PairsSection):
    """Prompts with pairs of responses, or with single responses and a verdict."""

    desirable_key: Annotated[str | None, only_if("dpo.loss", "kto")] = None
    """Column of the verdict: true or 1 if the response in `response_key` is
    desirable, else false or 0. null means that rows are pairs. Each pair then counts as two
    verdicts."""
    response_key: Annotated[str, only_if("desirable_key", SET)] = "response"
    """Column of the response."""
    ref_chosen_key: Annotated[str | None, unless("dpo.loss", "kto", "simpo")] = None
    """Column of the reference model's log-prob of the chosen response, in nats: the sum over its
    tokens, including the end of sequence. null means that the run computes it."""
    ref_rejected_key: str | None = None
    """Column of the reference model's log-prob of the rejected response, like `ref_chosen_key`."""

    def _problems(self) -> Iterator[str]:
        if (self.ref_chosen_key is None) != (self.ref_rejected_key is None):
            missing = "ref_chosen_key" if self.ref_chosen_key is None else "ref_rejected_key"
            yield (
                f"data.{missing} (None): the reference's log-probs must be given for both "
                f"responses or for neither. Set data.{missing}, or set the other key to null."
            )


class DPOSection(Config):
    """Preference loss."""

    loss: Literal["sigmoid", "sigmoid_norm", "robust", "hinge", "ipo", "simpo", "kto"] = "sigmoid"
    """Preference loss. sigmoid: DPO (arXiv:2305.18290); sigmoid_norm: DPO with rewards per token
    (arXiv:2411.15124); robust: DPO for data in which a fraction `label_smoothing` of the pairs is
    swapped (arXiv:2403.00409); hinge: SLiC (arXiv:2305.10425); ipo: squared error of log-ratios per
    token (arXiv:2310.12036); simpo: rewards per token, without a reference (arXiv:2405.14734); kto:
    responses judged one by one as desirable or undesirable (arXiv:2402.01306)."""
    beta: float = Field(default=0.1, gt=0.0)
    """Factor on the log-ratio in the implicit reward. A larger factor keeps the policy closer to
    the reference. The SimPO paper uses 2 to 10."""
    label_smoothing: Annotated[
        float, only_if("loss", "sigmoid", "sigmoid_norm", "robust", "simpo")
    ] = Field(default=0.0, ge=0.0, lt=0.5)
    """Assumed fraction of pairs with swapped responses. With sigmoid this is conservative DPO."""
    simpo_gamma: Annotated[float, only_if("loss", "simpo")] = Field(default=0.5, ge=0.0)
    """Target margin between the rewards of the chosen and the rejected response."""
    sft_coef: Annotated[float, only_if("loss", *PAIR_LOSSES)] = Field(default=0.0, ge=0.0)
    """Coefficient of an SFT term: the negative log-likelihood of each chosen response, averaged
    over its tokens (arXiv:2404.19733, which uses 1). 0 means no such term."""
    desirable_weight: Annotated[float, only_if("loss", "kto")] = Field(default=1.0, ge=0.0)
    """Loss weight of desirable responses."""
    undesirable_weight: Annotated[float, only_if("loss", "kto")] = Field(default=1.0, ge=0.0)
    """Loss weight of undesirable responses. The paper keeps (desirable_weight * number of
    desirable) / (undesirable_weight * number of undesirable) between 1 and 4/3."""

    @property
    def needs_reference(self) -> bool:
        """True if the loss compares the policy with a reference."""
        return self.loss != "simpo"


class DPOLearnerSection(ExamplesLearnerSection):
    """Learner workers that train on preferences."""

    lr: float = Field(default=1e-6, ge=0.0)
    """Highest learning rate."""


class DPOEvalSection(EvalSection):
    """Evaluation on held-out prompts, whose responses are scored, and on held-out pairs."""

    function: Annotated[str | None, FUNCTION] = None
    """Reward function for the responses to held-out prompts. `eval/score_mean` is the mean of its
    scores. `eval.prompts` needs it, here or beside each source."""
    pairs: HeldOutSources | None = None
    """Held-out sources of pairs or verdicts, written as in data.prompts and with the same columns.
    Their loss, accuracy and rewards are measured. null means no such evaluation."""


class DPOConfig(PolicyExamplesConfig):
    """Run file of the `dpo` recipe: train a policy on preferences, without a reward model."""

    recipe: Literal["dpo"] = "dpo"  # pyright: ignore[reportIncompatibleVariableOverride]
    model: DPOModelSection  # pyright: ignore[reportIncompatibleVariableOverride]
    data: PreferencesSection  # pyright: ignore[reportIncompatibleVariableOverride]
    dpo: DPOSection = DPOSection()
    learner: DPOLearnerSection = DPOLearnerSection()  # pyright: ignore[reportIncompatibleVariableOverride]
    eval: DPOEvalSection = DPOEvalSection()  # pyright: ignore[reportIncompatibleVariableOverride]

    @property
    def measures_held_out(self) -> bool:
        """True if held-out pairs are compared or held-out responses are scored."""
        return bool(self.eval.pairs) or self.needs_engine

    def _problems(self) -> Iterator[str]:
        yield from super()._problems()
        if self.eval.prompts and not self.needs_engine:
            sources = ", ".join(map(path_of, self.eval.prompts))
            yield (
                f"eval.prompts ({sources}): no function scores the answers. Set eval.function, or "
                "set eval.pairs instead if these are held-out pairs."
            )
