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
from raypo.ppo.masked import keep, masked_sum
from raypo.ppo.surrogates import Surrogate
from raypo.types import Experience


@dataclass(frozen=True)
class StepCounts:
    """Counts of one optimizer step over all workers."""

    tokens: float
    """Sampled tokens."""
    sequences: float
    """Responses with at least one sampled token; an agent's episode is one, with all its rows."""
    responses: float
    """All responses, but for truncated ones where `ppo.mask_truncated` leaves them out."""
    positive_tokens: float = 0.0
    """Sampled tokens of positive examples."""

    @classmethod
    def of(cls, batch: Experience, ppo: PPOSection, workers: Workers) -> StepCounts:
        """The counts of the workers' shares together."""
        tokens, positive = batch.counted.sum(1).double(), positive_mask(batch, ppo)
        of_sample = tokens if batch.sample_tokens is None else batch.sample_tokens.double()
        sequences = tokens / of_sample.clamp(min=1.0)  # 1 over all rows of a sample
        is_left_out = batch.truncated & (of_sample == 0.0) & ppo.mask_truncated
        responses = batch.is_first_row & ~is_left_out
        counts = (tokens.sum(), sequences.sum(), responses.sum(), positive.sum())
        return cls(*workers.sum(as_tensor(*map(float, counts))).tolist())

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
    nll_loss: Tensor | None  # scalar, that of positive examples, likewise
    statistics: dict[str, Tensor]


def positive_mask(batch: Experience, ppo: PPOSection) -> Tensor:
    """[B, T] bool, the counted tokens of responses whose own score is at least `nll_min_score`."""
    return batch.counted & (batch.scores >= ppo.nll_min_score).unsqueeze(1)


def policy_objective(
    log_probs: Tensor,  # [B, T]
    entropy: Tensor,  # [B, T]
    batch: Experience,
    *,
    ppo: PPOSection,
    counts: StepCounts,
    max_new_tokens: int,
    kl_coef: float = 0.0,
    entropy_coef: float = 0.0,
    custom_surrogate: Surrogate | None = None,
) -> PolicyOutput:
    """The surrogate, less the entropy bonus, plus the KL term where `ppo.kl.placement` is loss.

    All three are aggregated alike. A correction's weights weigh the surrogate, and the KL term
    where it has importance weights. Without `old_log_probs` this is the first update, and they are
    the log-probs themselves. With `ppo.nll_coef` comes the mean negative log-likelihood over all
    tokens of positive examples.

    Args:
        kl_coef: This step's weight of the KL term.
        entropy_coef: This step's weight of the entropy bonus.
        custom_surrogate: In the place of `ppo.policy_loss`, where that names a function.
    """
    assert batch.advantages is not None
    mask = batch.counted
    aggregation: dict[str, Any] = {
        "aggregation": ppo.aggregation,
        "max_new_tokens": max_new_tokens,
        "sample_tokens": batch.sample_tokens,
        "normalizer": counts.normalizer(ppo.aggregation),
    }
    old_log_probs = log_probs.detach() if batch.old_log_probs is None else batch.old_log_probs
    surrogate, statistics = losses.policy_loss(
        log_probs,
        old_log_probs,
        batch.advantages,
        mask,
        kind=custom_surrogate or ppo.policy_loss,
        clip_low=ppo.clip_low,
        clip_high=ppo.clip_high,
        dual_clip=ppo.dual_clip,
        cispo_low=ppo.cispo_low,
        covariant=batch.covariant,
        covariance_kl=ppo.covariance.penalty,
        weights=batch.weights,
        **aggregation,
    )
    loss = surrogate
    if entropy_coef > 0.0:
        loss = loss - entropy_coef * losses.aggregate(entropy, mask, **aggregation)
    kl_loss = None
    if ppo.kl.placement == "loss" and kl_coef > 0.0:
        assert batch.ref_log_probs is not None
        terms = kl_loss_terms(
            log_probs,
            batch.ref_log_probs,
            mask,
            kind=ppo.kl.estimator,
            old_log_probs=old_log_probs if ppo.kl.importance_weights else None,
        )
        if ppo.kl.importance_weights and batch.weights is not None:
            terms = terms * keep(batch.weights, mask)
        divergence = losses.aggregate(terms, mask, **aggregation)
        loss, kl_loss = loss + kl_coef * divergence, divergence.detach()
    nll_loss = None
    if ppo.nll_coef > 0.0:
        positive, normalizer = positive_mask(batch, ppo), counts.positive_tokens
        likelihood = losses.aggregate(
            log_probs, positive, aggregation="token_mean", normalizer=normalizer
        )
        loss, nll_loss = loss - ppo.nll_coef * likelihood, -likelihood.detach()
    statistics["entropy"] = masked_sum(entropy.detach(), mask)
    return PolicyOutput(loss, surrogate.detach(), kl_loss, nll_loss, statistics)


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
        batch.counted,
        value_clip=ppo.value_clip,
        normalizer=counts.normalizer("token_mean"),
    )
