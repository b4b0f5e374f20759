"""The run file of the dpo recipe."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import Field

from raypo.config.base import Config
from raypo.config.sections import EvalSection
from raypo.config.sources import HeldOutSources
from raypo.config.supervised_config import (
    ExamplesLearnerSection,
    PairsSection,
    PolicyExamplesConfig,
    TrainedModelSection,
)

SMOOTHED = ("sigmoid", "sigmoid_norm", "robust", "simpo")
"""Losses that know a label smoothing."""


class DPOModelSection(TrainedModelSection):
    """The policy, and what it is compared with."""

    reference: str | None = None
    """The model whose log-probs the policy's are compared with, a Hugging Face folder or a hub id
    with the policy's tokenizer; null: the policy as it was at the start. It is asked once, before
    the first update."""


class PreferencesSection(PairsSection):
    """Where pairs, or responses with a verdict each, come from."""

    desirable_key: str | None = None
    """Loss kto: column that says whether the response of `response_key` is desirable (true or
    false, 1 or 0); null: rows are pairs, and a pair is two verdicts."""
    response_key: str = "response"
    """Column of the response where there is a `desirable_key`."""
    ref_chosen_key: str | None = None
    """Column of the reference's log-prob of the chosen response, its end included: a sum over
    tokens, nats. null: it is computed."""
    ref_rejected_key: str | None = None
    """The same of the rejected response."""

    def _problems(self) -> Iterator[str]:
        if (self.ref_chosen_key is None) != (self.ref_rejected_key is None):
            missing = "ref_chosen_key" if self.ref_chosen_key is None else "ref_rejected_key"
            yield (
                f"data.{missing} (None): the reference's log-probs are given of both responses or "
                f"of none. Set data.{missing}, or the other one to null."
            )


class DPOSection(Config):
    """How a policy learns from preferences."""

    section = "dpo."

    loss: Literal["sigmoid", "sigmoid_norm", "robust", "hinge", "ipo", "simpo", "kto"] = "sigmoid"
    """sigmoid: DPO (arXiv:2305.18290); sigmoid_norm: of rewards per token (arXiv:2411.15124);
    robust: for pairs of which a share `label_smoothing` is swapped (arXiv:2403.00409); hinge
    (arXiv:2305.10425); ipo (arXiv:2310.12036), per token; simpo: per token and without a reference
    (arXiv:2405.14734); kto: from single verdicts (arXiv:2402.01306)."""
    beta: float = Field(default=0.1, gt=0.0)
    """Weight of a log-ratio in the reward, the larger the closer to the reference; simpo's paper
    takes 2 to 10."""
    label_smoothing: float = Field(default=0.0, ge=0.0, lt=0.5)
    """Share of the pairs that is taken to be swapped; of sigmoid (conservative DPO), sigmoid_norm,
    robust and simpo."""
    simpo_gamma: float = Field(default=0.5, ge=0.0)
    """simpo: by how much a chosen response's reward shall exceed a rejected one's."""
    sft_coef: float = Field(default=0.0, ge=0.0)
    """Weight of the negative log-likelihood of the chosen responses, a mean over each one's tokens
    (arXiv:2404.19733, there 1); not of kto."""
    desirable_weight: float = Field(default=1.0, ge=0.0)
    """kto: weight of desirable responses."""
    undesirable_weight: float = Field(default=1.0, ge=0.0)
    """kto: weight of undesirable ones; the paper keeps desirable_weight x their number between 1
    and 4/3 of undesirable_weight x the others'."""

    @property
    def needs_reference(self) -> bool:
        """Whether the loss compares the policy with a reference."""
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
    """The workers that train on preferences."""

    lr: float = Field(default=1e-6, ge=0.0)
    """Highest learning rate (AdamW)."""


class DPOEvalSection(EvalSection):
    """Held-out prompts, judged as the run goes, and held-out pairs."""

    pairs: HeldOutSources | None = None
    """Sources like data.prompts, with the same columns: loss, accuracy and rewards of
    held-out pairs or verdicts; null: none."""


class DPOConfig(PolicyExamplesConfig):
    """The whole run file of the `dpo` recipe: a policy from preferences, without a reward model."""

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
        """Whether held-out pairs are compared, or answers judged."""
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
        if not self.dpo.needs_reference:
            yield from self._idle("model.reference", f"dpo.loss {loss} has no reference", other)
        if self.data.ref_chosen_key is not None:
            why = "data.ref_chosen_key has what it says"
            yield from self._idle("model.reference", why, "remove data.ref_chosen_key")
