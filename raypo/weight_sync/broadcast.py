"""Weight transport by broadcast in a process group of learner rank 0 and the engines' workers."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from raypo.collectives import Workers
from raypo.config import InFlight
from raypo.serving.engine import Engine
from raypo.weight_sync.transport import PushSession, Transport
from raypo.weights.bucket_size import BUCKET_BYTES
from raypo.weights.buckets import stage
from raypo.weights.group import Group, group_store
from raypo.weights.manifest import WeightError
from raypo.weights.messages import CUMEM, Backend, BroadcastBucket, Rendezvous


class BroadcastTransport(Transport):
    """Broadcast with NCCL to engines on their own GPUs, or with gloo if there are no GPUs.

    If a receiver dies, restarts or is added, the next push forms a new group. The weights are not
    stored: a restarted engine gets them with the next push.
    """

    def __init__(
        self,
        *,
        backend: Backend,
        device: torch.device | str,
        host: str,
        timeout_s: float,
        in_flight: InFlight | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        """Store the settings. The first push forms the group.

        Args:
            backend: nccl for GPUs, gloo for CPUs.
            device: Device of this process, on which buckets are filled.
            host: Address of this node, which engines must be able to reach.
            timeout_s: Timeout in seconds, both for joining and for the broadcast of one bucket.
            in_flight: See `PushStart.in_flight`.
            bucket_bytes: Size of a bucket in bytes.
        """
        super().__init__(in_flight=in_flight, bucket_bytes=bucket_bytes)
        self._backend: Backend = backend
        self._device, self._host = torch.device(device), host
        self._timeout_s = timeout_s
        self._group: Group | None = None
        self._epoch = 0

    def buckets(
        self, tensors: Iterator[tuple[str, Tensor]], session: PushSession, workers: Workers
    ) -> Iterator[BroadcastBucket]:
        """Yield the buckets, and broadcast each one when the engines expect it.

        See `Transport.buckets`.
        """
        if workers.rank != 0:
            return
        try:
            with session.prefer_engine_errors():
                group = self._ensure_group(session)
                for staged in stage(tensors, bucket_bytes=self.bucket_bytes, device=self._device):
                    yield BroadcastBucket(self._epoch, len(staged.flat), staged.entries)
                    group.broadcast(staged.flat, has_failed=lambda: bool(session.failures()))
                    session.wait_for_replies()
        except BaseException:
            self._leave()
            raise

    def _ensure_group(self, session: PushSession) -> Group:
        """Return the current group if all engines are in it, otherwise form a new group."""
        size = 1 + sum(engine.num_workers for engine in session.ready)
        all_in_group = all(engine.epoch == self._epoch for engine in session.ready)
        if self._group is not None and self._group.rendezvous.size == size and all_in_group:
            return self._group
        if self._backend == "nccl":
            check_cumem(os.environ.get(CUMEM), [engine.cumem for engine in session.ready])
        self._leave()
        self._epoch += 1
        store = group_store(self._host, 0, self._timeout_s, is_host=True)
        rendezvous = Rendezvous(
            self._epoch, self._host, store.port, size, self._backend, self._timeout_s
        )
        session.call(Engine.join_group, rendezvous)
        self._group = Group(rendezvous, rank=0, store=store, device=self._device)
        session.wait_for_replies()
        return self._group

    def _leave(self) -> None:
        if self._group is not None:
            self._group.leave()
        self._group = None


def check_cumem(learner: str | None, engines: Sequence[str | None]) -> None:
    """Check that all members agree on `NCCL_CUMEM_ENABLE`. Otherwise NCCL would hang or crash.

    Raises:
        WeightError: the value of an engine differs from the value of this learner worker.
    """
    for index, value in enumerate(engines):
        if value != learner:
            raise WeightError(
                f"{CUMEM} ({learner or 'unset'} in the learner, {value or 'unset'} in engine "
                f"{index}): all members of an NCCL group need the same value. Set it in the "
                "environment in which the Ray cluster starts, or set rollout.engine.transport to "
                "object."
            )
