"""Policy losses per token, with one small function for each published loss.

Notation: B responses, T response tokens, A advantage. Every mask: True = keep.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from raypo.ppo.kl import MAX_LOG_RATIO, MIN_LOG_PROB

TINY = 1e-8
"""Floor of 1 - p in `dppo_kl`, where p is the probability of a token, as in the public code."""

SAPO_TEMPERATURES = (1.0, 1.05)
"""Published temperatures of the soft gate: for positive advantages, and for all others."""

VESPO_SHAPES = ((2.0, 3.0), (3.0, 2.0))
"""Published power and decay (c1, c2) of VESPO's kernel: for advantages of at least 0, and for
negative advantages."""


@dataclass(frozen=True, kw_only=True)
class SurrogateInputs:
    """Arguments of a surrogate. All tensors are 0 where masked, and log-ratios are finite.

    The clip bounds come from the config section `ppo`, which validates them.
    """

    log_probs: Tensor  # [B, T], with gradient
    log_ratio: Tensor  # [B, T], against the log-probs before the update, with gradient
    advantages: Tensor  # [B, T]
    mask: Tensor  # [B, T] bool
    clip_low: float
    clip_high: float
    dual_clip: float | None
    cispo_low: float | None = None
    covariant: Tensor | None = None  # [B, T] bool, from `covariance.covariant_tokens`
    covariance_kl: float = 1.0


@dataclass(frozen=True)
class TokenLoss:
    """Result of a surrogate: the loss of each token, and masks for the statistics."""

    loss: Tensor  # [B, T]
    ratio: Tensor  # [B, T], the ratio that was used; for vespo its kernel
    clipped: Tensor  # [B, T] bool, the clip is active: no gradient, or a clipped weight
    dual_clipped: Tensor  # [B, T] bool


def ppo(inputs: SurrogateInputs) -> TokenLoss:
    """Compute -min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A), ratio per token.

    With `dual_clip`, the loss of a token with negative advantage is at most dual_clip * |A|.

    Paper: Schulman et al. 2017, arXiv:1707.06347, eq. 7; Yu et al. 2025, arXiv:2503.14476, eq. 8
        (clip-higher); Ye et al. 2020, arXiv:1912.09729 (dual-clip PPO).
    """
    ratio = _clamped_exp(inputs.log_ratio)
    unclipped = -ratio * inputs.advantages
    clipped_loss = -ratio.clamp(1.0 - inputs.clip_low, 1.0 + inputs.clip_high) * inputs.advantages
    clipped = clipped_loss > unclipped
    loss = torch.where(clipped, clipped_loss, unclipped)
    dual_clipped = torch.zeros_like(clipped)
    if inputs.dual_clip is not None:
        max_loss = -inputs.dual_clip * inputs.advantages
        dual_clipped = (inputs.advantages < 0) & (loss > max_loss)
        loss = torch.where(dual_clipped, max_loss, loss)
    return TokenLoss(loss, ratio, clipped, dual_clipped)


def gspo(inputs: SurrogateInputs) -> TokenLoss:
    """Compute `ppo` with the ratio of the whole response at each of its tokens (GSPO-token).

    The ratio is s * p / stop_grad(p), where s is the geometric mean of the response's ratios,
    without gradient, and p is the probability of the token. So every token is clipped like its
    response, and uses its own advantage. If all advantages of a response are equal, value and
    gradient equal GSPO's, which has one advantage per response.

    Paper: Zheng et al. 2025, arXiv:2507.18071, section 4.3 (eq. 5 and 7 where advantages are equal
        within each response).
    """
    num_tokens = inputs.mask.sum(1, keepdim=True).clamp(min=1)
    response_log_ratio = inputs.log_ratio.detach().sum(1, keepdim=True) / num_tokens  # [B, 1]
    token_gradient = (
        inputs.log_ratio - inputs.log_ratio.detach()
    )  # value 0, gradient of the token's log-ratio
    return ppo(replace(inputs, log_ratio=response_log_ratio + token_gradient))


def gmpo(inputs: SurrogateInputs) -> TokenLoss:
    """Compute -(geometric mean of the response's clipped ratios) * A.

    A token's log-ratio is clipped to at most log(1 + clip_high) if its advantage is positive, and
    to at least log(1 - clip_low) otherwise. A clipped token has no gradient. As in `gspo`, each
    token uses its own advantage. If all advantages of a response are equal, value and gradient
    under `sequence_mean` equal the paper's.

    Paper: Zhao et al. 2025, arXiv:2507.20673, eq. 4 (clip at e ** +-0.4: clip_low 0.33, clip_high
        0.49).
    """
    low = math.log1p(-inputs.clip_low) if inputs.clip_low < 1.0 else -math.inf
    log_ratio = inputs.log_ratio
    upper_clipped, lower_clipped = (
        log_ratio.clamp(max=math.log1p(inputs.clip_high)),
        log_ratio.clamp(min=low),
    )
    clipped_log_ratio = torch.where(inputs.advantages > 0, upper_clipped, lower_clipped)
    num_tokens = inputs.mask.sum(1, keepdim=True).clamp(min=1)
    mean_log_ratio = clipped_log_ratio.detach().sum(1, keepdim=True) / num_tokens  # [B, 1]
    ratio = _clamped_exp(mean_log_ratio + (clipped_log_ratio - clipped_log_ratio.detach()))
    no_tokens = torch.zeros_like(inputs.mask, dtype=torch.bool)
    return TokenLoss(-ratio * inputs.advantages, ratio, clipped_log_ratio != log_ratio, no_tokens)


def cispo(inputs: SurrogateInputs) -> TokenLoss:
    """Compute -stop_grad(min(ratio, 1 + clip_high)) * A * log_probs.

    Clipping bounds the weight of a token, and does not remove its gradient. With `cispo_low` the
    weight is at least 1 - cispo_low; the paper has no lower bound. `clip_low` is not used.

    Paper: MiniMax 2025, arXiv:2506.13585, eq. 4 and 5.
    """
    ratio = _clamped_exp(inputs.log_ratio.detach())
    low = None if inputs.cispo_low is None else 1.0 - inputs.cispo_low
    weight = ratio.clamp(min=low, max=1.0 + inputs.clip_high)
    # A log-prob of -inf could give a loss of 0 * inf = NaN. At the floor the gradient is 0.
    loss = -weight * inputs.advantages * inputs.log_probs.clamp(min=MIN_LOG_PROB)
    return TokenLoss(loss, ratio, ratio != weight, torch.zeros_like(ratio, dtype=torch.bool))


def sapo(inputs: SurrogateInputs) -> TokenLoss:
    """Compute -A * 4 / tau * sigmoid(tau * (ratio - 1)), a soft gate in place of the clip.

    The gradient fades out as the ratio moves away from 1. At ratio 1 it has the slope of `ppo`,
    and the value differs by a constant. tau is larger for negative advantages. clip_low and
    clip_high are not used.

    Paper: Gao et al. 2025, arXiv:2511.20347 (soft gate and asymmetric temperatures).
    """
    ratio = _clamped_exp(inputs.log_ratio)
    positive_tau, negative_tau = SAPO_TEMPERATURES
    tau = torch.full_like(ratio, negative_tau).masked_fill(inputs.advantages > 0, positive_tau)
    loss = -inputs.advantages * (4.0 / tau) * torch.sigmoid(tau * (ratio - 1.0))
    no_tokens = torch.zeros_like(ratio, dtype=torch.bool)
    return TokenLoss(loss, ratio, no_tokens, no_tokens)


def clip_cov(inputs: SurrogateInputs) -> TokenLoss:
    """Compute `ppo`, with zero loss and gradient for tokens of high covariance.

    Paper: Cui et al. 2025, arXiv:2505.22617, section 4.2 (Clip-Cov).
    """
    assert inputs.covariant is not None
    result, is_detached = ppo(inputs), inputs.covariant
    return replace(
        result,
        loss=torch.where(is_detached, 0.0, result.loss),
        clipped=result.clipped | is_detached,
    )


def kl_cov(inputs: SurrogateInputs) -> TokenLoss:
    """Compute -ratio * A, plus covariance_kl * |log ratio| on tokens of high covariance.

    There is no clip, so clip_low and clip_high are not used.

    Paper: Cui et al. 2025, arXiv:2505.22617, section 4.2 (KL-Cov; the penalty as in its code).
    """
    assert inputs.covariant is not None
    is_penalized, ratio = inputs.covariant, _clamped_exp(inputs.log_ratio)
    penalty = torch.where(is_penalized, inputs.covariance_kl * inputs.log_ratio.abs(), 0.0)
    no_tokens = torch.zeros_like(is_penalized)
    return TokenLoss(penalty - ratio * inputs.advantages, ratio, no_tokens, no_tokens)


def dppo_tv(inputs: SurrogateInputs) -> TokenLoss:
    """Compute -ratio * A, but 0 for tokens whose probability has moved too far.

    A token with a positive advantage has no loss and no gradient if its probability has risen by
    more than clip_high. The same holds for a token with a negative advantage whose probability has
    fallen by more than clip_low. The absolute change of this probability is the total variation
    between the old and the new distribution over two events: this token, or any other token. In
    contrast to a clipped ratio, this bound restricts likely tokens, whose ratio hardly changes, and
    leaves unlikely tokens free.

    Paper: Qi et al. 2026, arXiv:2602.04879, eq. 13 (binary TV).
    """
    old_probs, new_probs = _probabilities(inputs)
    return _masked_surrogate(inputs, (new_probs - old_probs).abs())


def dppo_kl(inputs: SurrogateInputs) -> TokenLoss:
    """Compute `dppo_tv` with another measure of a token's change, in nats.

    The measure is KL(old || new) of the distributions over two events: this token, or any other
    token. clip_low and clip_high bound it, so they are then in nats.

    Paper: Qi et al. 2026, arXiv:2602.04879, eq. 14 (binary KL).
    """
    old_probs, new_probs = _probabilities(inputs)
    other_log_ratio = torch.log((1.0 - old_probs).clamp(min=TINY)) - torch.log(
        (1.0 - new_probs).clamp(min=TINY)
    )
    return _masked_surrogate(
        inputs, (1.0 - old_probs) * other_log_ratio - old_probs * inputs.log_ratio.detach()
    )


def vespo(inputs: SurrogateInputs) -> TokenLoss:
    """Compute -stop_grad(W ** c1 * exp(c2 * (1 - W))) * A * log_probs.

    W is the product of the ratios of the response's tokens. The kernel, inside stop_grad, is 1 at
    W = 1 and fades towards 0 for small and large W. So no clip is needed, and clip_low and
    clip_high are not used. c1 and c2 depend on the sign of the advantage.

    Paper: Shen et al. 2026, arXiv:2602.10693, eq. 20, appendix I.
    """
    log_weight = inputs.log_ratio.detach().sum(1, keepdim=True)  # [B, 1]
    weight = log_weight.clamp(max=MAX_LOG_RATIO).exp()
    kernels = [(power * log_weight + decay * (1.0 - weight)).exp() for power, decay in VESPO_SHAPES]
    kernel = torch.where(inputs.advantages >= 0, *kernels)
    # A log-prob of -inf could give a loss of 0 * inf = NaN. At the floor the gradient is 0.
    loss = -kernel * inputs.advantages * inputs.log_probs.clamp(min=MIN_LOG_PROB)
    no_tokens = torch.zeros_like(inputs.mask, dtype=torch.bool)
    return TokenLoss(loss, kernel, no_tokens, no_tokens)


Surrogate = Callable[[SurrogateInputs], TokenLoss]
SURROGATES: dict[str, Surrogate] = {
    "ppo": ppo,
    "gspo": gspo,
    "gmpo": gmpo,
    "cispo": cispo,
    "sapo": sapo,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
    "vespo": vespo,
}


def _clamped_exp(log_ratio: Tensor) -> Tensor:
    """Return exp of a log-ratio clamped to +-`MAX_LOG_RATIO`. Clamped values have no gradient."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _probabilities(inputs: SurrogateInputs) -> tuple[Tensor, Tensor]:
    """Return the probability of each token before the update and now, without gradient."""
    log_probs = inputs.log_probs.detach().clamp(min=MIN_LOG_PROB)
    return (log_probs - inputs.log_ratio.detach()).exp(), log_probs.exp()


def _masked_surrogate(inputs: SurrogateInputs, distance: Tensor) -> TokenLoss:
    """Compute -ratio * A, but 0 for tokens that moved past a bound in their advantage's direction.

    The clip bounds apply to `distance`, [B, T].
    """
    ratio, log_ratio = _clamped_exp(inputs.log_ratio), inputs.log_ratio.detach()
    risen = (inputs.advantages > 0) & (log_ratio > 0) & (distance > inputs.clip_high)
    fallen = (inputs.advantages < 0) & (log_ratio < 0) & (distance > inputs.clip_low)
    is_detached = risen | fallen
    loss = torch.where(is_detached, 0.0, -ratio * inputs.advantages)
    return TokenLoss(loss, ratio, is_detached, torch.zeros_like(is_detached))
