"""Sequence parallelism: the workers of a group share the tokens of a packed row.

Each worker has an equal slice of the tokens in all layers but attention. Attention needs all tokens
but treats heads separately, so an exchange before it turns slices of tokens into slices of heads,
and an exchange after it turns them back (Ulysses, arXiv:2309.14509). Each worker computes the
results of its own tokens, and `PackedSlice.joined` gives all results to all workers.

Each worker's gradients are those of the whole loss through its own tokens. The sum over the group
is the gradient of the loss, so the loss of a group counts once.

N packed tokens, H query heads, H_kv heads of keys and values, D head size, n workers of a group, M
results, m results of this worker.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from raypo.models.packing import Group, Layout, Packed, in_whole_blocks


@dataclass(frozen=True)
class SequenceGroup:
    """Workers that share the tokens of a packed row, from the view of one of them."""

    rank: int
    count: int
    group: Any
    """Process group on the default backend, which exchanges tensors of the models' device."""

    @classmethod
    def of(cls, teams: Sequence[range], rank: int, count: int) -> SequenceGroup:
        """Create the process groups; all workers of the default group call it together.

        Args:
            teams: Ranks of the workers that train the same models. Neighbours are a group.
            rank: Rank of this worker in the default group.
            count: Number of workers of a group, which divides the number of a team's workers.
        """
        groups = {}
        for team in teams:
            for first in range(0, len(team), count):
                members = team[first : first + count]
                groups[members] = dist.new_group(list(members))
        own = next(members for members in groups if rank in members)
        return cls(rank - own.start, count, groups[own])


@dataclass(frozen=True)
class SlicedLayout(Layout):
    """Layout of packed tokens of which each worker of a group has a slice."""

    workers: SequenceGroup | None = None

    @cached_property
    def whole(self) -> Layout:
        """Layout of all tokens, for attention to some of the heads."""
        return Layout(self.groups, self.device)

    def attend(
        self,
        attention: Callable[[Tensor, Tensor, Tensor], Tensor],
        query: Tensor,  # [1, H, N / n, D]
        key: Tensor,  # [1, H_kv, N / n, D]
        value: Tensor,  # [1, H_kv, N / n, D]
    ) -> Tensor:
        """Compute attention to all tokens, [1, N / n, H, D].

        If the workers cannot share the heads of keys and values evenly, those are repeated. If they
        cannot share the query heads evenly, heads of zeros are added, and their results dropped.

        Args:
            attention: Function of query, key and value [1, heads, N, D] that returns
                [1, N, heads, D].
        """
        assert self.workers is not None
        workers, heads, key_heads = self.workers, query.shape[1], key.shape[1]
        missing = -heads % workers.count
        repeats = heads // key_heads
        if not missing:
            repeats = workers.count // math.gcd(key_heads, workers.count)
        if repeats > 1:
            key, value = (each.repeat_interleave(repeats, dim=1) for each in (key, value))
        if missing:
            no_heads = (0, 0, 0, 0, 0, missing)
            query, key, value = (pad(each, no_heads) for each in (query, key, value))
        query, key, value = (_heads_of_all_tokens(each, workers) for each in (query, key, value))
        mixed = attention(query, key, value)
        return _tokens_of_all_heads(mixed, workers)[:, :, :heads]


@dataclass(frozen=True)
class PackedSlice(Packed):
    """A worker's slice of a packed row. `states` and `response_ids` are those of its own results.

    `places` and `shape` are those of all results.
    """

    own_results: Tensor | None = None  # [m] int64, their indices among all results
    num_results: int = 0  # M

    def own(self, rows: Tensor) -> Tensor:
        """Return the rows [m, ...] of this worker's results, from those of all results [M, ...]."""
        assert self.own_results is not None
        return rows[self.own_results]

    def joined(self, answers: Tensor) -> Tensor:
        """Return the results of all workers [M, ...] from those of each worker [m, ...]."""
        assert isinstance(self.layout, SlicedLayout)
        return _Joined.apply(  # type: ignore[no-any-return]
            answers, self.own_results, self.num_results, self.layout.workers
        )


def sliced(packed: Packed, workers: SequenceGroup | None) -> Packed:
    """Return this worker's slice of a packed row. Without a group, return the whole row.

    A last prompt of padding, to which no other token attends, makes all slices equally long.
    """
    if workers is None:
        return packed
    assert not packed.images, "images are refused with learner.sequence_parallel"
    if packed.layout.device.type == "cuda":
        packed = in_whole_blocks(packed)
    total = packed.input_ids.shape[1]
    missing = -total % workers.count
    groups = packed.layout.groups + ((Group(total, missing, ()),) if missing else ())
    size = (total + missing) // workers.count
    first = workers.rank * size

    def cut(tokens: Tensor) -> Tensor:  # [N, ...]
        padding = tokens.new_zeros(missing, *tokens.shape[1:])
        return torch.cat([tokens, padding])[first : first + size]

    is_own = (packed.states >= first) & (packed.states < first + size)
    own = torch.nonzero(is_own).flatten()
    has_ids = len(packed.response_ids) == len(packed.states)  # values and scores need no ids
    values = {each.name: getattr(packed, each.name) for each in fields(Packed)}
    values |= {
        "input_ids": cut(packed.input_ids[0])[None],
        "position_ids": cut(packed.position_ids[0])[None],
        "layout": SlicedLayout(groups, packed.layout.device, workers),
        "states": packed.states[own] - first,
        "response_ids": packed.response_ids[own] if has_ids else packed.response_ids,
        "experts": None if packed.experts is None else cut(packed.experts),
    }
    return PackedSlice(**values, own_results=own, num_results=len(packed.states))


def _heads_of_all_tokens(tokens: Tensor, workers: SequenceGroup) -> Tensor:
    """Exchange all heads of own tokens, [1, H, N / n, D], for own heads [1, H / n, N, D]."""
    received = _exchanged(tokens[0].unflatten(0, (workers.count, -1)), workers)
    return received.transpose(0, 1).flatten(1, 2)[None]


def _tokens_of_all_heads(mixed: Tensor, workers: SequenceGroup) -> Tensor:
    """Exchange own heads of all tokens, [1, N, H / n, D], for own tokens [1, N / n, H, D]."""
    received = _exchanged(mixed[0].unflatten(0, (workers.count, -1)), workers)
    return received.transpose(0, 1).flatten(1, 2)[None]


def _exchanged(parts: Tensor, workers: SequenceGroup) -> Tensor:
    """Send part r [n, ...] to worker r, and return the parts received, in the order of ranks."""
    return _Exchange.apply(parts, workers)  # type: ignore[no-any-return]


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: Tensor, workers: SequenceGroup) -> Tensor:
        ctx.workers = workers
        received = torch.empty_like(parts, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, parts.contiguous(), group=workers.group)
        return received

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        # What worker r was sent, it sends back the gradient of.
        return _Exchange.apply(grads[0], ctx.workers), None  # type: ignore[return-value]


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, answers: Tensor, own: Tensor, count: int, workers: SequenceGroup
    ) -> Tensor:
        ctx.save_for_backward(own)
        joined = answers.new_zeros(count, *answers.shape[1:])
        joined[own] = answers
        dist.all_reduce(joined, group=workers.group)
        return joined

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        # Every worker computes the same loss of all results, and each differentiates its own.
        (own,) = ctx.saved_tensors
        return grads[0][own], None, None, None
