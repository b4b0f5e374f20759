"""Messages of a push of weights, between the learner's rank 0 and the engines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from raypo.config import InFlight
from raypo.weights.buckets import Bucket, Entries, Specs, Staged, WithEntries
from raypo.weights.manifest import Manifest

Backend = Literal["nccl", "gloo"]


@dataclass(frozen=True)
class StoredBucket:
    """A bucket in the Ray object store."""

    ref: Any
    """Object reference to a tuple with the bytes of each tensor, uint8 [bytes]."""
    specs: Specs

    def fetch(self) -> Bucket:
        """Return the bucket in shared read-only memory, copied from its node if necessary."""
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
    first_byte: int
    """Offset of the storage within the allocation, in bytes."""
    counter: bytes
    """Handle of the shared memory in which torch counts the references to the bucket."""
    counter_place: int
    event: bytes
    """IPC handle of a CUDA event that completes once the sender has written the bytes."""
    event_is_needed: bool

    @classmethod
    def of(cls, flat: Tensor) -> CudaHandle:
        """Return a handle to a bucket. Keep the bucket until all readers are done."""
        assert flat.storage_offset() == 0, "a bucket begins where its storage begins"
        arguments: Any = reductions.reduce_tensor(flat)[1]
        memory, storage_bytes, first_byte, _, *signals = arguments[7:]
        return cls(flat.numel(), memory, storage_bytes, first_byte, *signals)

    def open(self, device: torch.device) -> Tensor:
        """Map the bucket into this process as uint8 [bytes]. `device` must be the bucket's GPU."""
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
class IpcBucket(WithEntries):
    """A bucket with one copy on each of several GPUs."""

    handles: dict[str, CudaHandle]
    """Handles by the UUID of the GPU."""
    entries: Entries

    def read(self, uuid: str, device: torch.device) -> Staged:
        """Return a copy of the bucket on a device. The sender may refill its bucket afterwards."""
        # Copy the bucket: vLLM keeps its tensors until all tensors of a layer have arrived, but the
        # sender refills it before that.
        shared = self.handles[uuid].open(device)
        copy = shared.clone()
        torch.cuda.synchronize(device)
        del shared
        return Staged(copy, self.entries)


CUMEM = "NCCL_CUMEM_ENABLE"
"""Environment variable of NCCL on which all members of a group have to agree."""


@dataclass(frozen=True)
class Rendezvous:
    """Parameters to join a broadcast group. After a change of members a new group is formed."""

    epoch: int
    """Number of the group among the groups of the run, from 1."""
    host: str
    port: int
    """Port of the TCP store at learner rank 0, through which the members find each other."""
    size: int
    backend: Backend
    timeout_s: float
    """Time limit in seconds, both for joining and for the broadcast of one bucket."""


@dataclass(frozen=True)
class BroadcastBucket(WithEntries):
    """A bucket that is about to be broadcast."""

    epoch: int
    num_bytes: int
    entries: Entries


OfferedBucket = StoredBucket | IpcBucket | BroadcastBucket


@dataclass(frozen=True)
class PushStart:
    """First message of a push."""

    version: int
    id: str = ""
    """Identity of this push (`WeightSnapshot.id`)."""
    in_flight: InFlight | None = None
    """Policy for requests in flight. With a policy, the engines pause until `resume`, and new
    requests wait. None means that no request should be in flight, and new requests are refused."""


@dataclass(frozen=True)
class Ready:
    """An engine's reply to `begin_push`."""

    num_workers: int
    """Number of vLLM workers; more than one if the engine is tensor parallel."""
    epoch: int | None
    """Number of the broadcast group that all workers are in, or None if they share no group."""
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
            workers[0].cumem,  # processes of one engine inherit one environment
        )


@dataclass(frozen=True)
class WeightPush:
    """A complete weight version that engines can load again later, as plain data."""

    version: int
    manifest: Manifest
    buckets: tuple[StoredBucket | Bucket, ...]
    id: str = ""
    """Identity of the push."""

    def __repr__(self) -> str:
        return f"WeightPush(v{self.version}, {len(self.manifest.tensors)} tensors)"


def device_uuid(device: torch.device) -> str:
    """Return the GPU's UUID, which does not depend on the device numbers of a process."""
    return str(torch.cuda.get_device_properties(device).uuid)
