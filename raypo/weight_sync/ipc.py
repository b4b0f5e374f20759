"""Weight transport within a GPU: the engine reads the learner's bucket by a CUDA IPC handle."""

from __future__ import annotations

import torch

from raypo.collectives import Workers
from raypo.config import InFlight
from raypo.serving.client import Engines
from raypo.weight_sync.transport import Conversation, NamedTensors, all_or_none
from raypo.weights.bucket_size import BUCKET_BYTES
from raypo.weights.buckets import stage
from raypo.weights.manifest import WeightError
from raypo.weights.messages import CudaHandle, IpcBucket, Ready, device_uuid
from raypo.weights.store import WeightSnapshot


class IpcTransport:
    """Transport by CUDA IPC to engines on the learner workers' GPUs: one copy within each GPU.

    Every learner worker stages the same buckets on its own GPU, and each of an engine's workers
    reads the bucket on its own GPU.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        in_flight: InFlight | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self.kept: WeightSnapshot | None = None
        self._in_flight: InFlight | None = in_flight
        self._device, self._bucket_bytes = device, bucket_bytes

    def push(
        self, named_tensors: NamedTensors, engines: Engines, *, version: int, workers: Workers
    ) -> None:
        """Push (see `Transport.push`). A bucket is refilled once all engines have read it.

        Raises:
            WeightError: see `Transport.push`; or an engine's GPU has no learner worker.
        """
        conversation = Conversation(engines, version, self._in_flight)
        uuid = device_uuid(self._device)
        ready: list[Ready] = []
        with all_or_none(workers):
            if workers.rank == 0:
                ready = conversation.begin()
        readers, *_ = workers.gather({gpu for engine in ready for gpu in engine.gpus})
        _require_shared(readers, set(workers.gather(uuid)))
        buckets = stage(named_tensors, bucket_bytes=self._bucket_bytes, device=self._device)
        while True:
            with all_or_none(workers):
                staged = next(buckets, None)
                torch.cuda.synchronize(self._device)
                # No handle without a reader: CUDA keeps the memory of a handle until a process
                # has opened and closed it.
                handle = CudaHandle.of(staged.flat) if staged and uuid in readers else None
            if staged is None:
                break
            handles = {gpu: each for gpu, each in workers.gather((uuid, handle)) if each}
            with all_or_none(workers):
                if workers.rank == 0:
                    conversation.offer(IpcBucket(handles, staged.entries), staged.specs)
                    conversation.settle()
        with all_or_none(workers):
            if workers.rank == 0:
                conversation.finish()
                self.kept = WeightSnapshot(conversation.id)
        torch.cuda.ipc_collect()


def _require_shared(readers: set[str], writers: set[str]) -> None:
    if missing := sorted(readers - writers):
        raise WeightError(
            f"engines run on GPU {', '.join(missing)}, and no learner worker does (they have "
            f"{', '.join(sorted(writers))}). IPC needs both on one device: set "
            "rollout.engine.transport to object or nccl."
        )
