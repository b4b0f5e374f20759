"""Weights that correct for tokens sampled by an engine that is not quite the learner.

B responses, T response tokens. Every mask: True = keep. w = exp(old_log_probs - rollout_log_probs):
the learner's probability of a token before the update over the engine's when it sampled it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from raypo.ppo.kl import MAX_LOG_RATIO, k3, log_ratio
from raypo.ppo.masked import check_choice, check_same_shape, exact_sum

CORRECTION_KINDS = ("none", "tis", "sequence_tis", "geometric_tis", "icepop", "mis")
USUAL_BOUNDS = {
    "tis": (0.0, 2.0),
    "sequence_tis": (0.0, 2.0),
    "geometric_tis": (0.0, 2.0),
    "icepop": (0.5, 5.0),
    "mis": (0.5, 2.0),
}
"""`low` and `high` where none are given."""


def importance_weights(
    old_log_probs: Tensor,  # [B, T], learner, before the update
    rollout_log_probs: Tensor,  # [B, T], as the engine reported them
    mask: Tensor,  # [B, T] bool
    *,
    kind: str,
    low: float | None = None,
    high: float | None = None,
) -> Tensor:
    """Weights of the token losses, detached and bounded by `high`.

    none: 1. tis: min(w, high). sequence_tis: min(product of w over the response, high).
    geometric_tis: min(geometric mean of w over the response, high). icepop: w inside [low, high],
    else 0. mis: as tis, and the whole response 0 if its geometric mean is outside [low, high].
    What gets weight 0 stays in the loss's denominator.

    Args:
        low: icepop and mis alone use it. None: as in `USUAL_BOUNDS`.
        high: None: as in `USUAL_BOUNDS`.

    Returns:
        weights: [B, T], 0 where masked, 0 where a log-prob is NaN (for the kinds that look at the
            whole response: 0 throughout it).

    Raises:
        ValueError: `kind` is unknown, the shapes differ, or not 0 <= low <= high with high > 0.

    Paper: Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training"
        (tis); Zheng et al. 2025, arXiv:2507.18071, eq. 7 (geometric mean); Ling Team 2025,
        arXiv:2510.18855 (icepop); Liu et al. 2025, "When Speed Kills Stability" (sequence_tis,
        mis).
    """
    return bounded_weights(old_log_probs, rollout_log_probs, mask, kind=kind, low=low, high=high)[0]


def bounded_weights(
    old_log_probs: Tensor,  # [B, T]
    rollout_log_probs: Tensor,  # [B, T]
    mask: Tensor,  # [B, T] bool
    *,
    kind: str,
    low: float | None = None,
    high: float | None = None,
) -> tuple[Tensor, Tensor]:
    """`importance_weights`, and where a bound was active.

    Returns:
        weights: [B, T], see `importance_weights`.
        clipped: [B, T] bool, sampled tokens whose weight was cut to `high` or dropped.

    Raises:
        ValueError: see `importance_weights`.
    """
    check_choice("kind", kind, CORRECTION_KINDS)
    mask = mask.bool()
    with torch.no_grad():
        by_token = log_ratio(old_log_probs, rollout_log_probs, mask)
        if kind == "none":
            return mask.to(by_token.dtype), torch.zeros_like(mask)
        low, high = _bounds(kind, low, high)
        by_response = by_token.sum(1, keepdim=True).expand(mask.shape)
        mean = by_response / mask.sum(1, keepdim=True).clamp(min=1)
        log_weight = {"sequence_tis": by_response, "geometric_tis": mean}.get(kind, by_token)
        weight = _clamped_exp(log_weight)
        weights = weight.clamp(max=high)
        if kind in ("icepop", "mis"):
            judged = weight if kind == "icepop" else _clamped_exp(mean)
            weights = torch.where((judged >= low) & (judged <= high), weights, 0.0)
        # Selected, not multiplied: what is dropped may be NaN.
        weights = torch.where(mask & ~weights.isnan(), weights, 0.0)
        return weights, mask & (weights != weight)


def mismatch_statistics(
    old_log_probs: Tensor,  # [B, T]
    rollout_log_probs: Tensor,  # [B, T]
    mask: Tensor,  # [B, T] bool
    *,
    clipped: Tensor | None = None,  # [B, T] bool
) -> dict[str, Tensor]:
    """How far learner and engine are apart on the sampled tokens.

    Args:
        clipped: of `bounded_weights`; None: nothing was corrected.

    Returns:
        stats: float64 scalars. Sums, which add over micro-batches and workers: `tokens`,
            `abs_difference` and `kl` (k3 estimate of KL(rollout || old)) in nats, `clipped`,
            `unknown` (tokens with a NaN log-prob; in no other figure but `tokens` and `clipped`).
            A maximum, to be reduced by maximum: `abs_difference_max`.

    Raises:
        ValueError: the shapes differ.

    Paper: Schulman 2020, "Approximating KL Divergence" (blog).
    """
    with torch.no_grad():
        difference = log_ratio(old_log_probs, rollout_log_probs, mask)
        unknown = difference.isnan()
        difference = torch.where(unknown, 0.0, difference)
        zero = torch.zeros((), dtype=torch.float64, device=difference.device)
        if clipped is not None:
            check_same_shape(clipped=clipped, mask=mask)
        return {
            "tokens": mask.sum().double(),
            "abs_difference": exact_sum(difference.abs()),
            "abs_difference_max": difference.abs().amax().double() if mask.numel() else zero,
            "kl": exact_sum(k3(-difference)),
            "clipped": zero if clipped is None else (clipped & mask).sum().double(),
            "unknown": unknown.sum().double(),
        }


def mismatch_by_lag(
    old_log_probs: Tensor,  # [B, T]
    rollout_log_probs: Tensor,  # [B, T]
    mask: Tensor,  # [B, T] bool
    lag: Tensor,  # [B] int
    *,
    max_lag: int,
    clipped: Tensor | None = None,  # [B, T] bool
) -> list[dict[str, Tensor]]:
    """`mismatch_statistics` of the responses sampled 0, 1, ... `max_lag` weight versions ago.

    Args:
        lag: weight versions between sampling and learning; above `max_lag` counts as `max_lag`.

    Returns:
        stats: one dict a lag, `max_lag + 1` of them on every worker, so that they can be reduced.

    Raises:
        ValueError: the shapes differ.
    """
    lag = lag.clamp(max=max_lag)
    return [
        mismatch_statistics(
            old_log_probs, rollout_log_probs, mask & (lag == k).unsqueeze(1), clipped=clipped
        )
        for k in range(max_lag + 1)
    ]


def _clamped_exp(x: Tensor) -> Tensor:
    return x.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _bounds(kind: str, low: float | None, high: float | None) -> tuple[float, float]:
    usual_low, usual_high = USUAL_BOUNDS[kind]
    low = usual_low if low is None else low
    high = usual_high if high is None else high
    if kind not in ("icepop", "mis"):
        low = 0.0
    if not 0.0 <= low <= high or high <= 0.0:
        raise ValueError(
            f"low ({low}) and high ({high}) must be bounds of a ratio: 0 <= low <= high, high > 0."
        )
    return low, high
