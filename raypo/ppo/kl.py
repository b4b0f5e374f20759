"""Divergence from the reference model, token by token.

B responses, T response tokens. Every mask: True = keep.
"""

from __future__ import annotations

import torch
from torch import Tensor

from raypo.ppo.masked import check_choice, check_same_shape, keep

KL_KINDS = ("k1", "k2", "k3")
MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to this many nats on either side before exp."""
MIN_LOG_PROB = -1e5
"""Stands in for log 0, so that the difference of two log-probs is always a number."""


def log_ratio(
    log_probs: Tensor,  # [B, T]
    base_log_probs: Tensor,  # [B, T]
    mask: Tensor | None = None,  # [B, T] bool
) -> Tensor:
    """`log_probs - base_log_probs`, finite where a log-prob is -inf; NaN stays NaN.

    Returns:
        log_ratio: [B, T] in nats, of at least float32, 0 where masked.

    Raises:
        ValueError: the shapes differ.
    """
    check_same_shape(log_probs=log_probs, base_log_probs=base_log_probs)
    mask = torch.ones_like(log_probs, dtype=torch.bool) if mask is None else mask
    check_same_shape(log_probs=log_probs, mask=mask)
    floor = MIN_LOG_PROB
    return keep(log_probs, mask).clamp(min=floor) - keep(base_log_probs, mask).clamp(min=floor)


def kl_estimate(
    log_probs: Tensor,  # [B, T]
    ref_log_probs: Tensor,  # [B, T]
    *,
    kind: str,
    mask: Tensor | None = None,  # [B, T] bool
) -> Tensor:
    """Estimates of KL(policy || reference) from tokens that the policy sampled.

    k1 = l is unbiased and may be negative; k2 = l^2 / 2 is biased with low variance;
    k3 = exp(-l) - 1 + l is unbiased and never negative; l = log_probs - ref_log_probs.
    In k3, l is first clamped to +-`MAX_LOG_RATIO`.

    Returns:
        kl: [B, T] in nats, 0 where masked.

    Raises:
        ValueError: `kind` is unknown or the shapes differ.

    Paper: Schulman 2020, "Approximating KL Divergence" (blog).
    """
    check_choice("kind", kind, KL_KINDS)
    ratio = log_ratio(log_probs, ref_log_probs, mask)
    if kind == "k1":
        return ratio
    if kind == "k2":
        return 0.5 * ratio.square()
    ratio = ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.expm1(-ratio) + ratio
