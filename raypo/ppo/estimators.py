"""Advantages of a step: score shaping, KL penalty, and the configured estimator.

Notation: B responses, T response tokens. Every mask: True = keep. Batch statistics are over all
workers. The estimators combine the functions of `raypo.ppo.advantages`.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from raypo.collectives import Workers
from raypo.config import PPOSection, is_import_path
from raypo.metrics.reduce import WeightedMeans
from raypo.ppo.advantages import (
    adaptive_lambdas,
    discounted_returns,
    generalized_advantages,
    penalized_scores,
    runs_of,
    token_rewards,
)
from raypo.ppo.controllers import UpdateState
from raypo.ppo.custom_functions import custom_step_advantages
from raypo.ppo.groups import baseline_over_workers, parts_over_workers
from raypo.ppo.kl import kl_reward_terms
from raypo.ppo.losses import explained_variance, value_losses
from raypo.ppo.masked import keep, masked_moments, masked_sum, masked_whiten
from raypo.ppo.shaping import RunningMoments, shape_scores
from raypo.ppo.turn_advantages import turn_advantages
from raypo.types import Experience


def with_advantages(
    experience: Experience,
    ppo: PPOSection,
    state: UpdateState,
    workers: Workers,
    *,
    max_new_tokens: int,
    step: int,
) -> tuple[Experience, dict[str, float], RunningMoments]:
    """Compute advantages and returns of a step. All workers call it together.

    Args:
        experience: This worker's rows, with old log-probs, reference log-probs and values if the
            config needs them.
        ppo: The section `ppo` of the config.
        state: State after the previous step. Its KL coefficient is used in this step.
        workers: The workers that together hold all rows of the step.
        max_new_tokens: Longest allowed response, in tokens.
        step: Step number, from 1. The critic's lambda may differ during the critic's warm-up.

    Returns:
        experience: The experience with `advantages` and `returns`. With `ppo.mask_truncated`, a
            `loss_mask` excludes truncated responses. If samples have several rows, `sample_tokens`
            is added.
        metrics: Metrics over all workers.
        scores: Moments of all scores so far, including this step.
    """
    if ppo.mask_truncated:
        loss_mask = experience.counted & ~experience.truncated.unsqueeze(1)
        experience = experience.with_(loss_mask=loss_mask)
    experience = _with_sample_tokens(experience, workers)
    scores, moments = shape_scores(
        experience, ppo.shaping, state.scores, workers, max_new_tokens=max_new_tokens
    )
    advantages, returns = estimate_advantages(
        experience, scores, ppo, workers, kl_coef=state.kl.coef, step=step
    )
    experience = experience.with_(advantages=advantages, returns=returns)
    return experience, _metrics(experience, scores, ppo, workers), moments


def estimate_advantages(
    experience: Experience,
    scores: Tensor,  # [B], shaped; NaN where scoring failed
    ppo: PPOSection,
    workers: Workers,
    *,
    kl_coef: float,
    step: int,
) -> tuple[Tensor, Tensor]:
    """Compute advantages and returns with the estimator of `ppo.advantage`.

    All workers call it together. A response whose score is NaN is excluded from all statistics and
    gets advantage 0.

    Group estimators compare whole scores: the scores include the rewards of single turns, and the
    KL penalty of the whole response is subtracted before the comparison. So grpo divides by the
    standard deviation of the penalised scores. In a group of equal scores only the KL differs, and
    after this division it has full weight, however small `kl_coef` is.

    Args:
        experience: This worker's rows, with old and reference log-probs if the reward has a KL
            penalty, and values if the estimator has a critic.
        scores: Shaped score of each row.
        ppo: The section `ppo` of the config.
        workers: The workers that together hold all rows of the step.
        kl_coef: Weight of the KL penalty in this step, in score per nat.
        step: Step number, from 1. The critic's lambda may differ during the critic's warm-up.

    Returns:
        advantages: [B, T], 0 where masked. Some estimators whiten them to mean 0 and variance 1
            over the tokens that the losses count.
        returns: [B, T], not whitened, 0 where masked; the critic's target for `gae`.

    Paper: see the parts in `raypo.ppo.advantages` and `masked_whiten`; Yuan et al. 2025 (VC-PPO),
        arXiv:2503.01491 (decoupled GAE: a separate lambda for the critic).
    """
    mask, turn_rewards, penalty = experience.response_mask, experience.turn_rewards, None
    valid = ~scores.isnan() & mask.any(1)
    if ppo.has_kl_in_reward:
        assert experience.old_log_probs is not None
        assert experience.ref_log_probs is not None
        log_probs = experience.old_log_probs, experience.ref_log_probs
        penalty = kl_reward_terms(*log_probs, mask)
    mask = mask & valid.unsqueeze(1)
    end_rewards = scores  # the part of each score that is the reward of the last token
    if ppo.needs_group:
        if penalty is not None:
            end_rewards = penalized_scores(scores, penalty, mask, kl_coef=kl_coef)
        end_rewards = _group_advantages(end_rewards, experience, valid, ppo, workers)
        turn_rewards = penalty = None
    elif turn_rewards is not None:
        end_rewards = scores - keep(turn_rewards, experience.response_mask).sum(1)
    rewards = token_rewards(
        end_rewards, penalty, mask, kl_coef=kl_coef, extra_rewards=turn_rewards
    )  # [B, T]

    turns = _turn_numbers(experience, mask) if ppo.discount_by == "turn" else None
    if is_import_path(ppo.advantage):
        arguments = ppo.advantage, scores, rewards, experience, workers
        advantages = returns = custom_step_advantages(*arguments, gamma=ppo.gamma)
    elif ppo.advantage == "gigpo":
        per_turn = turn_advantages(experience, scores, valid, gamma=ppo.gamma, workers=workers)
        advantages = returns = keep(end_rewards.unsqueeze(1).expand(mask.shape), mask) + per_turn
    elif ppo.needs_critic:
        advantages, returns = _critic_advantages(experience, rewards, mask, turns, ppo, step=step)
    else:
        advantages = returns = discounted_returns(rewards, mask, gamma=ppo.gamma, turns=turns)
    if ppo.estimator.whitens:
        moments = workers.sum(masked_moments(advantages, mask & experience.counted))
        advantages = masked_whiten(advantages, mask, moments=moments)
    if ppo.advantage_clip is not None:
        advantages = advantages.clamp(-ppo.advantage_clip, ppo.advantage_clip)
    return advantages, returns


def _turn_numbers(experience: Experience, mask: Tensor) -> Tensor:
    """Return the turn of each sampled token, [B, T] int."""
    return runs_of(mask) if experience.turn_index is None else experience.turn_index


def _group_advantages(
    scores: Tensor,  # [B]
    experience: Experience,
    valid: Tensor,  # [B] bool
    ppo: PPOSection,
    workers: Workers,
) -> Tensor:
    """Compute advantages [B] by comparing scores, or their parts for gdpo, within each group."""
    group, sample = experience.group_index, experience.sample_index
    if ppo.advantage == "gdpo":
        assert experience.parts is not None
        assert ppo.part_weights is not None
        weights = ppo.part_weights
        return parts_over_workers(
            experience.parts, group, valid, weights=weights, workers=workers, sample_index=sample
        ).to(scores)
    return baseline_over_workers(
        scores,
        group,
        valid,
        kind="grpo" if ppo.advantage == "gigpo" else ppo.advantage,
        workers=workers,
        sample_index=sample,
        lengths=experience.response_mask.sum(1) if ppo.advantage == "opo" else None,
        pass_k=ppo.pass_k,
    )


def _critic_advantages(
    experience: Experience,
    rewards: Tensor,  # [B, T]
    mask: Tensor,  # [B, T] bool
    turns: Tensor | None,  # [B, T] int
    ppo: PPOSection,
    *,
    step: int,
) -> tuple[Tensor, Tensor]:
    """Compute advantages and returns [B, T] by GAE. The returns may use a separate lambda."""
    assert experience.values is not None
    gae = partial(
        generalized_advantages,
        rewards,
        experience.values,
        mask,
        gamma=ppo.gamma,
        last_values=experience.last_values,
        turns=turns,
    )
    gae_lambda = ppo.gae_lambda
    if gae_lambda == "adaptive":
        gae_lambda = adaptive_lambdas(mask, alpha=ppo.lambda_alpha)
    advantages, returns = gae(gae_lambda=gae_lambda)
    critic_lambda = ppo.critic_lambda_at(step)
    if critic_lambda is not None:
        _, returns = gae(gae_lambda=critic_lambda)
    return advantages, returns


def _with_sample_tokens(experience: Experience, workers: Workers) -> Experience:
    """Add `sample_tokens`: for each row, the number of counted tokens in its whole sample.

    A sample may have several rows, also on other workers. If every sample has a single row, the
    experience is returned unchanged.
    """
    if all(workers.gather(bool(experience.is_first_row.all()))):
        return experience
    assert experience.sample_index is not None
    sample_ids = torch.stack([experience.group_index, experience.sample_index], 1)
    (all_sample_ids, tokens), own_rows = workers.gather_rows(sample_ids, experience.counted.sum(1))
    _, sample = all_sample_ids.unique(dim=0, return_inverse=True)
    totals = torch.zeros_like(tokens).index_add(0, sample, tokens)[sample]
    return experience.with_(sample_tokens=totals[own_rows])


def _metrics(
    experience: Experience, scores: Tensor, ppo: PPOSection, workers: Workers
) -> dict[str, float]:
    assert experience.returns is not None
    assert experience.advantages is not None
    mask = experience.counted
    means = WeightedMeans()
    valid = ~scores.isnan() & experience.response_mask.any(1)
    means.add("ppo/shaped_score_mean", masked_sum(scores, valid), valid.sum())
    means.add("ppo/return_mean", masked_sum(experience.returns, mask), mask.sum())
    sizes = masked_sum(experience.advantages.abs(), mask)
    means.add("ppo/advantage_abs_mean", sizes, mask.sum())
    if ppo.advantage_clip is not None:
        clipped = mask & (experience.advantages.abs() >= ppo.advantage_clip)
        means.add("ppo/advantage_clip_fraction", clipped.sum(), mask.sum())
    if experience.values is None:
        return means.reduce(workers)
    means.add("ppo/value_mean", masked_sum(experience.values, mask), mask.sum())
    values, returns = experience.values, experience.returns
    _, stats = value_losses(values, values, returns, mask, value_clip=None)
    names = sorted(stats)
    totals = workers.sum(torch.stack([stats[name] for name in names])).unbind()
    explained = explained_variance(dict(zip(names, totals, strict=True)))
    return means.reduce(workers) | {"ppo/explained_variance": float(explained)}
