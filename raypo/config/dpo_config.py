"""The run file of the dpo recipe."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import Field

from raypo.config.base import Config
from raypo.config.sections import EvalSection
from raypo.config.sources import HeldOutSources, path_of
from raypo.config.supervised_config import (
    ExamplesLearnerSection,
    PairsSection,
    PolicyExamplesConfig,
    TrainedModelSection,
)

SMOOTHED = ("sigmoid", "sigmoid_norm", "robust", "simpo")
"""Losses that support label smoothing."""


class DPOModelSection(TrainedModelSection):
    """The policy and its reference model."""

    reference: str | None = None
    """Reference model of the log-ratios: a Hugging Face folder or a hub id, with the policy's
    tokenizer. Its log-probs are computed once, before the first update. null means the initial
    policy."""


class PreferencesSection(PairsSection):
    """Prompts with pairs of responses, or with single responses and a verdict."""

    desirable_key: str | None = None
    """Column of the verdict for the loss kto: true or 1 if the response in `response_key` is
    desirable, else false or 0. null means that rows are pairs. Each pair then counts as two
    verdicts."""
    response_key: str = "response"
    """Column of the response, if there is a `desirable_key`."""
    ref_chosen_key: str | None = None
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

    section = "dpo."

    loss: Literal["sigmoid", "sigmoid_norm", "robust", "hinge", "ipo", "simpo", "kto"] = "sigmoid"
    """Preference loss. sigmoid: DPO (arXiv:2305.18290); sigmoid_norm: DPO with rewards per token
    (arXiv:2411.15124); robust: DPO for data in which a fraction `label_smoothing` of the pairs is
    swapped (arXiv:2403.00409); hinge: SLiC (arXiv:2305.10425); ipo: squared error of log-ratios per
    token (arXiv:2310.12036); simpo: rewards per token, without a reference (arXiv:2405.14734); kto:
    responses judged one by one as desirable or undesirable (arXiv:2402.01306)."""
    beta: float = Field(default=0.1, gt=0.0)
    """Factor on the log-ratio in the implicit reward. A larger factor keeps the policy closer to
    the reference. The SimPO paper uses 2 to 10."""
    label_smoothing: float = Field(default=0.0, ge=0.0, lt=0.5)
    """Assumed fraction of pairs with swapped responses. It is used by sigmoid (conservative DPO),
    sigmoid_norm, robust and simpo."""
    simpo_gamma: float = Field(default=0.5, ge=0.0)
    """simpo: target margin between the rewards of the chosen and the rejected response."""
    sft_coef: float = Field(default=0.0, ge=0.0)
    """Coefficient of an SFT term: the negative log-likelihood of each chosen response, averaged
    over its tokens (arXiv:2404.19733, which uses 1). kto does not support it. 0 means no such term.
    """
    desirable_weight: float = Field(default=1.0, ge=0.0)
    """kto: loss weight of desirable responses."""
    undesirable_weight: float = Field(default=1.0, ge=0.0)
    """kto: loss weight of undesirable responses. The paper keeps (desirable_weight * number of
    desirable) / (undesirable_weight * number of undesirable) between 1 and 4/3."""

    @property
    def needs_reference(self) -> bool:
        """True if the loss compares the policy with a reference."""
        return self.loss != "simpo"

    def _problems(self) -> Iterator[str]:
        reads = {
            "label_smoothing": SMOOTHED,
            "simpo_gamma": ("simpo",),
            "sft_coef": (*SMOOTHED, "hinge", "ipo"),
            "desirable_weight": ("kto",),
            "undesirable_weight": ("kto",),
        }
        for key, losses in reads.items():
            if self.loss not in losses:
                remedy = f"set dpo.loss to {' or '.join(losses)}"
                yield from self._idle(key, f"dpo.loss is {self.loss}", remedy)


class DPOLearnerSection(ExamplesLearnerSection):
    """Learner workers that train on preferences."""

    lr: float = Field(default=1e-6, ge=0.0)
    """Highest learning rate."""


class DPOEvalSection(EvalSection):
    """Evaluation on held-out prompts, whose responses are scored, and on held-out pairs."""

    function: str | None = None
    """Reward function for the responses to held-out prompts. `eval/score_mean` is the mean of its
    scores. `eval.prompts` needs it, here or beside each source."""
    pairs: HeldOutSources | None = None
    """Held-out sources of pairs or verdicts, written as in data.prompts and with the same columns.
    Their loss, accuracy and rewards are measured. null means no such evaluation."""


class DPOConfig(PolicyExamplesConfig):
    """Run file of the `dpo` recipe: train a policy on preferences, without a reward model."""

    paths: ClassVar[tuple[str, ...]] = (
        "model.policy",
        "model.reference",
        "data.prompts",
        "eval.prompts",
        "eval.pairs",
    )

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
        loss, other = self.dpo.loss, "choose another dpo.loss"
        for key, refused in (
            ("data.desirable_key", loss != "kto"),
            ("data.margin_key", loss in ("ipo", "kto")),
            ("data.ref_chosen_key", loss in ("kto", "simpo")),
        ):
            if refused:
                yield from self._idle(key, f"dpo.loss is {loss}", other)
        if self.eval.prompts and not self.needs_engine:
            sources = ", ".join(map(path_of, self.eval.prompts))
            yield (
                f"eval.prompts ({sources}): no function scores the answers. Set eval.function, or "
                "set eval.pairs instead if these are held-out pairs."
            )
        if not self.dpo.needs_reference:
            yield from self._idle("model.reference", f"dpo.loss {loss} has no reference", other)
        if self.data.ref_chosen_key is not None:
            why = "data.ref_chosen_key gives the reference's log-probs"
            yield from self._idle("model.reference", why, "remove data.ref_chosen_key")
