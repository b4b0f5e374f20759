"""Advantages, corrections and KL of an experience, with statistics over all workers.

Notation: B responses, T response tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from raypo.collectives import Workers
from raypo.config import CorrectionSection, PPOSection, is_import_path
from raypo.metrics.reduce import WeightedMeans
from raypo.ppo import corrections, kl, losses, masked, shaping
from raypo.ppo.advantages import adaptive_lambdas, token_rewards
from raypo.ppo.covariance import covariant_tokens
from raypo.ppo.custom_functions import advantages_by, shaped_by
from raypo.ppo.entropy import EntropyController
from raypo.ppo.estimators import estimate_advantages
from raypo.types import Experience

_SEED_WORD = 5
"""First number of the seed sequence that draws tokens; other parts of a run use 1 to 4."""
MAX_LAG = 8
"""Largest staleness, in weight versions, with metrics of its own."""


@dataclass(frozen=True)
class AdvantageState:
    """State of the advantage computation between steps; part of the checkpoint."""

    kl: kl.KLController
    entropy: EntropyController
    scores: shaping.RunningMoments
    """Moments of all scores so far, for `ppo.shaping.normalize`."""

    @classmethod
    def of(cls, ppo: PPOSection) -> AdvantageState:
        """Return the state before the first step."""
        section = ppo.kl
        return cls(
            kl.KLController(section.coef, target=section.target, horizon=section.horizon),
            EntropyController(ppo.entropy_coef, ppo.entropy_target, ppo.entropy_delta),
            shaping.RunningMoments(),
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {
            "kl": self.kl.state_dict(),
            "entropy": self.entropy.state_dict(),
            "scores": self.scores.state_dict(),
        }

    def restored(self, state: dict[str, Any]) -> AdvantageState:
        """Return the state that `state_dict` saved, under this configuration."""
        return AdvantageState(
            self.kl.restored(state["kl"]),
            self.entropy.restored(state["entropy"]),
            shaping.RunningMoments(**state["scores"]),
        )


def with_advantages(
    experience: Experience,
    ppo: PPOSection,
    state: AdvantageState,
    workers: Workers,
    *,
    max_new_tokens: int,
    step: int,
) -> tuple[Experience, dict[str, float], AdvantageState]:
    """Compute advantages and returns. All workers call it together.

    Group baselines, whitening and normalisation use the whole batch of all workers.

    Args:
        experience: This worker's rows, with old and reference log-probs and values as needed.
        ppo: The section `ppo` of the config.
        state: State after the previous step. Its KL coefficient is used in this step.
        workers: The workers that hold the whole step together.
        max_new_tokens: Longest response, in tokens.
        step: Counted from 1. The critic's lambda may differ during its warm-up.

    Returns:
        experience: The experience with `advantages` and `returns`. With `ppo.mask_truncated` it has
            a `loss_mask` without truncated responses, and if samples have several rows,
            `sample_tokens`.
        metrics: Metrics over all workers.
        state: The state with this step's scores.
    """
    mask = experience.response_mask
    if ppo.mask_truncated:
        kept = experience.counted & ~experience.truncated.unsqueeze(1)
        experience = experience.with_(loss_mask=kept)
    experience = _with_sample_tokens(experience, workers)
    scores = experience.scores
    if ppo.shaping.function is not None:
        scores = shaped_by(ppo.shaping.function, experience, workers, max_new_tokens=max_new_tokens)
    scores, seen = shaping.shape_scores(
        scores,
        mask.sum(1),
        experience.truncated,
        _rules(ppo, max_new_tokens),
        counted=experience.is_first_row,
        seen=state.scores,
        gather=workers.gather,
    )
    penalty = None
    if ppo.has_kl_in_reward:
        assert experience.old_log_probs is not None
        assert experience.ref_log_probs is not None
        pair = experience.old_log_probs, experience.ref_log_probs
        penalty = kl.kl_reward_terms(*pair, mask, kind=ppo.kl.estimator)
    turn_rewards = None if ppo.needs_group else experience.turn_rewards
    at_the_end = scores  # the part of each score that is not in the rewards of turns
    if turn_rewards is not None:
        at_the_end = scores - masked.keep(turn_rewards, mask).sum(1)
    if is_import_path(ppo.advantage):
        valid = mask & ~scores.isnan().unsqueeze(1)
        rewards = token_rewards(
            at_the_end, penalty, valid, kl_coef=state.kl.coef, extra_rewards=turn_rewards
        )
        returns = advantages_by(
            ppo.advantage, scores, rewards, experience, workers, gamma=ppo.gamma
        )
        clip = math.inf if ppo.advantage_clip is None else ppo.advantage_clip
        advantages = returns.clamp(-clip, clip)
    else:
        advantages, returns = estimate_advantages(
            at_the_end,
            mask,
            kind=ppo.advantage,
            extra_rewards=turn_rewards,
            gamma=ppo.gamma,
            discount_by=ppo.discount_by,
            gae_lambda=(
                adaptive_lambdas(mask, alpha=ppo.lambda_alpha)
                if ppo.gae_lambda == "adaptive"
                else ppo.gae_lambda
            ),
            critic_lambda=ppo.critic_lambda_at(step),
            clip=ppo.advantage_clip,
            kl=penalty,
            kl_coef=state.kl.coef,
            values=experience.values,
            last_values=experience.last_values,
            group_index=experience.group_index,
            sample_index=experience.sample_index,
            turn_index=experience.turn_index,
            counted=experience.counted,
            workers=workers,
        )
    experience = experience.with_(advantages=advantages, returns=returns)
    metrics = _score_metrics(scores, experience, workers, clip=ppo.advantage_clip)
    return experience, metrics, replace(state, scores=seen)


def _with_sample_tokens(experience: Experience, workers: Workers) -> Experience:
    """Add `sample_tokens`: counted tokens of all rows of each sample, over all workers."""
    if all(workers.gather(bool(experience.is_first_row.all()))):
        return experience
    assert experience.sample_index is not None
    names = torch.stack([experience.group_index, experience.sample_index], 1)
    shares = workers.gather((names, experience.counted.sum(1)))
    all_names, tokens = (torch.cat(column) for column in zip(*shares, strict=True))
    _, sample = all_names.unique(dim=0, return_inverse=True)
    totals = torch.zeros_like(tokens).index_add(0, sample, tokens)[sample]
    first = sum(len(share[0]) for share in shares[: workers.rank])
    return experience.with_(sample_tokens=totals[first : first + len(experience)])


def with_corrections(
    experience: Experience, section: CorrectionSection, *, version: int
) -> Experience:
    """Add the importance `weights` of the rollout correction, if it is on.

    Args:
        experience: This worker's rows.
        section: The section `ppo.correction` of the config.
        version: Version of the weights that the update starts from.
    """
    if not section.acts and section.max_staleness is None:
        return experience
    return experience.with_(weights=_bounded_weights(experience, section, version)[0])


def with_covariant_tokens(
    experience: Experience, ppo: PPOSection, workers: Workers, *, seed: int, step: int
) -> Experience:
    """Add the `covariant` mask of tokens that clip_cov or kl_cov hold back, if either is used."""
    if not ppo.needs_covariance:
        return experience
    assert experience.old_log_probs is not None
    assert experience.advantages is not None
    assert experience.sample_index is not None
    assert experience.row_index is not None
    section = ppo.covariance
    tokens = covariant_tokens(
        experience.old_log_probs,
        experience.advantages,
        experience.counted,
        torch.stack([experience.group_index, experience.sample_index, experience.row_index], 1),
        kind=ppo.policy_loss,
        fraction=section.fraction,
        low=section.low,
        high=section.high,
        seed=(_SEED_WORD, seed, step),
        workers=workers,
    )
    return experience.with_(covariant=tokens)


def distance_to_reference(
    experience: Experience, ppo: PPOSection, state: AdvantageState, workers: Workers, *, step: int
) -> tuple[dict[str, float], AdvantageState]:
    """Return KL metrics to the reference model, and the state with the next KL coefficient.

    An episode of several rows counts as one response.

    Args:
        experience: This worker's rows.
        ppo: The section `ppo` of the config.
        state: The present state.
        workers: The workers that hold the whole step together.
        step: Counted from 1. The coefficient does not change during the critic's warm-up.
    """
    if not ppo.needs_reference:
        return {}, state
    assert experience.old_log_probs is not None
    assert experience.ref_log_probs is not None
    pair, mask = (experience.old_log_probs, experience.ref_log_probs), experience.response_mask
    stats = kl.kl_statistics(*pair, mask)
    samples = (mask.any(1) & experience.is_first_row).sum().double()
    means = WeightedMeans()
    means.add("kl/ref_mean", stats["kl"], stats["tokens"])
    means.add("kl/ref_response_mean", stats["kl"], samples)
    means.total("kl/clamped_tokens", stats["clamped"])
    metrics = means.reduce(workers) | {"kl/coef": state.kl.coef}
    if step <= ppo.critic_warmup_steps:
        return metrics, state
    updated = state.kl.updated(metrics["kl/ref_response_mean"], int(workers.sum(samples)))
    return metrics, replace(state, kl=updated)


def steer_entropy(
    updated: dict[str, float], state: AdvantageState
) -> tuple[dict[str, float], AdvantageState]:
    """Return the step's entropy coefficient as a metric, and the state with the next one.

    Args:
        updated: Metrics of the step's update. They have no entropy during the critic's warm-up.
        state: The present state.
    """
    controller = state.entropy
    metrics = {} if controller.target is None else {"ppo/entropy_coef": controller.acting}
    entropy = updated.get("ppo/entropy", math.nan)
    return metrics, replace(state, entropy=controller.updated(entropy))


def distance_to_engine(
    experience: Experience, ppo: PPOSection, workers: Workers, *, version: int
) -> dict[str, float]:
    """Return metrics of the mismatch between engine and learner, of corrections and staleness.

    With `ppo.old_log_probs: engine` the gap of log-probs is unknown and left out.

    Args:
        experience: This worker's rows.
        ppo: The section `ppo` of the config.
        workers: The workers that hold the whole step together.
        version: Version of the learner's weights. Metrics by lag are added if tokens of older
            versions exist.
    """
    assert experience.old_log_probs is not None
    pair = experience.old_log_probs, experience.rollout_log_probs
    mask = experience.response_mask
    weights, clipped = _bounded_weights(experience, ppo.correction, version)
    means = WeightedMeans()
    stats = corrections.mismatch_statistics(*pair, mask, clipped=clipped)
    knows_gap = ppo.old_log_probs == "learner"
    if knows_gap:
        _add_mismatch(means, stats, suffix="")
    means.total("mismatch/unknown_tokens", stats["unknown"])
    means.add("mismatch/weight_mean", masked.masked_sum(weights, mask), stats["tokens"])
    means.add("mismatch/dropped_fraction", (mask & (weights == 0.0)).sum(), stats["tokens"])
    lag = experience.staleness(version)  # [B, T]
    sampled = lag[mask]
    by_response = torch.where(mask, lag, 0).sum(1) / mask.sum(1).clamp(min=1)  # [B]
    means.add("rollout/staleness_mean", by_response.double().sum(), len(lag))
    if len(sampled):
        means.maximum("rollout/staleness_max", sampled.max())
    longest = int(workers.max(torch.cat([sampled, lag.new_zeros(1)]).max()))
    if longest > 0:
        max_lag = min(longest, MAX_LAG)
        by_lag = corrections.mismatch_by_lag(*pair, mask, lag, max_lag=max_lag, clipped=clipped)
        for number, lagging in enumerate(by_lag):
            if knows_gap:
                _add_mismatch(means, lagging, suffix=f"_lag_{number}")
            means.add(f"rollout/staleness_share_{number}", lagging["tokens"], len(sampled))
    return means.reduce(workers)


def _bounded_weights(
    experience: Experience, section: CorrectionSection, version: int
) -> tuple[Tensor, Tensor]:
    """Return the weights [B, T], and a mask of those that were bounded, [B, T] bool."""
    mask, old = experience.response_mask, experience.old_log_probs
    assert old is not None or not section.acts
    weights, clipped = corrections.bounded_weights(
        experience.rollout_log_probs if old is None else old,
        experience.rollout_log_probs,
        mask,
        kind=section.kind,
        low=section.low,
        high=section.high,
        cap=section.cap,
        mask_ratio=section.mask_ratio,
        token_veto=section.token_veto,
    )
    if section.max_staleness is None:
        return weights, clipped
    is_stale = mask & (experience.staleness(version) > section.max_staleness)
    return torch.where(is_stale, 0.0, weights), clipped | is_stale


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


def _score_metrics(
    scores: Tensor, experience: Experience, workers: Workers, *, clip: float | None
) -> dict[str, float]:
    assert experience.returns is not None
    assert experience.advantages is not None
    mask = experience.counted
    means = WeightedMeans()
    valid = ~scores.isnan() & experience.response_mask.any(1)
    means.add("ppo/shaped_score_mean", masked.masked_sum(scores, valid), valid.sum())
    means.add("ppo/return_mean", masked.masked_sum(experience.returns, mask), mask.sum())
    if clip is not None:
        clipped = mask & (experience.advantages.abs() >= clip)
        means.add("ppo/advantage_clip_fraction", clipped.sum(), mask.sum())
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
    means.maximum(f"mismatch/log_prob_gap_max{suffix}", stats["abs_difference_max"])
    means.add(f"mismatch/clip_fraction{suffix}", stats["clipped"], tokens)
