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

GROUP_TIMEOUT = timedelta(days=7)
"""Timeout of the gloo groups. It is long because the work that workers wait for has its own
timeouts. The death of a worker is detected immediately, without this timeout."""


@dataclass(frozen=True)
class Workers:
    """Group of learner workers, from the point of view of one member."""

    rank: int = 0
    count: int = 1
    group: dist.ProcessGroup | None = None
    """Process group. None means the default process group."""

    @classmethod
    def current(cls) -> Workers:
        """Return the workers of the default process group with a new gloo group.

        Without a default process group, the result is a group of one.
        """
        if not dist.is_initialized():
            return cls()
        # The operations transfer counts and rollouts, which are in RAM. With NCCL, they would wait
        # for the work queued on the GPUs. A group's default timeout of half an hour is too short,
        # because the longest response of one worker may take longer.
        return cls(dist.get_rank(), dist.get_world_size()).with_new_group()

    def with_new_group(self) -> Workers:
        """Return the same workers with a new process group, for use in another thread.

        All workers must call this method together.
        """
        if self.count == 1:
            return self
        return replace(self, group=dist.new_group(backend="gloo", timeout=GROUP_TIMEOUT))

    def team(self, sizes: Sequence[int]) -> Workers:
        """Return this worker's team. Each team gets a new process group.

        All workers must call this method together.

        Args:
            sizes: Number of workers in each team, in the order of ranks. The sum is `count`.
        """
        ends = [*accumulate(sizes)]
        return self.among([range(end - size, end) for end, size in zip(ends, sizes, strict=True)])

    def among(self, teams: Sequence[range]) -> Workers:
        """Return the team that this worker belongs to; `teams` are ranks. See `team`."""
        own_team = self
        for ranks in teams:
            group: Any = dist.new_group(list(ranks), backend="gloo", timeout=GROUP_TIMEOUT)
            if self.rank in ranks:
                own_team = Workers(ranks.index(self.rank), len(ranks), group)
        return own_team

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
            rows: Each tensor with the rows of all workers in the order of ranks, on the CPU.
                Two-dimensional tensors are padded with zeros to the longest row.
            own_rows: Slice of this worker's rows.
        """
        shares = self.gather([tensor.detach().cpu() for tensor in tensors])
        all_rows = []
        for parts in zip(*shares, strict=True):
            if parts[0].dim() == 2:
                longest = max(part.shape[1] for part in parts)
                parts = [pad(part, (0, longest - part.shape[1])) for part in parts]
            all_rows.append(torch.cat(parts))
        first = sum(len(share[0]) for share in shares[: self.rank])
        return all_rows, slice(first, first + len(tensors[0]))

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
        """Send one value from rank 0 to each worker, and return this worker's value.

        Args:
            values: One picklable value per worker, in the order of ranks. Ignored on other ranks
                than 0.
        """
        if self.count == 1:
            return values[0]
        received = [None]
        sent = list(values) if self.rank == 0 else None
        dist.scatter_object_list(received, sent, group=self.group, group_src=0)
        return received[0]

    def exchange(self, values: Sequence[Any]) -> list[Any]:
        """Send one value to each worker and return the values received, in the order of ranks.

        Args:
            values: One picklable value per worker, in the order of ranks.
        """
        if self.count == 1:
            return list(values)
        sent = [
            torch.frombuffer(bytearray(pickle.dumps(buffer)), dtype=torch.uint8)
            for buffer in values
        ]
        sizes = self.gather([len(buffer) for buffer in sent])
        received = [torch.empty(size[self.rank], dtype=torch.uint8) for size in sizes]
        received[self.rank] = sent[self.rank]
        peers = [rank for rank in range(self.count) if rank != self.rank]
        calls = [
            dist.P2POp(operation, tensors[rank], group=self.group, group_peer=rank)
            for operation, tensors in ((dist.isend, sent), (dist.irecv, received))
            for rank in peers
        ]
        for work in dist.batch_isend_irecv(calls):
            work.wait()
        return [pickle.loads(buffer.numpy().tobytes()) for buffer in received]

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's value, on every worker."""
        if self.count == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, group=self.group, group_src=0)
        return values[0]

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
    """Return counts or sums as a tensor for a reduction: float64 [n], on the CPU."""
    return torch.tensor(values, dtype=torch.float64)
