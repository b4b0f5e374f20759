"""Policy loss, value loss, and the aggregation of token losses.

Notation: B responses, T response tokens. Every mask: True = keep.

A loss is a sum over the tensors passed in, divided by a normalizer of the whole optimizer step. So
the losses of micro-batches and workers add up to the loss of the step. Statistics are plain sums,
which add up as well.
"""

from __future__ import annotations

import torch
from torch import Tensor

from raypo.ppo.kl import MAX_LOG_RATIO, k3, log_ratio
from raypo.ppo.masked import (
    check_choice,
    check_same_shape,
    exact_sum,
    keep,
    masked_moments,
    masked_sum,
)
from raypo.ppo.surrogates import SURROGATES, Surrogate, TokenLoss, Tokens

AGGREGATIONS = ("token_mean", "sequence_mean", "constant")

Stats = dict[str, Tensor]
"""Detached float64 sums over the tensors passed in. Add them up over micro-batches and workers."""


def aggregate(
    x: Tensor,  # [B, T]
    mask: Tensor,  # [B, T] bool
    *,
    aggregation: str,
    max_new_tokens: int | None = None,
    sample_tokens: Tensor | None = None,  # [B] int
    normalizer: Tensor | float | None = None,
) -> Tensor:
    """Reduce token losses to one number.

    It is the contribution of this micro-batch to the loss of the optimizer step.

    - token_mean: sum / tokens.
    - sequence_mean: mean of the responses' token means, without responses that have no sampled
      token.
    - constant: sum / (responses * max_new_tokens). Responses that have no sampled token are
      included.

    A response may have several rows, such as an episode of an agent.

    Args:
        x: Loss of each token.
        mask: True on tokens to sum.
        aggregation: token_mean, sequence_mean or constant.
        max_new_tokens: Longest response allowed, in tokens. Required by `constant`.
        sample_tokens: For each row, the number of sampled tokens in its whole response, over all of
            the response's rows. None means that each row is a response.
        normalizer: Count of the whole step over all workers: tokens (token_mean), responses with a
            sampled token (sequence_mean), or all responses (constant). Responses that are left out
            of the loss on purpose do not count. None means the count in `mask`.

    Returns:
        loss: Scalar of at least float32; 0, with a gradient of 0, if nothing is kept.

    Raises:
        ValueError: `aggregation` is unknown, the shapes differ, or `constant` has no
            `max_new_tokens`.

    Paper: Yu et al. 2025, arXiv:2503.14476, eq. 8 (token_mean); Shao et al. 2024, arXiv:2402.03300,
        eq. 3 (sequence_mean); Liu et al. 2025, arXiv:2503.20783, section 3.2 (constant).
    """
    check_choice("aggregation", aggregation, AGGREGATIONS)
    check_same_shape(x=x, mask=mask)
    if aggregation == "constant" and not max_new_tokens:
        raise ValueError(
            f"max_new_tokens ({max_new_tokens}) must be at least 1 for aggregation 'constant': "
            "it is what the loss is divided by."
        )
    kept = keep(x, mask)
    if aggregation == "sequence_mean":
        tokens = mask.sum(1) if sample_tokens is None else sample_tokens
        kept = kept / tokens.clamp(min=1).unsqueeze(1)
    if normalizer is None:
        normalizer = count_for(mask, aggregation=aggregation)
    total = exact_sum(kept)
    if aggregation == "constant" and max_new_tokens:
        total = total / max_new_tokens
    # A number stays one: as a tensor it would be copied to a GPU from pageable memory, which waits
    # for the whole forward pass.
    is_number = not isinstance(normalizer, Tensor)
    count = max(normalizer, 1.0) if is_number else normalizer.to(total).clamp(min=1.0)
    return (total / count).to(kept.dtype)


def count_for(
    mask: Tensor,  # [B, T] bool
    *,
    aggregation: str,
) -> Tensor:
    """Return the count by which `aggregate` divides the loss.

    Its sum over micro-batches and workers is the `normalizer` of the step.

    Args:
        mask: True on tokens that count.
        aggregation: See `aggregate`.

    Returns:
        count: float64 scalar: tokens, responses with a sampled token, or all responses.

    Raises:
        ValueError: `aggregation` is unknown.
    """
    check_choice("aggregation", aggregation, AGGREGATIONS)
    if aggregation == "token_mean":
        return mask.sum().double()
    if aggregation == "sequence_mean":
        return mask.any(1).sum().double()
    return torch.tensor(float(mask.shape[0]), dtype=torch.float64, device=mask.device)


def policy_loss(  # noqa: PLR0913 (what each of the surrogates needs)
    log_probs: Tensor,  # [B, T], with gradient
    old_log_probs: Tensor,  # [B, T]
    advantages: Tensor,  # [B, T]
    mask: Tensor,  # [B, T] bool
    *,
    kind: str | Surrogate = "ppo",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    cispo_low: float | None = None,
    covariant: Tensor | None = None,  # [B, T] bool
    covariance_kl: float = 1.0,
    aggregation: str = "token_mean",
    weights: Tensor | None = None,  # [B, T]
    max_new_tokens: int | None = None,
    sample_tokens: Tensor | None = None,  # [B] int
    normalizer: Tensor | float | None = None,
) -> tuple[Tensor, Stats]:
    """Compute the policy loss and its statistics. Only `log_probs` gets a gradient.

    Args:
        log_probs: Log-probs of the policy, in nats.
        old_log_probs: Log-probs of the policy before the update.
        advantages: Advantage of each token.
        mask: True on tokens to train on.
        kind: Name of a surrogate in `raypo.ppo.surrogates`, or a surrogate.
        clip_low: The ratio is clipped to at least 1 - clip_low.
        clip_high: The ratio is clipped to at most 1 + clip_high. A value above `clip_low` is DAPO's
            clip-higher.
        dual_clip: For a negative advantage, the loss is at most dual_clip * |advantage|. It must be
            above 1. None means no bound.
        cispo_low: With cispo, a token's weight is at least 1 - cispo_low. It must be in [0, 1].
            None means no bound.
        covariant: Mask from `covariance.covariant_tokens`, for clip_cov and kl_cov.
        covariance_kl: Weight of the penalty of kl_cov.
        aggregation: See `aggregate`.
        weights: Weights from `corrections.importance_weights`. Tokens with weight 0 stay in the
            denominator. None means 1.
        max_new_tokens, sample_tokens, normalizer: See `aggregate`.

    Returns:
        loss: Scalar.
        stats: Sums over sampled tokens: `tokens`, `ratio`, `clipped` (the clip is active),
            `dual_clipped`, `clamped` (log-ratio outside +-`MAX_LOG_RATIO`), `approx_kl`
            (ratio - 1 - log ratio, the k3 estimate of KL(old || new)).

    Raises:
        ValueError: `kind` or `aggregation` is unknown, the shapes differ, or a bound is out of
            range.

    Paper: Schulman et al. 2017, arXiv:1707.06347, eq. 7. Each surrogate's docstring names its own
        paper.
    """
    if isinstance(kind, str):
        check_choice("kind", kind, SURROGATES)
        kind = SURROGATES[kind]
    check_same_shape(log_probs=log_probs, advantages=advantages, mask=mask)
    tokens = Tokens(
        log_probs=keep(log_probs, mask),
        log_ratio=log_ratio(log_probs, old_log_probs.detach(), mask),
        advantages=keep(advantages.detach(), mask),
        mask=mask,
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
        cispo_low=cispo_low,
        covariant=covariant,
        covariance_kl=covariance_kl,
    )
    token_loss, stats = token_losses(tokens, kind, weights)
    loss = aggregate(
        token_loss,
        mask,
        aggregation=aggregation,
        max_new_tokens=max_new_tokens,
        sample_tokens=sample_tokens,
        normalizer=normalizer,
    )
    return loss, stats


def token_losses(
    tokens: Tokens, surrogate: Surrogate, weights: Tensor | None
) -> tuple[Tensor, Stats]:
    """Compute the loss of each token, before it is aggregated, and the statistics.

    Args:
        tokens: Arguments of the surrogate.
        surrogate: One of `raypo.ppo.surrogates`, or a user's own.
        weights: See `policy_loss`.

    Returns:
        loss: [B, T].
        stats: See `policy_loss`.
    """
    chosen, mask = surrogate(tokens), tokens.mask
    loss = chosen.loss
    if weights is not None:
        check_same_shape(weights=weights, mask=mask)
        loss = loss * keep(weights.detach(), mask)
    return loss, _policy_stats(chosen, tokens.log_ratio, mask)


@torch.no_grad()
def _policy_stats(chosen: TokenLoss, change: Tensor, mask: Tensor) -> Stats:
    return {
        "tokens": mask.sum().double(),
        "ratio": masked_sum(chosen.ratio, mask),
        "clipped": (chosen.clipped & mask).sum().double(),
        "dual_clipped": (chosen.dual_clipped & mask).sum().double(),
        "clamped": (change.abs() > MAX_LOG_RATIO).sum().double(),
        "approx_kl": exact_sum(k3(-change)),
    }


def value_loss(
    values: Tensor,  # [B, T], with gradient
    old_values: Tensor,  # [B, T]
    returns: Tensor,  # [B, T]
    mask: Tensor,  # [B, T] bool
    *,
    value_clip: float | None = None,
    aggregation: str = "token_mean",
    max_new_tokens: int | None = None,
    normalizer: Tensor | float | None = None,
) -> tuple[Tensor, Stats]:
    """Compute the value loss: half the larger of the clipped and the unclipped squared error.

    Args:
        values: Values of the critic.
        old_values: Values of the critic before the update.
        returns: Targets.
        mask: True on tokens to train on.
        value_clip: Largest change of a value from `old_values`, in units of the score. None means
            no clip.
        aggregation, max_new_tokens, normalizer: See `aggregate`.

    Returns:
        loss: Scalar.
        stats: Sums over sampled tokens: `tokens`, `clipped` (the clip is active), and the inputs of
            `explained_variance`: `error`, `squared_error`, `returns` and `returns_squared`.

    Raises:
        ValueError: `aggregation` is unknown, the shapes differ, or `value_clip` is not positive.

    Paper: Schulman et al. 2017, arXiv:1707.06347, eq. 9; the clip is as in the paper's public code.
    """
    check_same_shape(values=values, old_values=old_values, returns=returns, mask=mask)
    if value_clip is not None and value_clip <= 0.0:
        raise ValueError(f"value_clip ({value_clip}) must be positive; None switches it off.")
    now = keep(values, mask)
    target = keep(returns.detach(), mask)
    error = now - target
    loss_by_token = error.square()
    clipped = torch.zeros_like(mask, dtype=torch.bool)
    if value_clip is not None:
        before = keep(old_values.detach(), mask)
        moved = now - before
        near_loss = (before + moved.clamp(-value_clip, value_clip) - target).square()
        clipped = (moved.abs() > value_clip) & (near_loss > loss_by_token)
        loss_by_token = torch.where(clipped, near_loss, loss_by_token)
    loss = aggregate(
        0.5 * loss_by_token,
        mask,
        aggregation=aggregation,
        max_new_tokens=max_new_tokens,
        normalizer=normalizer,
    )
    return loss, _value_stats(error, target, clipped, mask)


@torch.no_grad()
def _value_stats(error: Tensor, target: Tensor, clipped: Tensor, mask: Tensor) -> Stats:
    _, error_sum, squared_error = masked_moments(error, mask)
    tokens, returns_sum, returns_squared = masked_moments(target, mask)
    return {
        "tokens": tokens,
        "clipped": clipped.sum().double(),
        "error": error_sum,
        "squared_error": squared_error,
        "returns": returns_sum,
        "returns_squared": returns_squared,
    }


def explained_variance(stats: Stats) -> Tensor:
    """Return 1 - Var(returns - values) / Var(returns), from summed statistics of `value_loss`.

    Args:
        stats: Statistics of `value_loss`, summed over micro-batches and workers.

    Returns:
        explained: float64 scalar. 1 is a perfect critic; 0 is a critic no better than a constant,
            or returns without variance.
    """
    count = stats["tokens"].clamp(min=1.0)
    errors = stats["squared_error"] / count - (stats["error"] / count).square()
    returns = stats["returns_squared"] / count - (stats["returns"] / count).square()
    varies = returns > 0
    return torch.where(varies, 1 - errors / torch.where(varies, returns, 1.0), 0.0)
