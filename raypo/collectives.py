"""The few collective operations of a group of learner workers; one process needs no group."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

PATIENCE = timedelta(days=7)
"""What the workers wait for has limits of its own; one that dies is noticed at once."""


@dataclass(frozen=True)
class Workers:
    """The learner workers as one of them sees them."""

    rank: int = 0
    count: int = 1
    group: dist.ProcessGroup | None = None
    """None: the default process group."""

    @classmethod
    def current(cls) -> Workers:
        """The workers of the default process group; a group of one where there is none.

        What these operations carry are counts and rollouts, which lie in RAM. Over NCCL they would
        wait for whoever computes on the GPUs just then, and a group's usual limit is half an hour,
        which one worker's longest answer may exceed: so they get a gloo group of their own.
        """
        if not dist.is_initialized():
            return cls()
        return cls(dist.get_rank(), dist.get_world_size()).beside()

    def beside(self) -> Workers:
        """The same workers in a group of their own, for another thread; all of them call it."""
        if self.count == 1:
            return self
        return replace(self, group=dist.new_group(backend="gloo", timeout=PATIENCE))

    def team(self, sizes: Sequence[int]) -> Workers:
        """The workers of this one's team, in a group of their own; all workers call it.

        Args:
            sizes: Of all teams, in the order of ranks; together `count`.
        """
        first, own = 0, self
        for size in sizes:
            ranks = range(first, first + size)
            group: Any = dist.new_group(list(ranks), backend="gloo", timeout=PATIENCE)
            own = Workers(self.rank - first, size, group) if self.rank in ranks else own
            first += size
        return own

    def sum(self, values: Tensor) -> Tensor:
        """Sum over the workers, on every worker; any shape, not in place."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def max(self, values: Tensor) -> Tensor:
        """Maximum over the workers, on every worker; any shape, not in place."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def gather(self, value: Any) -> list[Any]:
        """What every worker passed, in the order of ranks, on every worker."""
        if self.count == 1:
            return [value]
        gathered: list[Any] = [None] * self.count
        dist.all_gather_object(gathered, value, group=self.group)
        return gathered

    def gather_first(self, value: Any) -> list[Any]:
        """What every worker passed, in the order of ranks, on rank 0; nothing on the others."""
        if self.count == 1:
            return [value]
        gathered: list[Any] = [None] * self.count if self.rank == 0 else []
        dist.gather_object(value, gathered or None, group=self.group, group_dst=0)
        return gathered

    def exchange(self, parcels: Sequence[Any]) -> list[Any]:
        """What every worker has for this one, in the order of ranks.

        Args:
            parcels: One for each worker, and only for that one; anything that can be pickled.
        """
        if self.count == 1:
            return list(parcels)
        sent = [
            torch.frombuffer(bytearray(pickle.dumps(each)), dtype=torch.uint8) for each in parcels
        ]
        sizes = self.gather([len(each) for each in sent])
        received = [torch.empty(size[self.rank], dtype=torch.uint8) for size in sizes]
        received[self.rank] = sent[self.rank]
        others = [rank for rank in range(self.count) if rank != self.rank]
        calls = [
            dist.P2POp(way, tensors[rank], group=self.group, group_peer=rank)
            for way, tensors in ((dist.isend, sent), (dist.irecv, received))
            for rank in others
        ]
        for work in dist.batch_isend_irecv(calls):
            work.wait()
        return [pickle.loads(each.numpy().tobytes()) for each in received]

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value on every worker."""
        if self.count == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, group=self.group, group_src=0)
        return box[0]

    def barrier(self) -> None:
        """Wait for all workers."""
        if self.count > 1:
            dist.barrier(group=self.group)

    def _reduce(self, values: Tensor, op: Any) -> Tensor:
        if self.count == 1:
            return values
        total = values.to("cpu", copy=True)
        dist.all_reduce(total, op=op, group=self.group)
        return total.to(values.device)


def as_tensor(*values: float) -> Tensor:
    """float64 [n] on the CPU: counts and sums to reduce."""
    return torch.tensor(values, dtype=torch.float64)
