"""Batches by token budget."""

from __future__ import annotations

from collections.abc import Sequence


def batches_by_tokens(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Rows of like length together, as many as the budget takes once they are padded.

    Args:
        lengths: Tokens of each row.
        max_tokens: Most tokens of a batch, rows times its longest row; only a single row that is
            longer than that exceeds it.

    Returns:
        Indices of rows, every row once; the longest rows come first, so that a budget that does
        not fit into memory fails at once, and rows of one length keep their order.

    Example: `batches_by_tokens([3, 5, 3, 4], 8)` is `[[1], [3, 0], [2]]`.
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens ({max_tokens}): a batch takes at least one token.")
    batches: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        longest = lengths[batches[-1][0]] if batches else 0
        if batches and (len(batches[-1]) + 1) * longest <= max_tokens:
            batches[-1].append(row)
        else:
            batches.append([row])
    return batches
