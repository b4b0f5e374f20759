"""The per-token policy losses, one small function a published kind.

B responses, T response tokens. Every mask: True = keep. All tensors arrive 0 where masked, and
log-ratios arrive finite.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from raypo.ppo.kl import MAX_LOG_RATIO, MIN_LOG_PROB

SAPO_TEMPERATURES = (1.0, 1.05)
"""Of the soft gate, as published: for positive advantages, and for all others."""


@dataclass(frozen=True)
class TokenLoss:
    """What a surrogate gives: the loss of each token, and what to count."""

    loss: Tensor  # [B, T]
    ratio: Tensor  # [B, T], the ratio that was used
    clipped: Tensor  # [B, T] bool, the clip is active: no gradient, or a cut weight
    dual_clipped: Tensor  # [B, T] bool


class Surrogate(Protocol):
    """A policy loss, token by token."""

    def __call__(
        self,
        *,
        log_probs: Tensor,  # [B, T]
        log_ratio: Tensor,  # [B, T]
        advantages: Tensor,  # [B, T]
        mask: Tensor,  # [B, T] bool
        clip_low: float,
        clip_high: float,
        dual_clip: float | None,
    ) -> TokenLoss:
        """The loss of each token."""
        ...


def clamped_exp(log_ratio: Tensor) -> Tensor:
    """exp of a log-ratio clamped to +-`MAX_LOG_RATIO`; outside there is no gradient."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def ppo(
    *,
    log_probs: Tensor,  # [B, T]
    log_ratio: Tensor,  # [B, T]
    advantages: Tensor,  # [B, T]
    mask: Tensor,  # [B, T] bool
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
) -> TokenLoss:
    """-min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A), ratio per token.

    Raises:
        ValueError: a bound is out of range.

    Paper: Schulman et al. 2017, arXiv:1707.06347, eq. 7; Yu et al. 2025, arXiv:2503.14476, eq. 8
        (clip-higher); Ye et al. 2020, arXiv:1912.09729 (dual-clip PPO).
    """
    return _clipped(
        clamped_exp(log_ratio),
        advantages,
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
    )


def gspo(
    *,
    log_probs: Tensor,  # [B, T]
    log_ratio: Tensor,  # [B, T]
    advantages: Tensor,  # [B, T]
    mask: Tensor,  # [B, T] bool
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
) -> TokenLoss:
    """`ppo` with one ratio a response: the geometric mean of its tokens' ratios.

    Raises:
        ValueError: a bound is out of range.

    Paper: Zheng et al. 2025, arXiv:2507.18071, eq. 5 and 7.
    """
    num_tokens = mask.sum(1, keepdim=True).clamp(min=1)
    ratio = clamped_exp(log_ratio.sum(1, keepdim=True) / num_tokens)  # [B, 1]
    return _clipped(
        ratio.expand(mask.shape),
        advantages,
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
    )


def cispo(
    *,
    log_probs: Tensor,  # [B, T]
    log_ratio: Tensor,  # [B, T]
    advantages: Tensor,  # [B, T]
    mask: Tensor,  # [B, T] bool
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
) -> TokenLoss:
    """-stop_grad(min(ratio, 1 + clip_high)) * A * log_probs: the weight is cut, not the gradient.

    `clip_low` is not used: the paper has no lower bound.

    Raises:
        ValueError: a bound is out of range, or `dual_clip` is set.

    Paper: MiniMax 2025, arXiv:2506.13585, eq. 4 and 5.
    """
    _check_bounds(clip_low, clip_high, dual_clip)
    _refuse_dual_clip("cispo", dual_clip)
    ratio = clamped_exp(log_ratio.detach())
    weight = ratio.clamp(max=1.0 + clip_high)
    # -inf would give a loss of 0 * inf; at the floor the gradient is 0.
    loss = -weight * advantages * log_probs.clamp(min=MIN_LOG_PROB)
    return TokenLoss(loss, ratio, ratio > weight, torch.zeros_like(ratio, dtype=torch.bool))


def sapo(
    *,
    log_probs: Tensor,  # [B, T]
    log_ratio: Tensor,  # [B, T]
    advantages: Tensor,  # [B, T]
    mask: Tensor,  # [B, T] bool
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
) -> TokenLoss:
    """-A * 4 / tau * sigmoid(tau * (ratio - 1)): the gradient fades where `ppo` would cut it.

    At ratio 1 value and slope are those of `ppo` but for a constant. tau is larger for negative
    advantages. The clip bounds are not used.

    Raises:
        ValueError: `dual_clip` is set.

    Paper: Gao et al. 2025, arXiv:2511.20347 (soft gate and asymmetric temperatures).
    """
    _refuse_dual_clip("sapo", dual_clip)
    ratio = clamped_exp(log_ratio)
    up, down = SAPO_TEMPERATURES
    tau = torch.full_like(ratio, down).masked_fill(advantages > 0, up)
    loss = -advantages * (4.0 / tau) * torch.sigmoid(tau * (ratio - 1.0))
    never = torch.zeros_like(ratio, dtype=torch.bool)
    return TokenLoss(loss, ratio, never, never)


_SURROGATES: dict[str, Surrogate] = {"ppo": ppo, "gspo": gspo, "cispo": cispo, "sapo": sapo}
POLICY_KINDS = tuple(_SURROGATES)


def surrogate(kind: str) -> Surrogate:
    """The function of a kind in `POLICY_KINDS`."""
    return _SURROGATES[kind]


def _clipped(
    ratio: Tensor,  # [B, T]
    advantages: Tensor,  # [B, T]
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
) -> TokenLoss:
    _check_bounds(clip_low, clip_high, dual_clip)
    free = -ratio * advantages
    bounded = -ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    clipped = bounded > free
    loss = torch.where(clipped, bounded, free)
    dual_clipped = torch.zeros_like(clipped)
    if dual_clip is not None:
        most = -dual_clip * advantages
        dual_clipped = (advantages < 0) & (loss > most)
        loss = torch.where(dual_clipped, most, loss)
    return TokenLoss(loss, ratio, clipped, dual_clipped)


def _check_bounds(clip_low: float, clip_high: float, dual_clip: float | None) -> None:
    if not 0.0 <= clip_low <= 1.0 or clip_high < 0.0:
        raise ValueError(
            f"clip_low ({clip_low}) must lie in [0, 1] and clip_high ({clip_high}) be at least 0."
        )
    if dual_clip is not None and dual_clip <= 1.0:
        raise ValueError(f"dual_clip ({dual_clip}) must be above 1; None switches it off.")


def _refuse_dual_clip(kind: str, dual_clip: float | None) -> None:
    if dual_clip is not None:
        raise ValueError(
            f"dual_clip ({dual_clip}) has no place in {kind!r}, which bounds the loss of negative "
            "advantages in its own way. Set it to null."
        )
