"""Losses of policy and critic on one microbatch; torch only, no DeepSpeed.

Notation: B responses, T response tokens. Losses are divided by the counts of the whole optimizer
step over all workers, so the split into microbatches and workers does not affect the sum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from raypo.collectives import Workers, as_tensor
from raypo.config import PPOSection
from raypo.ppo import losses
from raypo.ppo.corrections import off_policy_tokens
from raypo.ppo.kl import kl_loss_terms, log_ratio
from raypo.ppo.masked import keep, masked_sum
from raypo.ppo.surrogates import Surrogate, SurrogateInputs
from raypo.types import Experience


@dataclass(frozen=True)
class StepCounts:
    """Counts of one optimizer step over all workers."""

    tokens: float
    """Number of sampled tokens that count in the loss."""
    sequences: float
    """Number of responses with a counted token. All rows of an episode are one response."""
    responses: float
    """Number of responses. With `ppo.mask_truncated`, truncated responses do not count."""
    positive_tokens: float = 0.0
    """Number of tokens that count in the loss and belong to positive examples."""

    @classmethod
    def of(cls, batch: Experience, ppo: PPOSection, workers: Workers) -> StepCounts:
        """Count the tokens and responses of an optimizer step, summed over all workers."""
        tokens, positive = batch.counted.sum(1).double(), positive_mask(batch, ppo)
        sample_tokens = tokens if batch.sample_tokens is None else batch.sample_tokens.double()
        sequences = tokens / sample_tokens.clamp(min=1.0)  # 1 over all rows of a sample
        is_excluded = batch.truncated & (sample_tokens == 0.0) & ppo.mask_truncated
        responses = batch.is_first_row & ~is_excluded
        counts = (tokens.sum(), sequences.sum(), responses.sum(), positive.sum())
        return cls(*workers.sum(as_tensor(*map(float, counts))).tolist())

    def normalizer(self, aggregation: str) -> float:
        """Return the count by which an aggregation (`raypo.ppo.losses.aggregate`) divides."""
        return {
            "token_mean": self.tokens,
            "sequence_mean": self.sequences,
            "constant": self.responses,
        }[aggregation]


@dataclass(frozen=True)
class PolicyOutput:
    """Policy loss of one microbatch, and sums for metrics."""

    loss: Tensor  # scalar, with gradient
    policy_loss: Tensor  # scalar, of the surrogate without other terms
    kl_loss: Tensor | None  # scalar, the KL term without its coefficient; None if not used
    nll_loss: Tensor | None  # scalar, the NLL term without its coefficient; None if not used
    statistics: dict[str, Tensor]


def positive_mask(batch: Experience, ppo: PPOSection) -> Tensor:
    """Return a mask [B, T] of the tokens that count in the loss and belong to positive examples.

    A positive example is a response that scores at least `ppo.nll_min_score`.
    """
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
    surrogate: Surrogate,
) -> PolicyOutput:
    """Compute the policy loss: surrogate - entropy bonus + KL term (if `ppo.kl.placement` is loss).

    All three terms are aggregated in the same way. Weights of the rollout correction apply to the
    surrogate, and to the KL term if it uses importance weights. `ppo.correction.off_policy_mask`
    and `ppo.top_entropy_fraction` remove tokens from the surrogate only. With `ppo.nll_coef`, that
    coefficient times the mean negative log-likelihood of positive examples (`positive_mask`) is
    added. This mean is over tokens.

    Args:
        log_probs: Log-probs under the current policy, with gradient.
        entropy: Entropies of the current policy.
        batch: The microbatch, with advantages. If it has no `old_log_probs`, this is the step's
            first update, and `log_probs` serve as the old ones.
        ppo: The PPO section.
        counts: Counts of the optimizer step.
        max_new_tokens: Longest allowed response, in tokens.
        kl_coef: Coefficient of the KL term in this step.
        entropy_coef: Coefficient of the entropy bonus in this step.
        surrogate: The surrogate of `ppo.policy_loss`.
    """
    assert batch.advantages is not None
    mask = batch.counted
    aggregate = partial(
        losses.aggregate,
        mask=mask,
        aggregation=ppo.aggregation,
        max_new_tokens=max_new_tokens,
        sample_tokens=batch.sample_tokens,
        normalizer=counts.normalizer(ppo.aggregation),
    )
    old_log_probs = log_probs.detach() if batch.old_log_probs is None else batch.old_log_probs
    inputs = SurrogateInputs(
        log_probs=keep(log_probs, mask),
        log_ratio=log_ratio(log_probs, old_log_probs, mask),
        advantages=keep(batch.advantages, mask),
        mask=mask,
        clip_low=ppo.clip_low,
        clip_high=ppo.clip_high,
        dual_clip=ppo.dual_clip,
        cispo_low=ppo.cispo_low,
        covariant=batch.covariant,
        covariance_kl=ppo.covariance.penalty,
    )
    weights, off_policy = batch.weights, None
    if (threshold := ppo.correction.off_policy_mask) is not None:
        off_policy = off_policy_tokens(
            log_probs, batch.rollout_log_probs, batch.advantages, mask, threshold
        )
        weights = torch.where(off_policy, 0.0, 1.0 if weights is None else weights)
    if batch.high_entropy is not None:
        weights = torch.where(batch.high_entropy, 1.0 if weights is None else weights, 0.0)
    token_losses, statistics = losses.token_losses(inputs, surrogate, weights)
    if off_policy is not None:
        statistics["off_policy"] = off_policy.sum().double()
    loss = policy_loss = aggregate(token_losses)
    if entropy_coef > 0.0:
        loss = loss - entropy_coef * aggregate(entropy)
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
        kl = aggregate(terms)
        loss, kl_loss = loss + kl_coef * kl, kl.detach()
    nll_loss = None
    if ppo.nll_coef > 0.0:
        log_likelihood = losses.aggregate(
            log_probs,
            positive_mask(batch, ppo),
            aggregation="token_mean",
            normalizer=counts.positive_tokens,
        )
        loss, nll_loss = loss - ppo.nll_coef * log_likelihood, -log_likelihood.detach()
    statistics["entropy"] = masked_sum(entropy.detach(), mask)
    return PolicyOutput(loss, policy_loss.detach(), kl_loss, nll_loss, statistics)


def values_of(
    critic: Callable[..., Tensor], batch: Experience, *, with_last: bool
) -> tuple[Tensor, Tensor]:
    """Compute the critic's values, and the value of the last state of truncated responses.

    Returns:
        values: [B, T].
        last_values: [B], 0 for responses that ended by themselves. All are 0 if not `with_last`.
    """
    if not with_last:
        values = critic(batch)
        return values, values.new_zeros(len(batch))
    values = critic(batch, with_last=True)  # [B, T + 1]
    position = torch.arange(1, batch.response_mask.shape[1] + 1, device=values.device)
    end = torch.where(batch.response_mask, position, 0).amax(1, keepdim=True)  # [B, 1]
    last_values = values.gather(1, end).squeeze(1)
    return values[:, :-1], torch.where(batch.truncated, last_values, 0.0)


def value_objective(
    values: Tensor,  # [B, T]
    batch: Experience,
    ppo: PPOSection,
    counts: StepCounts,
) -> tuple[Tensor, losses.Stats]:
    """Compute the critic's loss of one microbatch, a mean over tokens, and sums for metrics."""
    assert batch.values is not None
    assert batch.returns is not None
    mask = batch.counted
    token_losses, stats = losses.value_losses(
        values, batch.values, batch.returns, mask, value_clip=ppo.value_clip
    )
    loss = losses.aggregate(token_losses, mask, aggregation="token_mean", normalizer=counts.tokens)
    return loss, stats
