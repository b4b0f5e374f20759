"""Pack rows into micro-batches under a token budget."""

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
    """Pack rows into micro-batches of at most `max_tokens`. Rows of one prompt share its tokens.

    A prompt whose rows exceed the budget is split into full packs and a remainder. Remainders and
    whole prompts are then placed by first-fit decreasing: 32 prompts of 256 tokens with 8
    responses of 512 take 39 packs of 4096. If each prompt's rows were split evenly, each half would
    need a pack of its own: 64 packs.

    Args:
        prompts: Prompt key of each row; equal for the rows of one prompt.
        prompt_lengths: Number of prompt tokens of each row.
        response_lengths: Number of response tokens of each row.
        max_tokens: Token budget of a pack. Only a pack of one long row may exceed it.
        is_packed: False for a model that needs one padded row per response
            (`raypo.models.packed_attention.reads_packed`). The prompt and the padding then count
            in every row.

    Returns:
        Row indices of each pack; every row appears once. Rows of one prompt stay together as far
        as the budget allows. The largest packs come first, so that a budget that does not fit into
        memory fails at once. Packs of equal size keep their order.

    Raises:
        ValueError: `max_tokens` is below 1.

    Example: with prompts `a a b` of 3, 3 and 2 tokens, responses of 4, 1 and 2 and a budget of 8
    the packs are `[[0, 1], [2]]`; with a budget of 7 they are `[[0], [1], [2]]`.
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens ({max_tokens}): a batch needs at least one token.")
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
    """Split one prompt's rows, in order, so that each part fits a pack. Yield (tokens, rows)."""
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
    """Append empty batches until all workers have the same number. All workers call this."""
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
