"""Weight transport within a GPU: engines read the learner's buckets through CUDA IPC handles."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from raypo.collectives import Workers
from raypo.config import InFlight
from raypo.weight_sync.transport import PushSession, Transport, fail_together
from raypo.weights.bucket_size import BUCKET_BYTES
from raypo.weights.buckets import stage
from raypo.weights.manifest import WeightError
from raypo.weights.messages import CudaHandle, IpcBucket, device_uuid


class IpcTransport(Transport):
    """Copy within each GPU, for engines that share GPUs with the learner workers.

    Every learner worker stages the same buckets on its GPU. Each worker of an engine reads the
    bucket on its own GPU. The weights are not stored: a restarted engine gets them with the next
    push.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        in_flight: InFlight | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        super().__init__(in_flight=in_flight, bucket_bytes=bucket_bytes)
        self._device = device

    def buckets(
        self, tensors: Iterator[tuple[str, Tensor]], session: PushSession, workers: Workers
    ) -> Iterator[IpcBucket]:
        """Yield the buckets. A bucket is refilled after all engines have read it.

        See `Transport.buckets`.

        Raises:
            WeightError: an engine's GPU has no learner worker.
        """
        uuid = device_uuid(self._device)
        readers, *_ = workers.gather({gpu for engine in session.ready for gpu in engine.gpus})
        writers = set(workers.gather(uuid))
        if missing := sorted(readers - writers):
            raise WeightError(
                f"engines run on GPU {', '.join(missing)}, but no learner worker does (they use "
                f"{', '.join(sorted(writers))}). IPC needs both on one device: set "
                "rollout.engine.transport to object or nccl."
            )
        buckets = stage(tensors, bucket_bytes=self.bucket_bytes, device=self._device)
        while True:
            with fail_together(workers):
                staged = next(buckets, None)
                torch.cuda.synchronize(self._device)
                # Create a handle only if an engine will read it: CUDA does not free the memory of a
                # handle until a process has opened and closed it.
                handle = CudaHandle.of(staged.flat) if staged and uuid in readers else None
            if staged is None:
                torch.cuda.ipc_collect()
                return
            uuids_and_handles = workers.gather((uuid, handle))
            if workers.rank == 0:
                handles = {gpu: handle for gpu, handle in uuids_and_handles if handle is not None}
                yield IpcBucket(handles, staged.entries)
            with fail_together(workers):
                session.wait_for_replies()
