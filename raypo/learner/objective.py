"""What policy and critic minimise on one micro-batch; torch only, no DeepSpeed.

B responses, T response tokens. Losses are divided by the counts of the whole optimizer step over
all workers, so that the cut into micro-batches and workers cannot matter.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from raypo.collectives import Workers, as_tensor
from raypo.config import PPOSection
from raypo.ppo import losses
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
        """What an aggregation divides by (MATH.md section 4), at least 1."""
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
    policy_loss: Tensor  # scalar, the surrogate alone
    statistics: dict[str, Tensor]


def policy_objective(
    log_probs: Tensor,  # [B, T]
    entropy: Tensor,  # [B, T]
    batch: Experience,
    *,
    ppo: PPOSection,
    counts: StepCounts,
    max_new_tokens: int,
) -> PolicyOutput:
    """The surrogate loss minus the entropy bonus of one micro-batch."""
    assert batch.old_log_probs is not None
    assert batch.advantages is not None
    normalizer = counts.normalizer(ppo.aggregation)
    surrogate, statistics = losses.policy_loss(
        log_probs,
        batch.old_log_probs,
        batch.advantages,
        batch.response_mask,
        kind=ppo.policy_loss,
        clip_low=ppo.clip_low,
        clip_high=ppo.clip_high,
        dual_clip=ppo.dual_clip,
        aggregation=ppo.aggregation,
        max_new_tokens=max_new_tokens,
        normalizer=normalizer,
    )
    loss = surrogate
    if ppo.entropy_coef > 0.0:
        loss = loss - ppo.entropy_coef * losses.aggregate(
            entropy,
            batch.response_mask,
            aggregation=ppo.aggregation,
            max_new_tokens=max_new_tokens,
            normalizer=normalizer,
        )
    entropy_sum = torch.where(batch.response_mask, entropy.detach(), 0.0).sum()
    return PolicyOutput(loss, surrogate.detach(), {**statistics, "entropy": entropy_sum})


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
