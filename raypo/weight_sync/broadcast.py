"""Weight transport by broadcast in a process group of learner rank 0 and the engines' workers."""

from __future__ import annotations

import torch

from raypo.collectives import Workers
from raypo.config import InFlight
from raypo.serving.client import Engines
from raypo.weight_sync.transport import Conversation, NamedTensors, all_or_none, drained
from raypo.weights.bucket_size import BUCKET_BYTES
from raypo.weights.buckets import stage
from raypo.weights.group import Group, group_store
from raypo.weights.messages import Backend, BroadcastBucket, Rendezvous
from raypo.weights.store import WeightSnapshot


class BroadcastTransport:
    """Transport by NCCL to engines on their own devices, or by gloo without GPUs.

    If a receiver died, restarted or joined, the next push forms a new group. No weights are kept:
    a restarted engine gets them with the next push.
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
        """Form no group yet; the first push does.

        Args:
            backend: nccl for GPUs, gloo for CPUs.
            device: Device of this process, on which buckets are filled.
            host: Address of this node that engines can reach.
            timeout_s: Seconds that joining may take, and likewise the broadcast of one bucket.
            in_flight: See `PushStart.in_flight`.
            bucket_bytes: Size of a bucket in bytes.
        """
        self.kept: WeightSnapshot | None = None
        self._backend: Backend = backend
        self._device, self._host = torch.device(device), host
        self._timeout_s, self._bucket_bytes = timeout_s, bucket_bytes
        self._in_flight: InFlight | None = in_flight
        self._group: Group | None = None
        self._epoch = 0

    def push(
        self, named_tensors: NamedTensors, engines: Engines, *, version: int, workers: Workers
    ) -> None:
        """Push (see `Transport.push`)."""
        with all_or_none(workers), drained(named_tensors) as tensors:
            if workers.rank == 0:
                try:
                    self._send(tensors, engines, version)
                except BaseException:
                    self._leave()
                    raise

    def _send(self, tensors: NamedTensors, engines: Engines, version: int) -> None:
        conversation = Conversation(engines, version, self._in_flight)
        with conversation.engines_reasons_first():
            group = self._group_with(conversation)
            for staged in stage(tensors, bucket_bytes=self._bucket_bytes, device=self._device):
                bucket = BroadcastBucket(self._epoch, len(staged.flat), staged.entries)
                conversation.offer(bucket, staged.specs)
                group.broadcast(staged.flat, is_in_vain=lambda: bool(conversation.failures()))
                conversation.settle()
        conversation.finish()
        self.kept = WeightSnapshot(conversation.id)

    def _group_with(self, conversation: Conversation) -> Group:
        """Return the present group if all engines are in it, else form a new one."""
        ready = conversation.begin()
        size = 1 + sum(each.num_workers for each in ready)
        is_whole = all(each.epoch == self._epoch for each in ready)
        if self._group is not None and is_whole and self._group.rendezvous.size == size:
            return self._group
        self._leave()
        self._epoch += 1
        store = group_store(self._host, 0, self._timeout_s, is_host=True)
        rendezvous = Rendezvous(
            self._epoch, self._host, store.port, size, self._backend, self._timeout_s
        )
        conversation.join_group(rendezvous)
        self._group = Group(rendezvous, rank=0, store=store, device=self._device)
        conversation.settle()
        return self._group

    def _leave(self) -> None:
        if self._group is not None:
            self._group.leave()
        self._group = None
