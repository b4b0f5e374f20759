"""What policy and critic minimise on one micro-batch; torch only, no DeepSpeed.

B responses, T response tokens. Losses are divided by the counts of the whole optimizer step over
all workers, so that the cut into micro-batches and workers cannot matter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from raypo.collectives import Workers, as_tensor
from raypo.config import PPOSection
from raypo.ppo import losses
from raypo.ppo.kl import kl_loss_terms
from raypo.ppo.masked import masked_sum
from raypo.types import Experience


@dataclass(frozen=True)
class StepCounts:
    """Counts of one optimizer step over all workers."""

    tokens: float
    """Sampled tokens."""
    sequences: float
    """Responses with at least one sampled token."""
    responses: float
    """All responses."""

    @classmethod
    def of(cls, batch: Experience, workers: Workers) -> StepCounts:
        """The counts of the workers' shares together."""
        mask = batch.response_mask
        counts = as_tensor(float(mask.sum()), float(mask.any(1).sum()), len(batch))
        return cls(*workers.sum(counts).tolist())

    def normalizer(self, aggregation: str) -> float:
        """What an aggregation (`raypo.ppo.losses.aggregate`) divides by, at least 1."""
        count = {
            "token_mean": self.tokens,
            "sequence_mean": self.sequences,
            "constant": self.responses,
        }[aggregation]
        return max(count, 1.0)


@dataclass(frozen=True)
class PolicyOutput:
    """One micro-batch's policy loss and the sums that are logged."""

    loss: Tensor  # scalar, with gradient
    policy_loss: Tensor  # scalar, only the surrogate
    kl_loss: Tensor | None  # scalar, the KL term before its coefficient; None: no such term
    statistics: dict[str, Tensor]


def policy_objective(
    log_probs: Tensor,  # [B, T]
    entropy: Tensor,  # [B, T]
    batch: Experience,
    *,
    ppo: PPOSection,
    counts: StepCounts,
    max_new_tokens: int,
    kl_coef: float = 0.0,
) -> PolicyOutput:
    """The surrogate, less the entropy bonus, plus the KL term where `ppo.kl.placement` is loss.

    All three are aggregated alike. A correction's weights weigh only the surrogate. Without
    `old_log_probs` this is the first update, and they are the log-probs themselves.

    Args:
        kl_coef: This step's weight of the KL term.
    """
    assert batch.advantages is not None
    mask = batch.response_mask
    aggregation: dict[str, Any] = {
        "aggregation": ppo.aggregation,
        "max_new_tokens": max_new_tokens,
        "normalizer": counts.normalizer(ppo.aggregation),
    }
    surrogate, statistics = losses.policy_loss(
        log_probs,
        log_probs if batch.old_log_probs is None else batch.old_log_probs,
        batch.advantages,
        mask,
        kind=ppo.policy_loss,
        clip_low=ppo.clip_low,
        clip_high=ppo.clip_high,
        dual_clip=ppo.dual_clip,
        weights=batch.weights,
        **aggregation,
    )
    loss = surrogate
    if ppo.entropy_coef > 0.0:
        loss = loss - ppo.entropy_coef * losses.aggregate(entropy, mask, **aggregation)
    kl_loss = None
    if ppo.kl.placement == "loss" and kl_coef > 0.0:
        assert batch.ref_log_probs is not None
        terms = kl_loss_terms(log_probs, batch.ref_log_probs, mask, kind=ppo.kl.estimator)
        divergence = losses.aggregate(terms, mask, **aggregation)
        loss, kl_loss = loss + kl_coef * divergence, divergence.detach()
    statistics["entropy"] = masked_sum(entropy.detach(), mask)
    return PolicyOutput(loss, surrogate.detach(), kl_loss, statistics)


def values_of(
    critic: Callable[..., Tensor], batch: Experience, *, with_last: bool
) -> tuple[Tensor, Tensor]:
    """The critic's values, and that of the state that a truncated response stopped in.

    Returns:
        values: [B, T].
        last_values: [B], 0 where the response ended by itself, or without `with_last`.
    """
    if not with_last:
        values = critic(batch)
        return values, values.new_zeros(len(batch))
    values = critic(batch, with_last=True)  # [B, T + 1]
    place = torch.arange(1, batch.response_mask.shape[1] + 1, device=values.device)
    after = torch.where(batch.response_mask, place, 0).amax(1, keepdim=True)  # [B, 1]
    last_values = values.gather(1, after).squeeze(1)
    return values[:, :-1], torch.where(batch.truncated, last_values, 0.0)


def value_objective(
    values: Tensor,  # [B, T]
    batch: Experience,
    *,
    ppo: PPOSection,
    counts: StepCounts,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The critic's loss of one micro-batch, a mean over tokens, and the sums that are logged."""
    assert batch.values is not None
    assert batch.returns is not None
    return losses.value_loss(
        values,
        batch.values,
        batch.returns,
        batch.response_mask,
        value_clip=ppo.value_clip,
        normalizer=counts.normalizer("token_mean"),
    )
