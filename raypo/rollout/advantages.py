"""From scores and log-probs to advantages and returns, with statistics over all workers.

B responses, T response tokens.
"""

from __future__ import annotations

import torch

from raypo.collectives import Workers
from raypo.config import PPOSection
from raypo.metrics.reduce import WeightedMeans
from raypo.ppo import advantages, kl, masked
from raypo.types import Experience


def with_advantages(
    experience: Experience, ppo: PPOSection, workers: Workers
) -> tuple[Experience, dict[str, float]]:
    """The experience with `advantages` and `returns`, and the figures of the step.

    Called by all workers together: whitening uses the moments of the whole batch.
    """
    assert experience.old_log_probs is not None
    assert experience.values is not None
    mask = experience.response_mask
    penalty, figures = _kl_to_reference(experience, ppo, workers)
    rewards = advantages.token_rewards(
        experience.scores, penalty, mask, kl_coef=ppo.kl.coef
    )  # [B, T]
    estimated, returns = advantages.generalized_advantages(
        rewards, experience.values, mask, gamma=ppo.gamma, gae_lambda=ppo.gae_lambda
    )
    moments = workers.sum(masked.masked_moments(estimated, mask))
    whitened = masked.masked_whiten(estimated, mask, moments=moments)
    means = WeightedMeans()
    tokens = float(mask.sum())
    means.add("ppo/return_mean", float(returns.double().sum()), tokens)
    means.add("ppo/value_mean", float(experience.values.double().sum()), tokens)
    figures |= means.reduce(workers)
    return experience.with_(advantages=whitened, returns=returns), figures


def _kl_to_reference(
    experience: Experience, ppo: PPOSection, workers: Workers
) -> tuple[torch.Tensor, dict[str, float]]:
    """Per-token penalty [B, T], and the KL to the reference by token and by response."""
    assert experience.old_log_probs is not None
    mask = experience.response_mask
    if not ppo.needs_reference:
        return torch.zeros(mask.shape), {}
    assert experience.ref_log_probs is not None
    means = WeightedMeans()
    plain = kl.kl_estimate(experience.old_log_probs, experience.ref_log_probs, kind="k1")
    total = float(torch.where(mask, plain, 0.0).double().sum())
    means.add("kl/ref_mean", total, float(mask.sum()))
    means.add("kl/ref_response_mean", total, float(mask.any(1).sum()))
    penalty = kl.kl_estimate(
        experience.old_log_probs, experience.ref_log_probs, kind=ppo.kl.estimator
    )
    return torch.where(mask, penalty, 0.0), means.reduce(workers)


def mismatch(experience: Experience, workers: Workers) -> dict[str, float]:
    """How far the learner's log-probs are from the engine's, over all sampled tokens."""
    assert experience.old_log_probs is not None
    mask = experience.response_mask
    gap = torch.where(mask, experience.old_log_probs - experience.rollout_log_probs, 0.0).double()
    means = WeightedMeans()
    tokens = float(mask.sum())
    means.add("mismatch/kl", float(-gap.sum()), tokens)  # KL(rollout || old), sampled from rollout
    means.add("mismatch/log_prob_gap_mean", float(gap.abs().sum()), tokens)
    means.maximum("mismatch/log_prob_gap_max", float(gap.abs().max()) if gap.numel() else 0.0)
    return means.reduce(workers)
