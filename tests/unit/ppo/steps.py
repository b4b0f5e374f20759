"""Random optimizer steps and how to cut them, for the tests of raypo.ppo."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, get_args

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from raypo.collectives import Workers
from raypo.config import CorrectionSection, KLSection, PPOSection
from raypo.config.ppo_subsections import CovarianceSection
from raypo.ppo.estimators import estimate_advantages
from raypo.ppo.objective import StepCounts, policy_objective, value_objective
from raypo.ppo.surrogates import SURROGATES, Surrogate
from raypo.types import Experience

few = settings(max_examples=10, deadline=None, derandomize=True)
"""Enough examples to find a slip, few enough for a second."""
fewer = settings(few, max_examples=3)
"""For a test that runs once a loss."""
seeds = st.integers(0, 10_000)
AGGREGATIONS = get_args(PPOSection.model_fields["aggregation"].annotation)
KL_KINDS = get_args(KLSection.model_fields["estimator"].annotation)
CORRECTIONS = get_args(CorrectionSection.model_fields["kind"].annotation)
MASK_RATIOS = get_args(CorrectionSection.model_fields["mask_ratio"].annotation)
NAN = float("nan")
INF = float("inf")


@dataclass(frozen=True)
class Step:
    """What the two losses take, for the responses of one optimizer step; all [B, T]."""

    log_probs: Tensor
    old_log_probs: Tensor
    advantages: Tensor
    weights: Tensor
    values: Tensor
    old_values: Tensor
    returns: Tensor
    covariant: Tensor
    mask: Tensor

    def of(self, rows: Tensor | slice) -> Step:
        """Some of the responses."""
        return Step(**{f.name: getattr(self, f.name)[rows] for f in fields(self)})

    def padded(self, columns: int, rubbish: float) -> Step:
        """The same responses, `columns` wider, `rubbish` wherever the mask is False."""
        wide = {
            f.name: torch.nn.functional.pad(getattr(self, f.name), (0, columns))
            for f in fields(self)
        }
        hidden = ~wide["mask"]
        return Step(
            **{
                k: v
                if k == "mask"
                else v.masked_fill(hidden, True if k == "covariant" else rubbish)
                for k, v in wide.items()
            }
        )

    def policy(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The positional arguments of `policy_loss`."""
        return self.log_probs, self.old_log_probs, self.advantages, self.mask

    def critic(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The positional arguments of `value_loss`."""
        return self.values, self.old_values, self.returns, self.mask


def random_mask(rows: int, width: int, generator: torch.Generator) -> Tensor:
    """[B, T] bool: padded right, with gaps as of an environment; row 1 has no sampled token."""
    lengths = torch.randint(1, width + 1, (rows, 1), generator=generator)
    mask = torch.arange(width) < lengths
    mask &= torch.rand(rows, width, generator=generator) < 0.8
    mask[0, 0] = True
    if rows > 1:
        mask[1] = False
    return mask


def random_step(seed: int, *, rows: int = 6, width: int = 7) -> Step:
    """A step whose ratios lie on both sides of the usual clips; float64."""
    generator = torch.Generator().manual_seed(seed)

    def normal() -> Tensor:
        return torch.randn(rows, width, generator=generator, dtype=torch.float64)

    old, values = -normal().abs() - 0.1, normal()
    return Step(
        log_probs=(old + 0.3 * normal()).requires_grad_(),
        old_log_probs=old,
        advantages=normal(),
        weights=normal().abs(),
        values=(values + 0.3 * normal()).requires_grad_(),
        old_values=values,
        returns=values + normal(),
        covariant=normal() > 0.5,
        mask=random_mask(rows, width, generator),
    )


def experience(mask: Tensor, **given: Any) -> Experience:
    """Responses with this mask and the given fields; all others are blank."""
    numbers = torch.zeros(len(mask), dtype=torch.int64)
    blank: dict[str, Any] = {
        "prompt_ids": numbers.unsqueeze(1),
        "prompt_mask": torch.ones(len(mask), 1, dtype=torch.bool),
        "response_ids": torch.zeros(mask.shape, dtype=torch.int64),
        "attention_mask": mask,
        "response_mask": mask,
        "rollout_log_probs": torch.zeros(mask.shape),
        "scores": torch.zeros(len(mask)),
        "group_index": torch.arange(len(mask)),
        "minibatch": numbers,
        "truncated": numbers.bool(),
        "weight_version": numbers,
    }
    return Experience(**blank | given)


def estimate(
    scores: Tensor,
    mask: Tensor,
    *,
    kind: str,
    kl: Tensor | None = None,
    kl_coef: float = 0.0,
    workers: Workers | None = None,
    **given: Any,
) -> tuple[Tensor, Tensor]:
    """`estimate_advantages` of fields of an experience and keys of `ppo`, whether idle or not."""
    keys = {key: given.pop(key) for key in PPOSection.model_fields if key in given}
    if kind == "gdpo":  # parts that follow from the score
        given.setdefault("parts", torch.stack([scores, scores.square()], 1))
        keys.setdefault("part_weights", {"plain": 1.0, "square": 0.5})
    if kl is not None:
        given |= {"old_log_probs": kl, "ref_log_probs": torch.zeros_like(kl)}
    section = KLSection(coef=float(kl is not None))
    keys.setdefault("pass_k", 2)
    ppo = PPOSection.model_construct(advantage=kind, kl=section, **keys)
    rows = experience(mask, scores=scores, **given)
    return estimate_advantages(rows, scores, ppo, workers or Workers(), kl_coef=kl_coef, step=1)


def policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    kind: str | Surrogate = "ppo",
    weights: Tensor | None = None,
    covariant: Tensor | None = None,
    rollout: Tensor | None = None,
    off_policy_mask: float | None = None,
    high_entropy: Tensor | None = None,
    covariance_kl: float = 1.0,
    max_new_tokens: int = 9,
    counts: StepCounts | None = None,
    workers: Workers | None = None,
    **keys: Any,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and statistics of `policy_objective` with the given keys of `ppo` and no other term."""
    covariance = CovarianceSection.model_construct(penalty=covariance_kl)
    correction = CorrectionSection(off_policy_mask=off_policy_mask)
    ppo = PPOSection.model_construct(covariance=covariance, correction=correction, **keys)
    rows = experience(
        mask,
        rollout_log_probs=torch.zeros(mask.shape) if rollout is None else rollout,
        old_log_probs=old_log_probs,
        advantages=advantages,
        weights=weights,
        covariant=covariant,
        high_entropy=high_entropy,
    )
    output = policy_objective(
        log_probs,
        torch.zeros_like(log_probs),
        rows,
        ppo=ppo,
        counts=counts or StepCounts.of(rows, ppo, workers or Workers()),
        max_new_tokens=max_new_tokens,
        surrogate=SURROGATES[kind] if isinstance(kind, str) else kind,
    )
    del output.statistics["entropy"]
    return output.loss, output.statistics


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    *,
    value_clip: float | None = None,
    workers: Workers | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and statistics of `value_objective`."""
    ppo = PPOSection.model_construct(value_clip=value_clip)
    rows = experience(mask, values=old_values, returns=returns)
    return value_objective(values, rows, ppo, StepCounts.of(rows, ppo, workers or Workers()))


def plain_advantages(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    *,
    gamma: float,
    gae_lambda: float | Tensor,
    last_values: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """GAE as one writes it first: a loop over time, in float64."""
    rewards, values = rewards.double(), values.double()
    advantages = torch.zeros_like(rewards)
    next_advantage = torch.zeros_like(rewards[:, 0])
    next_value = torch.zeros_like(next_advantage) if last_values is None else last_values.double()
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = delta + gamma * gae_lambda * next_advantage
        advantages[:, t] = torch.where(mask[:, t], advantage, 0.0)
        next_advantage = torch.where(mask[:, t], advantage, next_advantage)
        next_value = torch.where(mask[:, t], values[:, t], next_value)
    return advantages, torch.where(mask, advantages + values, 0.0)
