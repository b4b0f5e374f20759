"""Messages of a weight push between rank 0 of the learner and the engines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from raypo.config import InFlight
from raypo.weights.buckets import Bucket, Entries, FlatBucket, Specs, StagedBucket
from raypo.weights.manifest import Manifest

Backend = Literal["nccl", "gloo"]


@dataclass(frozen=True)
class StoredBucket:
    """Bucket in Ray's object store."""

    ref: Any
    """Object reference to a tuple with the bytes of each tensor, uint8 [bytes]."""
    specs: Specs

    def fetch(self) -> Bucket:
        """Return the bucket in shared read-only memory, copied from another node if necessary."""
        import ray

        return Bucket(ray.get(self.ref), self.specs)


@dataclass(frozen=True)
class CudaHandle:
    """CUDA IPC handle to a bucket in another process's GPU memory, as plain numbers and bytes."""

    num_bytes: int
    """Size of the bucket in bytes."""
    memory: bytes
    """cudaIpcMemHandle of the allocation that contains the bucket."""
    storage_bytes: int
    storage_offset: int
    """Offset of the storage within the allocation, in bytes."""
    ref_counter: bytes
    """Handle of the shared memory in which torch counts references to the bucket."""
    counter_offset: int
    event: bytes
    """IPC handle of a CUDA event that completes once the sender has written the bytes."""
    event_sync_required: bool

    @classmethod
    def of(cls, flat: Tensor) -> CudaHandle:
        """Return a handle to a bucket. The bucket must be kept until all readers have finished."""
        assert flat.storage_offset() == 0, "a bucket must start at the beginning of its storage"
        arguments: Any = reductions.reduce_tensor(flat)[1]
        memory, storage_bytes, storage_offset, _, *signals = arguments[7:]
        return cls(flat.numel(), memory, storage_bytes, storage_offset, *signals)

    def open(self, device: torch.device) -> Tensor:
        """Map the bucket into this process, uint8 [bytes]. `device` must be the bucket's GPU."""
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
            storage_offset_bytes=self.storage_offset,
            requires_grad=False,
            ref_counter_handle=self.ref_counter,
            ref_counter_offset=self.counter_offset,
            event_handle=self.event,
            event_sync_required=self.event_sync_required,
        )


@dataclass(frozen=True)
class IpcBucket(FlatBucket):
    """Bucket with one copy on each of several GPUs."""

    handles: dict[str, CudaHandle]
    """Handle to each copy, by the UUID of its GPU."""
    entries: Entries

    def read(self, uuid: str, device: torch.device) -> StagedBucket:
        """Return a copy of the bucket on a device. The sender may refill its bucket afterwards."""
        # Copy the bucket: vLLM keeps its tensors until a layer is complete, but the sender may
        # refill the bucket earlier.
        shared = self.handles[uuid].open(device)
        copy = shared.clone()
        torch.cuda.synchronize(device)
        del shared
        return StagedBucket(copy, self.entries)


CUMEM = "NCCL_CUMEM_ENABLE"
"""NCCL's environment variable that must have the same value for all members of a group."""


@dataclass(frozen=True)
class Rendezvous:
    """Parameters to join a broadcast group. If its members change, a new group is formed."""

    epoch: int
    """Index of the group among the run's groups, from 1."""
    host: str
    port: int
    """Port of learner rank 0's TCP store, through which the members find each other."""
    size: int
    backend: Backend
    timeout_s: float
    """Timeout in seconds, both for joining and for the broadcast of one bucket."""


@dataclass(frozen=True)
class BroadcastBucket(FlatBucket):
    """Bucket that is about to be broadcast."""

    epoch: int
    num_bytes: int
    entries: Entries


OfferedBucket = StoredBucket | IpcBucket | BroadcastBucket


@dataclass(frozen=True)
class PushStart:
    """First message of a push."""

    version: int
    id: str = ""
    """Unique id of the push (`WeightSnapshot.id`)."""
    in_flight: InFlight | None = None
    """Policy for requests in flight. With a policy, the engines pause until `resume`, and new
    requests wait. None means that no request may be in flight, and new requests are refused."""


@dataclass(frozen=True)
class Ready:
    """An engine's reply to `begin_push`."""

    num_workers: int
    """Number of vLLM workers. It exceeds 1 if the engine is tensor parallel."""
    epoch: int | None
    """Epoch of the broadcast group that all workers are in. None if they share no group."""
    gpus: tuple[str, ...] = ()
    """UUIDs of the GPUs that the workers run on."""
    cumem: str | None = None
    """Value of `CUMEM` in the workers' environment."""

    @classmethod
    def merged(cls, workers: Sequence[Ready]) -> Ready:
        """Return the engine's reply, merged from the replies of its vLLM workers."""
        epochs = {worker.epoch for worker in workers}
        return cls(
            len(workers),
            epochs.pop() if len(epochs) == 1 else None,
            tuple(gpu for worker in workers for gpu in worker.gpus),
            workers[0].cumem,  # all processes of an engine inherit the same environment
        )


@dataclass(frozen=True)
class WeightPush:
    """Complete version of the weights, which engines can load again after a restart."""

    version: int
    manifest: Manifest
    buckets: tuple[StoredBucket | Bucket, ...]
    id: str = ""
    """Unique id of the push."""

    def __repr__(self) -> str:
        return f"WeightPush(v{self.version}, {len(self.manifest.tensors)} tensors)"


def device_uuid(device: torch.device) -> str:
    """Return the GPU's UUID, which is independent of a process's device indices."""
    return str(torch.cuda.get_device_properties(device).uuid)
