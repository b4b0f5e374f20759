"""Batches by token budget."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

from raypo.collectives import Workers, as_tensor


def batches_by_tokens(
    prompts: Sequence[Hashable],
    prompt_lengths: Sequence[int],
    response_lengths: Sequence[int],
    max_tokens: int,
    *,
    is_packed: bool = True,
) -> list[list[int]]:
    """Cut rows into packs of at most `max_tokens`; the rows of a pack share their prompt's tokens.

    A prompt whose rows exceed the budget is cut into full packs and a rest. Rests and whole
    prompts are then placed by first fit, the largest first: 32 prompts of 256 tokens with 8
    responses of 512 take 39 packs of 4096. Cut evenly, each half would need a pack of its own: 64.

    Args:
        prompts: Equal for the rows of one prompt.
        prompt_lengths: Tokens of each row's prompt.
        response_lengths: Tokens of each row's response.
        max_tokens: Most tokens of a pack; only a single row that is longer exceeds it.
        is_packed: False for a model that reads a padded row for each response
            (`raypo.models.packed_attention.reads_packed`): prompts and padding count in each.

    Returns:
        Indices of rows, every row once. Rows of one prompt stay together as far as the budget
        allows. The packs with most tokens come first, so that a budget that does not fit into
        memory fails at once; what has equally many tokens keeps its order.

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
    parts: list[tuple[int, list[int]]] = []  # tokens, rows of one prompt
    for rows in rows_of.values():
        parts += _within_budget(rows, prompt_lengths[rows[0]], response_lengths, max_tokens)
    packs: list[tuple[int, list[int]]] = []
    for tokens, rows in _most_first(parts):
        for place, (held, others) in enumerate(packs):
            if held + tokens <= max_tokens:
                packs[place] = (held + tokens, others + rows)
                break
        else:
            packs.append((tokens, rows))
    return [rows for _, rows in _most_first(packs)]


def _within_budget(
    rows: list[int], prompt_tokens: int, response_lengths: Sequence[int], max_tokens: int
) -> Iterator[tuple[int, list[int]]]:
    """Cut one prompt's rows, in their order, into parts that a pack can hold, with their tokens."""
    tokens, part = prompt_tokens, list[int]()
    for row in rows:
        if part and tokens + response_lengths[row] > max_tokens:
            yield tokens, part
            tokens, part = prompt_tokens, []
        tokens += response_lengths[row]
        part.append(row)
    yield tokens, part


def _most_first(parts: list[tuple[int, list[int]]]) -> list[tuple[int, list[int]]]:
    return sorted(parts, key=lambda part: -part[0])


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
