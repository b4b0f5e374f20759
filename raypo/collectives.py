"""Collective operations on CPU data in a group of learner workers, or in a single process."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

PATIENCE = timedelta(days=7)
"""Timeout of the gloo groups. It is long because the work that workers wait for has its own
timeouts. The death of a worker is noticed at once, without this timeout."""


@dataclass(frozen=True)
class Workers:
    """A group of learner workers, from the view of one of them."""

    rank: int = 0
    count: int = 1
    group: dist.ProcessGroup | None = None
    """Process group; None means the default one."""

    @classmethod
    def current(cls) -> Workers:
        """Return the workers of the default process group, or a group of one if there is none.

        The workers get a new gloo group.
        """
        if not dist.is_initialized():
            return cls()
        # The operations carry counts and rollouts, which are in RAM. Over NCCL they would wait for
        # the work queued on the GPUs. A group's default timeout of half an hour is too short: the
        # longest response of one worker may take longer.
        return cls(dist.get_rank(), dist.get_world_size()).beside()

    def beside(self) -> Workers:
        """Return the same workers with a new process group, for use in another thread.

        All workers must call this method together.
        """
        if self.count == 1:
            return self
        return replace(self, group=dist.new_group(backend="gloo", timeout=PATIENCE))

    def team(self, sizes: Sequence[int]) -> Workers:
        """Return the team that this worker belongs to, with a new process group per team.

        All workers must call this method together.

        Args:
            sizes: Number of workers in each team, in the order of ranks; they add up to `count`.
        """
        ends = [*accumulate(sizes)]
        return self.among([range(end - size, end) for end, size in zip(ends, sizes, strict=True)])

    def among(self, teams: Sequence[range]) -> Workers:
        """Return the team that this worker belongs to; `teams` are ranks. See `team`."""
        own = self
        for ranks in teams:
            group: Any = dist.new_group(list(ranks), backend="gloo", timeout=PATIENCE)
            if self.rank in ranks:
                own = Workers(ranks.index(self.rank), len(ranks), group)
        return own

    def sum(self, values: Tensor) -> Tensor:
        """Return the elementwise sum over workers, on every worker. `values` is not changed."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def max(self, values: Tensor) -> Tensor:
        """Return the elementwise maximum over workers, on every worker. `values` is not changed."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all workers in the order of ranks, on every worker."""
        if self.count == 1:
            return [value]
        gathered: list[Any] = [None] * self.count
        dist.all_gather_object(gathered, value, group=self.group)
        return gathered

    def gather_rows(self, *tensors: Tensor) -> tuple[list[Tensor], slice]:
        """Gather the rows of several tensors, on every worker.

        Args:
            tensors: Tensors [B, ...] with the same number of rows; B may differ between workers.

        Returns:
            everyone: Each tensor with the rows of all workers in the order of ranks, on the CPU.
                Two-dimensional tensors are padded with zeros to the longest row.
            mine: Slice of this worker's rows.
        """
        shares = self.gather([each.detach().cpu() for each in tensors])
        everyone = []
        for parts in zip(*shares, strict=True):
            if parts[0].dim() == 2:
                longest = max(part.shape[1] for part in parts)
                parts = [pad(part, (0, longest - part.shape[1])) for part in parts]
            everyone.append(torch.cat(parts))
        first = sum(len(share[0]) for share in shares[: self.rank])
        return everyone, slice(first, first + len(tensors[0]))

    def gather_first(self, value: Any) -> list[Any]:
        """Gather the values of all workers on rank 0.

        Rank 0 gets them in the order of ranks. All other ranks get an empty list.
        """
        if self.count == 1:
            return [value]
        gathered: list[Any] = [None] * self.count if self.rank == 0 else []
        dist.gather_object(value, gathered or None, group=self.group, group_dst=0)
        return gathered

    def scatter(self, values: Sequence[Any]) -> Any:
        """Return the value that rank 0 has for this worker.

        Args:
            values: One picklable value for each worker, in the order of ranks. Only those of rank 0
                count.
        """
        if self.count == 1:
            return values[0]
        received = [None]
        sent = list(values) if self.rank == 0 else None
        dist.scatter_object_list(received, sent, group=self.group, group_src=0)
        return received[0]

    def exchange(self, parcels: Sequence[Any]) -> list[Any]:
        """Send one value to each worker and return the values received, in the order of ranks.

        Args:
            parcels: One picklable value for each worker, in the order of ranks.
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
        """Return rank 0's value, on every worker."""
        if self.count == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, group=self.group, group_src=0)
        return box[0]

    def barrier(self) -> None:
        """Wait until all workers have called this method."""
        if self.count > 1:
            dist.barrier(group=self.group)

    def _reduce(self, values: Tensor, op: Any) -> Tensor:
        if self.count == 1:
            return values
        total = values.to("cpu", copy=True)
        dist.all_reduce(total, op=op, group=self.group)
        return total.to(values.device)


def as_tensor(*values: float) -> Tensor:
    """Return counts or sums as a tensor to reduce: float64 [n], on the CPU."""
    return torch.tensor(values, dtype=torch.float64)
