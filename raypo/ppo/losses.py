"""Token losses of policy and critic, and the aggregation of token losses.

Notation: B responses, T response tokens. Every mask: True = keep.

An aggregated loss is a sum over the tensors passed in, divided by a normalizer of the whole
optimizer step. So the losses of micro-batches and workers add up to the loss of the step.
Statistics are plain sums, which add up as well.
"""

from __future__ import annotations

import torch
from torch import Tensor

from raypo.ppo.kl import MAX_LOG_RATIO, k3
from raypo.ppo.masked import check_same_shape, exact_sum, keep, masked_moments, masked_sum
from raypo.ppo.surrogates import Surrogate, SurrogateInputs

Stats = dict[str, Tensor]
"""Detached float64 sums over the tensors passed in. Add them up over micro-batches and workers."""


def aggregate(
    x: Tensor,  # [B, T]
    mask: Tensor,  # [B, T] bool
    *,
    aggregation: str,
    normalizer: float,
    max_new_tokens: int | None = None,
    sample_tokens: Tensor | None = None,  # [B] int
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
        normalizer: Count of the whole step over all workers: tokens (token_mean), responses with a
            sampled token (sequence_mean), or all responses (constant). Responses that are excluded
            from the loss do not count. A count below 1 is taken as 1.
        max_new_tokens: Longest response allowed, in tokens. Required by `constant`.
        sample_tokens: For each row, the number of sampled tokens in its whole response, over all of
            the response's rows. None means that each row is a response.

    Returns:
        loss: Scalar of at least float32; 0, with a gradient of 0, if nothing is kept.

    Raises:
        ValueError: the shapes differ.

    Paper: Yu et al. 2025, arXiv:2503.14476, eq. 8 (token_mean); Shao et al. 2024, arXiv:2402.03300,
        eq. 3 (sequence_mean); Liu et al. 2025, arXiv:2503.20783, section 3.2 (constant).
    """
    check_same_shape(x=x, mask=mask)
    losses = keep(x, mask)
    if aggregation == "sequence_mean":
        tokens = mask.sum(1) if sample_tokens is None else sample_tokens
        losses = losses / tokens.clamp(min=1).unsqueeze(1)
    total = exact_sum(losses)
    if aggregation == "constant":
        assert max_new_tokens is not None
        total = total / max_new_tokens
    # The normalizer is a number: as a tensor it would be copied to a GPU from pageable memory,
    # which waits for the whole forward pass.
    return (total / max(normalizer, 1.0)).to(losses.dtype)


def token_losses(
    inputs: SurrogateInputs, surrogate: Surrogate, weights: Tensor | None
) -> tuple[Tensor, Stats]:
    """Compute the policy's loss of each token, and its statistics.

    Args:
        inputs: Arguments of the surrogate.
        surrogate: A function of `raypo.ppo.surrogates`, or a wrapped user function.
        weights: Weights from `corrections.bounded_weights`, [B, T]. SurrogateInputs with weight 0
            stay in the denominator of the loss. None means 1.

    Returns:
        loss: [B, T].
        stats: Sums over sampled tokens: `inputs`, `ratio`, `clipped` (the clip is active),
            `dual_clipped`, `clamped` (log-ratio outside +-`MAX_LOG_RATIO`), `approx_kl`
            (ratio - 1 - log ratio, the k3 estimate of KL(old || new)).

    Raises:
        ValueError: the shapes differ.

    Paper: Schulman et al. 2017, arXiv:1707.06347, eq. 7. Each surrogate's docstring names its own
        paper.
    """
    result, mask, log_ratio = surrogate(inputs), inputs.mask, inputs.log_ratio
    loss = result.loss
    if weights is not None:
        check_same_shape(weights=weights, mask=mask)
        loss = loss * keep(weights, mask)
    with torch.no_grad():
        stats = {
            "tokens": mask.sum().double(),
            "ratio": masked_sum(result.ratio, mask),
            "clipped": (result.clipped & mask).sum().double(),
            "dual_clipped": (result.dual_clipped & mask).sum().double(),
            "clamped": (log_ratio.abs() > MAX_LOG_RATIO).sum().double(),
            "approx_kl": exact_sum(k3(-log_ratio)),
        }
    return loss, stats


def value_losses(
    values: Tensor,  # [B, T], with gradient
    old_values: Tensor,  # [B, T]
    returns: Tensor,  # [B, T]
    mask: Tensor,  # [B, T] bool
    *,
    value_clip: float | None,
) -> tuple[Tensor, Stats]:
    """Compute half of the larger squared error, clipped or unclipped, of each value.

    Args:
        values: Values of the critic.
        old_values: Values of the critic before the update.
        returns: Targets.
        mask: True on tokens to train on.
        value_clip: Largest change of a value from `old_values`, in units of the score. None means
            no clip.

    Returns:
        loss: [B, T].
        stats: Sums over sampled tokens: `tokens`, `clipped` (the clip is active), and the inputs of
            `explained_variance`: `error`, `squared_error`, `returns` and `returns_squared`.

    Raises:
        ValueError: the shapes differ.

    Paper: Schulman et al. 2017, arXiv:1707.06347, eq. 9; the clip is as in the paper's public code.
    """
    check_same_shape(values=values, old_values=old_values, returns=returns, mask=mask)
    value, target = keep(values, mask), keep(returns, mask)
    error = value - target
    squared_errors = error.square()
    clipped = torch.zeros_like(mask, dtype=torch.bool)
    if value_clip is not None:
        old_value = keep(old_values, mask)
        change = value - old_value
        clipped_squares = (old_value + change.clamp(-value_clip, value_clip) - target).square()
        clipped = (change.abs() > value_clip) & (clipped_squares > squared_errors)
        squared_errors = torch.where(clipped, clipped_squares, squared_errors)
    with torch.no_grad():
        _, error_sum, squared_error = masked_moments(error, mask)
        tokens, returns_sum, returns_squared = masked_moments(target, mask)
    stats = {
        "tokens": tokens,
        "clipped": clipped.sum().double(),
        "error": error_sum,
        "squared_error": squared_error,
        "returns": returns_sum,
        "returns_squared": returns_squared,
    }
    return 0.5 * squared_errors, stats


def explained_variance(stats: Stats) -> Tensor:
    """Return 1 - Var(returns - values) / Var(returns), from summed statistics of `value_losses`.

    Args:
        stats: Statistics of `value_losses`, summed over micro-batches and workers.

    Returns:
        explained: float64 scalar. 1 is a perfect critic; 0 is a critic no better than a constant,
            or returns without variance.
    """
    count = stats["tokens"].clamp(min=1.0)
    errors = stats["squared_error"] / count - (stats["error"] / count).square()
    returns = stats["returns_squared"] / count - (stats["returns"] / count).square()
    varies = returns > 0
    return torch.where(varies, 1 - errors / torch.where(varies, returns, 1.0), 0.0)
