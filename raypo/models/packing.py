"""Rows of prompt and response laid one after the other, without padding and each prompt once.

Responses to one prompt share its tokens: `prompt | response 1 | response 2 | ...`, where every
response sees the prompt and itself, and its positions go on where the prompt's end. What a model
computes so equals what it computes of separate rows, to rounding.

B rows, T response tokens, N packed tokens, M hidden states that are asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from raypo.plan.sizes import SHARED_SCORES, repeated_scores
from raypo.types import to_device


@dataclass(frozen=True)
class Group:
    """Where a prompt and its responses lie among the packed tokens."""

    first: int
    """Position of the prompt's first token."""
    prompt: int
    """Tokens of the prompt."""
    responses: tuple[int, ...]
    """Tokens of each response; they follow the prompt in this order."""

    @property
    def tokens(self) -> int:
        """Tokens of the prompt and of all responses together."""
        return self.prompt + sum(self.responses)

    @property
    def prompt_slice(self) -> slice:
        """Where the prompt is."""
        return slice(self.first, self.first + self.prompt)

    @property
    def responses_slice(self) -> slice:
        """Where all of its responses are."""
        return slice(self.first + self.prompt, self.first + self.tokens)


@dataclass(frozen=True)
class Layout:
    """Who sees whom among N packed tokens; what attention needs to know."""

    groups: tuple[Group, ...]
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @cached_property
    def rows(self) -> tuple[Tensor, Tensor]:
        """The way to a batch of whole rows, a row for each response after its prompt, and back.

        The first tensor, [rows, longest] int64, says which token stands at each place (padding on
        the right repeats the first one); the second, [N] int64, where each token stands in the
        flattened batch: a prompt's in its first row.
        """
        there: list[Tensor] = []
        back: list[Tensor] = []
        longest = max(g.prompt + max(g.responses, default=0) for g in self.groups)
        for group in self.groups:
            prompt = torch.arange(group.first, group.first + group.prompt)
            first = group.first + group.prompt
            back.append(len(there) * longest + torch.arange(group.prompt))
            for length in group.responses or (0,):
                own = torch.arange(first, first + length)
                padding = prompt[:1].expand(longest - group.prompt - length)
                back.append(len(there) * longest + group.prompt + torch.arange(length))
                there.append(torch.cat([prompt, own, padding]))
                first += length
        return to_device(torch.stack(there), self.device), to_device(torch.cat(back), self.device)

    @cached_property
    def responses(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The way to a batch of responses alone, and back.

        Which token stands at each place, [responses, longest] int64 (padding on the right repeats
        the first one), and where it is padding; the responses' tokens, and where each of them
        stands in the flattened batch.
        """
        firsts: list[int] = []
        for group in self.groups:
            firsts += accumulate(group.responses, initial=group.responses_slice.start)
            firsts.pop()
        lengths = torch.tensor([n for group in self.groups for n in group.responses]).long()
        place = torch.arange(int(lengths.max()) if len(lengths) else 0)
        is_padding = place >= lengths[:, None]
        starts = torch.tensor(firsts).long()
        there = starts[:, None] + place.expand(len(lengths), -1).masked_fill(is_padding, 0)
        back = torch.nonzero(~is_padding.flatten()).flatten()
        return tuple(
            to_device(each, self.device)
            for each in (there, is_padding, there.flatten()[back], back)
        )  # type: ignore[return-value]

    @property
    def shares_scores(self) -> bool:
        """Whether attention on CPUs shares prompts too: whole rows repeat enough of its scores."""
        repeated = sum(repeated_scores(g.prompt, len(g.responses)) for g in self.groups)
        return repeated > SHARED_SCORES * len(self.groups)

    @cached_property
    def segments(self) -> tuple[Tensor, Tensor, Tensor]:
        """Each token's group, its part of the group (0 is the prompt), and its position.

        Three tensors [N] int32.
        """
        return tuple(to_device(each, self.device) for each in self.segments_on_host)  # type: ignore[return-value]

    @cached_property
    def segments_on_host(self) -> tuple[Tensor, Tensor, Tensor]:
        """`segments` on the CPU: to read them back from a GPU would wait for its work."""
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
    """Rows as one row that a model reads, and the way back."""

    input_ids: Tensor  # [1, N] int64
    position_ids: Tensor  # [1, N] int64
    layout: Layout
    states: Tensor  # [M] int64, the packed token whose hidden state each answer is made of
    places: Tensor  # [M] int64, where each answer stands in the flattened [B, T]
    shape: tuple[int, int]  # B, T
    response_ids: Tensor  # int64, all response tokens, row by row

    def unpacked(self, answers: Tensor) -> Tensor:
        """Answers [M] as [B, T], 0 where the row has no such token."""
        rows, width = self.shape
        return answers.new_zeros(rows * width).scatter(0, self.places, answers).view(rows, width)


def pack(
    prompts: Sequence[np.ndarray],
    responses: Sequence[np.ndarray],
    *,
    with_last: bool = False,
    width: int = 0,
    device: torch.device | str = "cpu",
) -> Packed:
    """Rows as one packed row; equal prompts are read once.

    Args:
        prompts: Token ids of each row's prompt, at least one.
        responses: Token ids of each row's response.
        with_last: Also ask for the state after the last token of a response. Without it that token
            is not read at all: it predicts nothing.
        width: Least T of the answers, where rows are wider than their longest response.

    Returns:
        The answer at [b, t] is that of the state before response token t of row b is chosen;
        with `with_last` T is one more than the longest response.

    Example: prompts `[5 6]`, `[5 6]`, responses `[7 8]`, `[9]` are read as `5 6 7`, at the
    positions `0 1 2`; the three answers are made of the states 1, 2 and 1.
    """
    extra = int(with_last)
    rows_of: dict[bytes, list[int]] = {}
    for row, prompt in enumerate(prompts):
        rows_of.setdefault(np.asarray(prompt, np.int64).tobytes(), []).append(row)
    groups: list[Group] = []
    ids: list[np.ndarray] = []
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
    )


def pack_padded(
    prompt_ids: Tensor,  # [B, P] int64
    prompt_mask: Tensor,  # [B, P] bool
    response_ids: Tensor,  # [B, T] int64
    attention_mask: Tensor,  # [B, T] bool
    *,
    with_last: bool = False,
    device: torch.device | None = None,
) -> Packed:
    """`pack` of padded rows; masks are False on padding, which may stand on either side.

    Args:
        device: Of what is packed; None: that of the ids, which are read on the CPU.
    """
    return pack(
        _unpadded(prompt_ids, prompt_mask),
        _unpadded(response_ids, attention_mask),
        with_last=with_last,
        width=attention_mask.shape[1] + int(with_last),
        device=device or prompt_ids.device,
    )


def _unpadded(ids: Tensor, mask: Tensor) -> list[np.ndarray]:
    rows = zip(ids.cpu().numpy(), mask.cpu().numpy(), strict=True)
    return [row[kept] for row, kept in rows]


def _ids(parts: Sequence[np.ndarray], device: torch.device | str) -> Tensor:
    joined = np.concatenate([np.zeros(0, np.int64), *parts])
    return to_device(torch.from_numpy(joined.astype(np.int64)), device)
