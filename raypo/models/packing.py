"""Packing of prompts and responses into one row, without padding and with each prompt once.

Responses to one prompt share its tokens: `prompt | response 1 | response 2 | ...`. Every response
attends to the prompt and to itself, and its positions continue those of the prompt. A model's
results equal those of separate rows, except for rounding.

B rows, T response tokens, N packed tokens, M requested hidden states.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from raypo.models.chunk_sizes import FLEX_BLOCK, MAX_PADDING, SHARED_SCORES, repeated_scores
from raypo.types import Images, to_device


@dataclass(frozen=True)
class Group:
    """Location of a prompt and its responses among the packed tokens."""

    first: int
    """Index of the prompt's first token."""
    prompt: int
    """Length of the prompt in tokens."""
    responses: tuple[int, ...]
    """Length of each response in tokens. The responses follow the prompt in this order."""

    @property
    def tokens(self) -> int:
        """Length of the prompt and all responses together."""
        return self.prompt + sum(self.responses)

    @property
    def prompt_slice(self) -> slice:
        """Slice of the prompt."""
        return slice(self.first, self.first + self.prompt)

    @property
    def responses_slice(self) -> slice:
        """Slice of all responses."""
        return slice(self.first + self.prompt, self.first + self.tokens)


@dataclass(frozen=True)
class Layout:
    """Structure of N packed tokens, which determines the attention mask."""

    groups: tuple[Group, ...]
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @cached_property
    def rows(self) -> tuple[Tensor, Tensor]:
        """Indices to unpack tokens into a padded batch, and to pack such a batch again.

        A row of the batch is a prompt followed by one response, padded on the right.

        Returns:
            gather_index: [rows, longest] int64. For each position in the batch, the index of its
                packed token. Padding has the index of the prompt's first token.
            scatter_index: [N] int64. For each packed token, its index in the flattened batch. A
                prompt is in several rows of the batch, and its tokens have their index in the first
                of them.
        """
        gather_index: list[Tensor] = []
        scatter_index: list[Tensor] = []
        longest = max(g.prompt + max(g.responses, default=0) for g in self.groups)
        for group in self.groups:
            prompt = torch.arange(group.first, group.first + group.prompt)
            first = group.first + group.prompt
            scatter_index.append(len(gather_index) * longest + torch.arange(group.prompt))
            for length in group.responses or (0,):
                own = torch.arange(first, first + length)
                padding = prompt[:1].expand(longest - group.prompt - length)
                start = len(gather_index) * longest + group.prompt
                scatter_index.append(start + torch.arange(length))
                gather_index.append(torch.cat([prompt, own, padding]))
                first += length
        made = torch.stack(gather_index), torch.cat(scatter_index)
        return to_device(made[0], self.device), to_device(made[1], self.device)

    @cached_property
    def responses(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Indices to unpack only the responses into a padded batch, and to pack them again.

        A row of the batch is one response without its prompt, padded on the right.

        Returns:
            gather_index: [responses, longest] int64. For each position in the batch, the index of
                its packed token. Padding has the index of the response's first token.
            is_padding: [responses, longest] bool, True on padding.
            tokens: [tokens] int64. For each token of a response, its index among the packed tokens.
            scatter_index: [tokens] int64. For each token of a response, its index in the flattened
                batch.
        """
        firsts: list[int] = []
        for group in self.groups:
            firsts += accumulate(group.responses, initial=group.responses_slice.start)
            firsts.pop()
        lengths = torch.tensor([n for group in self.groups for n in group.responses]).long()
        position = torch.arange(int(lengths.max()) if len(lengths) else 0)
        is_padding = position >= lengths[:, None]
        offsets = position.expand(len(lengths), -1).masked_fill(is_padding, 0)
        gather_index = torch.tensor(firsts).long()[:, None] + offsets
        scatter_index = torch.nonzero(~is_padding.flatten()).flatten()
        tokens = gather_index.flatten()[scatter_index]
        return tuple(
            to_device(index, self.device)
            for index in (gather_index, is_padding, tokens, scatter_index)
        )  # type: ignore[return-value]

    @property
    def shares_scores(self) -> bool:
        """True if attention on a CPU should compute each prompt once for all its responses.

        This pays if separate rows would compute many attention scores of the prompts repeatedly.
        """
        repeated = sum(repeated_scores(g.prompt, len(g.responses)) for g in self.groups)
        return repeated > SHARED_SCORES * len(self.groups)

    @cached_property
    def segments(self) -> tuple[Tensor, Tensor, Tensor]:
        """Group, part of the group (0 is the prompt) and position of each token, [N] int32 each."""
        return tuple(to_device(each, self.device) for each in self.segments_on_host)  # type: ignore[return-value]

    @cached_property
    def segments_on_host(self) -> tuple[Tensor, Tensor, Tensor]:
        """`segments` on the CPU. Copying them back from a GPU would wait for its queued work."""
        groups, parts, positions = [], [], []
        for number, group in enumerate(self.groups):
            lengths = torch.tensor((group.prompt, *group.responses))
            groups.append(torch.full((group.tokens,), number))
            parts.append(torch.repeat_interleave(torch.arange(len(lengths)), lengths))
            positions.append(torch.arange(group.prompt))
            positions += [group.prompt + torch.arange(length) for length in group.responses]
        return tuple(torch.cat(each).int() for each in (groups, parts, positions))  # type: ignore[return-value]


@dataclass(frozen=True)
class Packed:
    """Packed row for a model, with the indices to unpack its results."""

    input_ids: Tensor  # [1, N] int64
    position_ids: Tensor  # [1, N] int64
    layout: Layout
    states: Tensor  # [M] int64, the packed token whose hidden state gives each result
    places: Tensor  # [M] int64, the index of each result in the flattened [B, T]
    shape: tuple[int, int]  # B, T
    response_ids: Tensor  # int64, all response tokens, row by row
    experts: Tensor | None = None  # [N, L, k] integers, to be replayed; None: not replayed
    images: tuple[Images | None, ...] = ()  # of each group's prompt; empty if no prompt has any

    def unpacked(self, answers: Tensor) -> Tensor:
        """Arrange results [M] as [B, T], with 0 on padding."""
        rows, width = self.shape
        joined = self.joined(answers)
        return joined.new_zeros(rows * width).scatter(0, self.places, joined).view(rows, width)

    def own(self, rows: Tensor) -> Tensor:
        """Return the rows of the results that this worker computes, here all (`PackedSlice`)."""
        return rows

    def joined(self, answers: Tensor) -> Tensor:
        """Return all results from those that this worker computes, here all (`PackedSlice`)."""
        return answers


def pack(
    prompts: Sequence[np.ndarray],
    responses: Sequence[np.ndarray],
    *,
    with_last: bool = False,
    width: int = 0,
    device: torch.device | str = "cpu",
    experts: Sequence[tuple[np.ndarray, np.ndarray]] | None = None,
    images: Sequence[Images | None] | None = None,
) -> Packed:
    """Pack rows into one; equal prompts are packed once.

    Args:
        prompts: Token ids of each row's prompt, at least one token.
        responses: Token ids of each row's response.
        with_last: True also packs the last token of each response, for the state after it. False
            leaves this token out, because it predicts no other token.
        width: Minimum T of the results.
        device: Device of the tensors.
        experts: Experts of each row's prompt [P, L, k] and response [T, L, k]. Equal prompts with
            different experts are packed separately. None means that no experts are replayed.
        images: Images of each row's prompt. Equal prompts with different images are packed
            separately. None means that no prompt has images.

    Returns:
        The packed row. The result at [b, t] belongs to the state before response token t of row b;
        with `with_last`, T is one more than the longest response.

    Example: the prompts `[5 6]` and `[5 6]` with the responses `[7 8]` and `[9]` are packed as
    `5 6 7`, at the positions `0 1 2`. The last tokens 8 and 9 are left out. The results for the
    response tokens 7, 8 and 9 come from the states 1, 2 and 1.
    """
    extra = int(with_last)
    rows_of: dict[bytes, list[int]] = {}
    for row, prompt in enumerate(prompts):
        key = np.asarray(prompt, np.int64).tobytes()
        key += b"" if experts is None else experts[row][0].tobytes()
        key += digest_of(images, row)
        rows_of.setdefault(key, []).append(row)
    groups: list[Group] = []
    ids: list[np.ndarray] = []
    chosen: list[np.ndarray] = []
    states: list[np.ndarray] = [np.zeros(0, np.int64)] * len(prompts)
    end = 0
    for rows in rows_of.values():
        prompt = prompts[rows[0]]
        read = [responses[row][: max(len(responses[row]) - 1 + extra, 0)] for row in rows]
        group = Group(end, len(prompt), tuple(len(each) for each in read if len(each)))
        first = end + len(prompt)
        for row, tokens in zip(rows, read, strict=True):
            if len(responses[row]) + extra:
                own = np.arange(first, first + len(tokens))
                states[row] = np.concatenate([[end + len(prompt) - 1], own])
            first += len(tokens)
        groups.append(group)
        ids += [prompt, *read]
        if experts is not None:
            lengths = map(len, read)
            chosen += [experts[rows[0]][0]]
            chosen += [experts[row][1][:length] for row, length in zip(rows, lengths, strict=True)]
        end = first
    layout = Layout(tuple(groups), torch.device(device))
    answers = np.array([len(each) for each in states])
    width = max(width, int(answers.max(initial=0)))
    places = np.flatnonzero(np.arange(width) < answers[:, None])
    return Packed(
        input_ids=_ids(ids, device)[None],
        position_ids=layout.segments[2].long()[None],
        layout=layout,
        states=_ids(states, device),
        places=to_device(torch.from_numpy(places), device),
        shape=(len(answers), width),
        response_ids=_ids(responses, device),
        experts=to_device(torch.from_numpy(np.concatenate(chosen)), device) if chosen else None,
        images=tuple(images[rows[0]] for rows in rows_of.values()) if images else (),
    )


def digest_of(images: Sequence[Images | None] | None, row: int) -> bytes:
    """Return what tells a row's images from those of other rows with the same token ids."""
    own = images[row] if images else None
    return own.digest.encode() if own else b""


def in_whole_blocks(packed: Packed, block: int = FLEX_BLOCK) -> Packed:
    """Pad prompts and responses to whole blocks of attention, if that adds few tokens.

    Fewer blocks are then masked in part, and no block belongs to two responses. No other token
    attends to the padding, and no result depends on it. If more than `MAX_PADDING` would be added,
    the rows stay as they are.

    Args:
        packed: Packed rows for a model that reads them.
        block: Number of tokens of a block.
    """
    groups = packed.layout.groups
    parts = [length for group in groups for length in (group.prompt, *group.responses)]
    lengths = np.array(parts, np.int64)
    padded = -(-lengths // block) * block
    if padded.sum() > (1 + MAX_PADDING) * lengths.sum():
        return packed
    shifts = (padded - lengths).cumsum() - (padded - lengths)
    moved = np.arange(lengths.sum()) + np.repeat(shifts, lengths)
    made: list[Group] = []
    end = 0
    for group in groups:
        own, padded = np.split(padded, [1 + len(group.responses)])
        # The responses must not attend to the padding of the prompt, so it is one of them.
        responses = (int(own[0]) - group.prompt, *own[1:].tolist())
        made.append(Group(end, group.prompt, tuple(filter(None, responses))))
        end += int(own.sum())
    there = to_device(torch.from_numpy(moved), packed.layout.device)

    def spread(ids: Tensor) -> Tensor:
        # Padding gets position 0, because later ones may be beyond the model's context.
        return ids.new_zeros(1, end).scatter(1, there[None], ids)

    experts = packed.experts
    if experts is not None:
        experts = experts.new_zeros(end, *experts.shape[1:]).index_copy(0, there, experts)
    return replace(
        packed,
        input_ids=spread(packed.input_ids),
        position_ids=spread(packed.position_ids),
        layout=Layout(tuple(made), packed.layout.device),
        states=there[packed.states],
        experts=experts,
    )


def pack_padded(
    prompt_ids: Tensor,  # [B, P] int64
    prompt_mask: Tensor,  # [B, P] bool
    response_ids: Tensor,  # [B, T] int64
    attention_mask: Tensor,  # [B, T] bool
    *,
    with_last: bool = False,
    device: torch.device | None = None,
    experts: tuple[Tensor, Tensor] | None = None,  # [B, P, L, k], [B, T, L, k]
    images: Sequence[Images | None] | None = None,  # [B]
) -> Packed:
    """Pack padded rows (`pack`). Masks are False on padding, which may be on either side.

    Args:
        prompt_ids: Token ids of the prompts.
        prompt_mask: Mask of the prompts.
        response_ids: Token ids of the responses.
        attention_mask: Mask of the responses.
        with_last: See `pack`.
        device: Device of the packed tensors. None means the device of the ids.
        experts: Experts of the prompts and of the responses. None means that none are replayed.
        images: See `pack`.
    """
    rows_of_experts = None
    if experts is not None:
        masks = (prompt_mask, attention_mask)
        of_parts = [_unpadded(part, mask) for part, mask in zip(experts, masks, strict=True)]
        rows_of_experts = [*zip(*of_parts, strict=True)]
    return pack(
        _unpadded(prompt_ids, prompt_mask),
        _unpadded(response_ids, attention_mask),
        with_last=with_last,
        width=attention_mask.shape[1] + int(with_last),
        device=device or prompt_ids.device,
        experts=rows_of_experts,
        images=images,
    )


def _unpadded(ids: Tensor, mask: Tensor) -> list[np.ndarray]:
    rows = zip(ids.cpu().numpy(), mask.cpu().numpy(), strict=True)
    return [row[kept] for row, kept in rows]


def _ids(parts: Sequence[np.ndarray], device: torch.device | str) -> Tensor:
    joined = np.concatenate([np.zeros(0, np.int64), *parts])
    return to_device(torch.from_numpy(joined.astype(np.int64)), device)
