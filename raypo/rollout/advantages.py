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
    """The experience with `advantages` and `returns`, the figures, and the next step's state.

    Called by all workers together: group baselines, whitening, normalisation and the KL
    coefficient are of the whole batch. This step's coefficient is that of `state`.

    Args:
        max_new_tokens: Longest response, in tokens.
        step: Counted from 1; while the critic warms up, the KL coefficient rests, and the
            critic's lambda may differ.
    """
    assert experience.old_log_probs is not None
    mask = experience.response_mask
    scores, seen = shaping.shape_scores(
        experience.scores,
        mask.sum(1),
        experience.truncated,
        _rules(ppo, max_new_tokens),
        seen=state.scores,
        gather=workers.gather,
    )
    penalty, figures = _kl_to_reference(experience, ppo, workers)
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
        kl=penalty if ppo.kl.placement == "reward" else None,
        kl_coef=state.kl.coef,
        values=experience.values,
        last_values=experience.last_values,
        group_index=experience.group_index,
        workers=workers,
    )
    controller = state.kl
    if ppo.needs_reference:
        figures["kl/coef"] = controller.coef
        if step > ppo.critic_warmup_steps:
            responses = int(workers.sum(mask.any(1).sum().double()))
            controller = controller.updated(figures["kl/ref_response_mean"], responses)
    experience = experience.with_(advantages=advantages, returns=returns)
    figures |= _score_figures(scores, experience, workers)
    return experience, figures, replace(state, kl=controller, scores=seen)


def with_corrections(
    experience: Experience, section: CorrectionSection, workers: Workers, *, version: int
) -> tuple[Experience, dict[str, float]]:
    """The experience with the `weights` of its correction, and how far engine and learner differ.

    Args:
        version: Of the learner's weights; figures by lag come where a response is of an older one.
    """
    assert experience.old_log_probs is not None
    pair = experience.old_log_probs, experience.rollout_log_probs
    mask = experience.response_mask
    weights, clipped = corrections.bounded_weights(
        *pair,
        mask,
        kind=section.kind,
        low=section.low,
        high=section.high,
        cap=section.cap,
        mask_ratio=section.mask_ratio,
        token_veto=section.token_veto,
    )
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
    if section.acts:
        experience = experience.with_(weights=weights)
    return experience, means.reduce(workers)


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


def _kl_to_reference(
    experience: Experience, ppo: PPOSection, workers: Workers
) -> tuple[Tensor | None, dict[str, float]]:
    """Per-token KL [B, T] for the reward, and the KL by token and by response; None without one."""
    if not ppo.needs_reference:
        return None, {}
    assert experience.old_log_probs is not None
    assert experience.ref_log_probs is not None
    pair, mask = (experience.old_log_probs, experience.ref_log_probs), experience.response_mask
    stats = kl.kl_statistics(*pair, mask)
    means = WeightedMeans()
    means.add("kl/ref_mean", stats["kl"], stats["tokens"])
    means.add("kl/ref_response_mean", stats["kl"], stats["responses"])
    means.total("kl/clamped_tokens", stats["clamped"])
    figures = means.reduce(workers)
    if ppo.kl.placement == "loss":
        return None, figures
    return kl.kl_reward_terms(*pair, mask, kind=ppo.kl.estimator), figures


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
