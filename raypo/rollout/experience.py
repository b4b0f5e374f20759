"""From scores and log-probs to what an update trains on, with statistics over all workers.

B responses, T response tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from raypo.collectives import Workers
from raypo.config import CorrectionSection, KLSection, PPOSection
from raypo.metrics.reduce import WeightedMeans
from raypo.ppo import corrections, kl, losses, masked, shaping
from raypo.ppo.advantages import adaptive_lambdas
from raypo.ppo.estimators import estimate_advantages
from raypo.types import Experience

MAX_LAG = 8
"""Weight versions between sampling and learning that get figures of their own."""


@dataclass(frozen=True)
class AdvantageState:
    """What advantages carry from step to step; part of the checkpoint."""

    kl: kl.KLController
    scores: shaping.RunningMoments
    """All scores seen, for `ppo.shaping.normalize`."""

    @classmethod
    def of(cls, section: KLSection) -> AdvantageState:
        """The state before the first step."""
        controller = kl.KLController(section.coef, target=section.target, horizon=section.horizon)
        return cls(controller, shaping.RunningMoments())

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"kl": self.kl.state_dict(), "scores": self.scores.state_dict()}

    def restored(self, state: dict[str, Any]) -> AdvantageState:
        """This state as `state` left it."""
        scores = shaping.RunningMoments.from_state(state["scores"])
        return AdvantageState(self.kl.restored(state["kl"]), scores)


def with_advantages(
    experience: Experience,
    ppo: PPOSection,
    state: AdvantageState,
    workers: Workers,
    *,
    max_new_tokens: int,
    step: int,
) -> tuple[Experience, dict[str, float], AdvantageState]:
    """The experience with `advantages` and `returns`, the figures, and the state with its scores.

    Called by all workers together: group baselines, whitening and normalisation are of the whole
    batch. This step's KL coefficient is that of `state`.

    Args:
        max_new_tokens: Longest response, in tokens.
        step: Counted from 1; while the critic warms up, its lambda may differ.
    """
    mask = experience.response_mask
    scores, seen = shaping.shape_scores(
        experience.scores,
        mask.sum(1),
        experience.truncated,
        _rules(ppo, max_new_tokens),
        seen=state.scores,
        gather=workers.gather,
    )
    penalty = None
    if ppo.has_kl_in_reward:
        assert experience.old_log_probs is not None
        assert experience.ref_log_probs is not None
        pair = experience.old_log_probs, experience.ref_log_probs
        penalty = kl.kl_reward_terms(*pair, mask, kind=ppo.kl.estimator)
    advantages, returns = estimate_advantages(
        scores,
        mask,
        kind=ppo.advantage,
        gamma=ppo.gamma,
        gae_lambda=(
            adaptive_lambdas(mask, alpha=ppo.lambda_alpha)
            if ppo.gae_lambda == "adaptive"
            else ppo.gae_lambda
        ),
        critic_lambda=ppo.critic_lambda_at(step),
        kl=penalty,
        kl_coef=state.kl.coef,
        values=experience.values,
        last_values=experience.last_values,
        group_index=experience.group_index,
        workers=workers,
    )
    experience = experience.with_(advantages=advantages, returns=returns)
    return experience, _score_figures(scores, experience, workers), replace(state, scores=seen)


def with_corrections(experience: Experience, section: CorrectionSection) -> Experience:
    """The experience with the `weights` of its correction."""
    if not section.acts:
        return experience
    return experience.with_(weights=_bounded_weights(experience, section)[0])


def distance_to_reference(
    experience: Experience, ppo: PPOSection, state: AdvantageState, workers: Workers, *, step: int
) -> tuple[dict[str, float], AdvantageState]:
    """KL of the step's policy to the reference, and the state with the next step's coefficient.

    Args:
        step: Counted from 1; while the critic warms up, the coefficient rests.
    """
    if not ppo.needs_reference:
        return {}, state
    assert experience.old_log_probs is not None
    assert experience.ref_log_probs is not None
    pair, mask = (experience.old_log_probs, experience.ref_log_probs), experience.response_mask
    stats = kl.kl_statistics(*pair, mask)
    means = WeightedMeans()
    means.add("kl/ref_mean", stats["kl"], stats["tokens"])
    means.add("kl/ref_response_mean", stats["kl"], stats["responses"])
    means.total("kl/clamped_tokens", stats["clamped"])
    figures = means.reduce(workers) | {"kl/coef": state.kl.coef}
    if step <= ppo.critic_warmup_steps:
        return figures, state
    responses = int(workers.sum(mask.any(1).sum().double()))
    updated = state.kl.updated(figures["kl/ref_response_mean"], responses)
    return figures, replace(state, kl=updated)


def distance_to_engine(
    experience: Experience, section: CorrectionSection, workers: Workers, *, version: int
) -> dict[str, float]:
    """How far the log-probs of engine and learner differ, and what the correction makes of it.

    Args:
        version: Of the learner's weights; figures by lag come where a response is of an older one.
    """
    assert experience.old_log_probs is not None
    pair = experience.old_log_probs, experience.rollout_log_probs
    mask = experience.response_mask
    weights, clipped = _bounded_weights(experience, section)
    means = WeightedMeans()
    stats = corrections.mismatch_statistics(*pair, mask, clipped=clipped)
    _add_mismatch(means, stats, suffix="")
    means.maximum("mismatch/log_prob_gap_max", stats["abs_difference_max"])
    means.total("mismatch/unknown_tokens", stats["unknown"])
    means.add("mismatch/weight_mean", masked.masked_sum(weights, mask), stats["tokens"])
    means.add("mismatch/dropped_fraction", (mask & (weights == 0.0)).sum(), stats["tokens"])
    lag = version - experience.weight_version  # [B]
    means.add("rollout/staleness_mean", lag.sum(), len(lag))
    if len(lag):
        means.maximum("rollout/staleness_max", lag.max())
    longest = int(workers.max(torch.cat([lag, lag.new_zeros(1)]).max()))
    if longest > 0:
        max_lag = min(longest, MAX_LAG)
        by_lag = corrections.mismatch_by_lag(*pair, mask, lag, max_lag=max_lag, clipped=clipped)
        for number, lagging in enumerate(by_lag):
            _add_mismatch(means, lagging, suffix=f"_lag_{number}")
    return means.reduce(workers)


def _bounded_weights(experience: Experience, section: CorrectionSection) -> tuple[Tensor, Tensor]:
    """Weights [B, T], and where they were bounded, [B, T] bool."""
    assert experience.old_log_probs is not None
    return corrections.bounded_weights(
        experience.old_log_probs,
        experience.rollout_log_probs,
        experience.response_mask,
        kind=section.kind,
        low=section.low,
        high=section.high,
        cap=section.cap,
        mask_ratio=section.mask_ratio,
        token_veto=section.token_veto,
    )


def _rules(ppo: PPOSection, max_new_tokens: int) -> shaping.ShapingRules:
    section = ppo.shaping
    return shaping.ShapingRules(
        max_new_tokens=max_new_tokens,
        overlong_buffer_tokens=section.overlong_tokens(max_new_tokens),
        overlong_factor=section.overlong_factor,
        truncated_score=section.truncated_score,
        truncated_scale=section.truncated_scale,
        normalize=section.normalize,
        clip_low=section.clip_low,
        clip_high=section.clip_high,
    )


def _score_figures(scores: Tensor, experience: Experience, workers: Workers) -> dict[str, float]:
    assert experience.returns is not None
    mask = experience.response_mask
    means = WeightedMeans()
    valid = ~scores.isnan() & mask.any(1)
    means.add("ppo/shaped_score_mean", masked.masked_sum(scores, valid), valid.sum())
    means.add("ppo/return_mean", masked.masked_sum(experience.returns, mask), mask.sum())
    if experience.values is None:
        return means.reduce(workers)
    means.add("ppo/value_mean", masked.masked_sum(experience.values, mask), mask.sum())
    stats = losses.value_loss(experience.values, experience.values, experience.returns, mask)[1]
    names = sorted(stats)
    totals = workers.sum(torch.stack([stats[name] for name in names])).unbind()
    explained = losses.explained_variance(dict(zip(names, totals, strict=True)))
    return means.reduce(workers) | {"ppo/explained_variance": float(explained)}


def _add_mismatch(means: WeightedMeans, stats: dict[str, Tensor], *, suffix: str) -> None:
    tokens = stats["tokens"]
    means.add(f"mismatch/kl{suffix}", stats["kl"], tokens)
    means.add(f"mismatch/log_prob_gap_mean{suffix}", stats["abs_difference"], tokens)
    means.add(f"mismatch/clip_fraction{suffix}", stats["clipped"], tokens)
