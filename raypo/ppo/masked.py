"""Sums, means and whitening over the tokens that a mask keeps.

Notation: B responses, T response tokens. Every mask: True = keep. Sums are in float64, so that they
can be added over micro-batches and workers in any order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

MIN_VARIANCE = 1e-8
"""Floor of the variance in whitening."""
BLOCK_ELEMENTS = 2**17
"""Number of elements of a block on a CPU. It affects speed only."""


def check_same_shape(**tensors: Tensor) -> None:
    """Check that tensors have the same shape, because broadcasting would hide mistakes.

    Raises:
        ValueError: the shapes differ.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if len(set(shapes.values())) > 1:
        listed = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise ValueError(f"{listed} must share one shape.")


def keep(
    x: Tensor,  # any shape
    mask: Tensor,  # same shape, bool
) -> Tensor:
    """Return `x` in at least float32, and exactly 0 where masked.

    Apply it before any arithmetic: it also keeps NaN and infinity at masked positions out of the
    gradient. Multiplying by the mask would not do so, because 0 * inf is NaN.

    Returns:
        x: Same shape as the input; half precision becomes float32.
    """
    if x.dtype in (torch.float16, torch.bfloat16):
        x = x.float()
    return torch.where(mask.bool(), x, 0.0)


def exact_sum(
    x: Tensor,  # [B, ...]
) -> Tensor:
    """Return the sum of `x` in float64, differentiable.

    Returns:
        sum: float64 scalar.
    """
    # Sum in blocks, because a float64 sum in torch first copies its whole float32 input.
    blocks = x.split(_rows_of_block(x))
    return torch.stack([block.sum(dtype=torch.float64) for block in blocks]).sum()


def masked_sum(
    x: Tensor,  # any shape
    mask: Tensor,  # same shape, bool
) -> Tensor:
    """Return the sum of `x` over kept positions.

    Returns:
        sum: float64 scalar, 0 if nothing is kept.
    """
    return exact_sum(keep(x, mask))


def masked_moments(
    x: Tensor,  # [B, ...]
    mask: Tensor,  # same shape, bool
) -> Tensor:
    """Return the count, sum and sum of squares of `x` over kept positions, detached.

    Returns:
        moments: [3] float64. Sum it over workers for `masked_whiten`.

    Raises:
        ValueError: the shapes differ.
    """
    check_same_shape(x=x, mask=mask)

    def block_moments(x: Tensor, mask: Tensor) -> list[Tensor]:
        values = keep(x.double(), mask)
        return [
            torch.stack([mask.sum().double(), values.sum(), values.square().sum()]).unsqueeze(0)
        ]

    with torch.no_grad():
        (moments,) = in_blocks(block_moments, x, mask.bool(), dtype=torch.float64)  # [blocks, 3]
        return moments.sum(0)


def masked_whiten(
    x: Tensor,  # [B, T]
    mask: Tensor,  # [B, T] bool
    *,
    moments: Tensor | Iterable[Tensor | float] | None = None,
) -> Tensor:
    """Shift and scale `x` to mean 0 and population variance 1 over kept positions, detached.

    Args:
        x: Values to whiten.
        mask: True on positions to keep.
        moments: Count, sum and sum of squares of the global batch. None means to compute them from
            `x`.

    Returns:
        whitened: [B, T], exactly 0 where masked. Values that are all equal become 0.

    Raises:
        ValueError: the shapes differ.

    Paper: Hu et al. 2025, arXiv:2501.03262 (normalisation over the global batch).
    """
    check_same_shape(x=x, mask=mask)
    moments = masked_moments(x, mask) if moments is None else moments
    count, total, squares = (torch.as_tensor(moment, dtype=torch.float64) for moment in moments)
    count = count.clamp(min=1.0)
    mean = total / count
    variance = (squares / count - mean.square()).clamp(min=MIN_VARIANCE)
    shift, scale = mean.to(x.device), variance.to(x.device).rsqrt()

    def whiten(x: Tensor, mask: Tensor) -> list[Tensor]:
        return [keep((x.double() - shift) * scale, mask)]

    with torch.no_grad():
        return in_blocks(whiten, x, mask.bool())[0]


def in_blocks(
    function: Callable[..., list[Tensor]],
    *tensors: Tensor,  # [B, ...]
    dtype: torch.dtype | None = None,
) -> list[Tensor]:
    """Apply a function to tensors, on a CPU in blocks of rows.

    The blocks are small enough for intermediate results to fit the caches. On other devices all
    rows are one block.

    Args:
        function: Function of one block of rows of each tensor. It returns a list of tensors, and
            `in_blocks` concatenates them over the blocks.
        tensors: Tensors with the same number of rows.
        dtype: Dtype of the results. None means the dtype of the first tensor, but at least float32.

    Returns:
        results: The results of all blocks, concatenated.
    """
    dtype = torch.promote_types(tensors[0].dtype, torch.float32) if dtype is None else dtype
    size = _rows_of_block(tensors[0])
    blocks = zip(*(tensor.split(size) for tensor in tensors), strict=True)
    parts = [[part.to(dtype) for part in function(*block)] for block in blocks]
    return [torch.cat([part[i] for part in parts]) for i in range(len(parts[0]))]


def _rows_of_block(x: Tensor) -> int:
    if x.device.type != "cpu":
        return max(x.shape[0], 1)
    return max(BLOCK_ELEMENTS // max(x[:1].numel(), 1), 1)
