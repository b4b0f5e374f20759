"""Weights on one GPU: the engine reads the learner's bucket where it lies, by a CUDA IPC handle."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from raypo.collectives import Workers
from raypo.config import InFlight
from raypo.plan.sizes import BUCKET_BYTES
from raypo.weights.buckets import Entries, Staged, stage
from raypo.weights.manifest import WeightError
from raypo.weights.store import Kept
from raypo.weights.transport import (
    Conversation,
    NamedTensors,
    PushedEngines,
    Ready,
    all_or_none,
)


@dataclass(frozen=True)
class CudaHandle:
    """Where the bytes of another process lie on a GPU; only numbers and bytes."""

    num_bytes: int
    """Size of the bucket."""
    memory: bytes
    """cudaIpcMemHandle of the allocation that the bucket lies in."""
    storage_bytes: int
    first_byte: int
    """Where the storage begins within the allocation."""
    counter: bytes
    """The sender's count of readers."""
    counter_place: int
    event: bytes
    """After which the bytes are written."""
    event_is_needed: bool

    @classmethod
    def of(cls, flat: Tensor) -> CudaHandle:
        """A handle to a bucket of this process; keep the bucket until every reader is done."""
        assert flat.storage_offset() == 0, "a bucket begins where its storage begins"
        arguments: Any = reductions.reduce_tensor(flat)[1]
        memory, storage_bytes, first_byte, _, *signals = arguments[7:]
        return cls(flat.numel(), memory, storage_bytes, first_byte, *signals)

    def open(self, device: torch.device) -> Tensor:
        """The bytes themselves, uint8 [bytes], on the reader's name of the same device."""
        return reductions.rebuild_cuda_tensor(
            tensor_cls=torch.Tensor,
            tensor_size=torch.Size([self.num_bytes]),
            tensor_stride=(1,),
            tensor_offset=0,
            storage_cls=torch.storage.TypedStorage,
            dtype=torch.uint8,
            storage_device=device.index or 0,
            storage_handle=self.memory,
            storage_size_bytes=self.storage_bytes,
            storage_offset_bytes=self.first_byte,
            requires_grad=False,
            ref_counter_handle=self.counter,
            ref_counter_offset=self.counter_place,
            event_handle=self.event,
            event_sync_required=self.event_is_needed,
        )


@dataclass(frozen=True)
class IpcBucket:
    """A bucket that lies on several GPUs, one copy on each."""

    handles: dict[str, CudaHandle]
    """Handles by the UUID of the GPU."""
    entries: Entries

    def read(self, uuid: str, device: torch.device) -> Staged:
        """A copy of the bucket on a device: the sender's memory is free again afterwards.

        vLLM holds on to tensors until a layer is complete, so it cannot have the sender's own.
        """
        shared = self.handles[uuid].open(device)
        own = shared.clone()
        torch.cuda.synchronize(device)
        del shared
        return Staged(own, self.entries)


class IpcTransport:
    """CUDA IPC for engines beside the learner workers: one copy within the GPU.

    Every learner worker stages the same buckets on its own GPU, and each of an engine's workers
    reads the one on its own. A GPU without an engine hands out no handle: CUDA keeps what was
    handed out until somebody has opened and closed it.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        in_flight: InFlight | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self.kept: Kept | None = None
        self._in_flight = in_flight
        self._device, self._bucket_bytes = device, bucket_bytes

    def push(
        self, named_tensors: NamedTensors, engines: PushedEngines, *, version: int, workers: Workers
    ) -> None:
        """As `Transport.push`; no worker fills a bucket again before all engines have read it.

        Raises:
            WeightError: also where an engine runs on a GPU that no learner worker has.
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
                self.kept = Kept(conversation.id)
        torch.cuda.ipc_collect()


def _require_shared(readers: set[str], writers: set[str]) -> None:
    if missing := sorted(readers - writers):
        raise WeightError(
            f"engines run on GPU {', '.join(missing)}, and no learner worker does (they have "
            f"{', '.join(sorted(writers))}). IPC needs both on one device: set "
            "rollout.engine.transport to object or nccl."
        )


def device_uuid(device: torch.device) -> str:
    """The GPU itself, whatever number a process knows it by."""
    return str(torch.cuda.get_device_properties(device).uuid)
