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
from raypo.weights.messages import CUMEM, Backend, BroadcastBucket, Rendezvous, StoredBucket


class BroadcastTransport(Transport):
    """Broadcast with NCCL to engines on their own GPUs, or with gloo if there are no GPUs.

    If a receiver died, restarted or joined, the next push forms a new group. The weights are not
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
            host: Address of this node that engines can reach.
            timeout_s: Time limit in seconds, both for joining and for the broadcast of one bucket.
            in_flight: See `PushStart.in_flight`.
            bucket_bytes: Size of a bucket in bytes.
        """
        super().__init__(in_flight=in_flight, bucket_bytes=bucket_bytes)
        self._backend: Backend = backend
        self._device, self._host = torch.device(device), host
        self._timeout_s = timeout_s
        self._group: Group | None = None
        self._epoch = 0

    def open(self, session: PushSession, workers: Workers) -> None:
        """Form a new group on rank 0, unless all engines are in the current one."""
        size = 1 + sum(each.num_workers for each in session.ready)
        is_whole = all(each.epoch == self._epoch for each in session.ready)
        is_present = self._group is not None and self._group.rendezvous.size == size
        if workers.rank != 0 or (is_whole and is_present):
            return
        if self._backend == "nccl":
            check_cumem(os.environ.get(CUMEM), [each.cumem for each in session.ready])
        self._leave()
        self._epoch += 1
        with session.engines_reasons_first():
            store = group_store(self._host, 0, self._timeout_s, is_host=True)
            rendezvous = Rendezvous(
                self._epoch, self._host, store.port, size, self._backend, self._timeout_s
            )
            session.pending = session.engines.control(Engine.join_group, rendezvous)
            self._group = Group(rendezvous, rank=0, store=store, device=self._device)
            session.settle()

    def send(
        self, tensors: Iterator[tuple[str, Tensor]], session: PushSession, workers: Workers
    ) -> tuple[StoredBucket, ...]:
        """Send all tensors from rank 0 (see `Transport.send`)."""
        group = self._group
        if workers.rank != 0 or group is None:
            return ()
        try:
            with session.engines_reasons_first():
                for staged in stage(tensors, bucket_bytes=self.bucket_bytes, device=self._device):
                    bucket = BroadcastBucket(self._epoch, len(staged.flat), staged.entries)
                    session.specs += staged.specs
                    session.pending = session.engines.control(Engine.load_bucket, bucket)
                    group.broadcast(staged.flat, is_in_vain=lambda: bool(session.failures()))
                    session.settle()
        except BaseException:
            self._leave()
            raise
        return ()

    def _leave(self) -> None:
        if self._group is not None:
            self._group.leave()
        self._group = None


def check_cumem(own: str | None, engines: Sequence[str | None]) -> None:
    """Refuse a group in which `NCCL_CUMEM_ENABLE` differs. NCCL would wait for ever, or crash.

    Raises:
        WeightError: an engine has another value than this learner worker.
    """
    for number, value in enumerate(engines):
        if value != own:
            raise WeightError(
                f"{CUMEM} ({own or 'unset'} in the learner, {value or 'unset'} in engine "
                f"{number}): all members of an NCCL group need the same value. Set it in the "
                "environment in which the Ray cluster starts, or set rollout.engine.transport to "
                "object."
            )
