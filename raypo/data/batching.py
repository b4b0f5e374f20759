"""Batches by token budget."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from raypo.collectives import Workers, as_tensor


def batches_by_tokens(
    prompts: Sequence[Hashable],
    prompt_lengths: Sequence[int],
    response_lengths: Sequence[int],
    max_tokens: int,
    *,
    is_packed: bool = True,
) -> list[list[int]]:
    """Rows in packs of at most `max_tokens`, where the rows of a pack share their prompt's tokens.

    Args:
        prompts: Equal for the rows of one prompt.
        prompt_lengths: Tokens of each row's prompt.
        response_lengths: Tokens of each row's response.
        max_tokens: Most tokens of a pack; only a single row that is longer exceeds it.
        is_packed: False for a model that reads a padded row for each response
            (`raypo.models.packed_attention.reads_packed`): prompts and padding count in each.

    Returns:
        Indices of rows, every row once. Rows of one prompt stay together as far as the budget
        allows. The prompts with most tokens come first, so that a budget that does not fit into
        memory fails at once; prompts and rows of one length keep their order.

    Example: with prompts `a a b` of 3, 3 and 2 tokens, responses of 4, 1 and 2 and a budget of 8
    the packs are `[[0, 1], [2]]`; with a budget of 7 they are `[[0], [1], [2]]`.
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens ({max_tokens}): a batch takes at least one token.")
    if not is_packed:
        return _padded_batches(prompt_lengths, response_lengths, max_tokens)
    rows_of: dict[Hashable, list[int]] = {}
    for row, prompt in enumerate(prompts):
        rows_of.setdefault(prompt, []).append(row)

    def tokens(rows: list[int]) -> int:
        return prompt_lengths[rows[0]] + sum(response_lengths[row] for row in rows)

    batches: list[list[int]] = []
    room = 0
    for rows in sorted(rows_of.values(), key=tokens, reverse=True):
        if batches and tokens(rows) <= room:
            batches[-1] += rows
            room -= tokens(rows)
            continue
        room = -1  # a prompt that is cut starts a pack
        for row in rows:
            if response_lengths[row] > room:
                batches.append([])
                room = max_tokens - prompt_lengths[row]
            batches[-1].append(row)
            room -= response_lengths[row]
    return batches


def equally_many(batches: list[list[int]], workers: Workers) -> list[list[int]]:
    """The batches, and empty ones after them: every worker has as many; all call it together."""
    count = int(workers.max(as_tensor(len(batches))))
    return batches + [[] for _ in range(count - len(batches))]


def _padded_batches(
    prompt_lengths: Sequence[int], response_lengths: Sequence[int], max_tokens: int
) -> list[list[int]]:
    lengths = [sum(both) for both in zip(prompt_lengths, response_lengths, strict=True)]
    batches: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        if not batches or (len(batches[-1]) + 1) * lengths[batches[-1][0]] > max_tokens:
            batches.append([])
        batches[-1].append(row)
    return batches
