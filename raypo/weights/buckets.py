"""Named tensors as a few flat byte arrays: cheap to put, readable without a copy."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from raypo.weights.manifest import TensorSpec, WeightError, checksum

ALIGNMENT = 64
"""Bytes; every tensor starts at a multiple, so that it can be viewed in its own dtype."""


@dataclass(frozen=True)
class Bucket:
    """Some tensors in one flat array."""

    data: np.ndarray  # uint8 [bytes]
    entries: tuple[tuple[TensorSpec, int], ...]
    """What lies in it, and at which byte."""


def pack(named_tensors: Iterable[tuple[str, Tensor]], *, bucket_bytes: int) -> Iterator[Bucket]:
    """Buckets of at most `bucket_bytes`; a tensor larger than that gets a bucket of its own.

    Lazy: a tensor is copied before the next one is asked for, and a bucket is handed out before
    the next one is filled, so gathered ZeRO-3 tensors may vanish as the iterator moves on.

    Args:
        named_tensors: On any device, of any layout; names are unique over the whole push.
        bucket_bytes: Size of a bucket in bytes.

    Raises:
        ValueError: `bucket_bytes` is not positive.
    """
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes ({bucket_bytes}): a bucket holds at least one byte.")
    filling: _Filling | None = None
    for name, tensor in named_tensors:
        if filling is not None and not filling.has_room_for(tensor):
            yield filling.bucket()
            filling = None
        if filling is None:
            filling = _Filling(max(bucket_bytes, tensor.nbytes))
        filling.add(name, tensor)
    if filling is not None:
        yield filling.bucket()


def unpack(bucket: Bucket, *, verify: bool = False) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a bucket as views of its bytes: read them, never write to them.

    Args:
        bucket: May be read-only memory of the Ray object store; the views keep it alive.
        verify: Compare each tensor's bytes with its checksum before handing it out.

    Raises:
        WeightError: a checksum does not match.
    """
    flat = _as_tensor(bucket.data)
    for spec, offset in bucket.entries:
        dtype = getattr(torch, spec.dtype)
        end = offset + int(np.prod(spec.shape, dtype=np.int64)) * dtype.itemsize
        if verify and checksum(bucket.data[offset:end]) != spec.checksum:
            raise WeightError(
                f"{spec.name}: the bytes that arrived do not have the checksum that was sent. "
                "Push the weights again; if it happens again, the machine's memory is at fault."
            )
        yield spec.name, flat[offset:end].view(dtype).view(spec.shape)


class _Filling:
    """A bucket while tensors are copied into it."""

    def __init__(self, capacity: int) -> None:
        self._flat = torch.empty(capacity, dtype=torch.uint8)  # pages are touched as they fill
        self._used = 0
        self._entries: list[tuple[TensorSpec, int]] = []

    def has_room_for(self, tensor: Tensor) -> bool:
        return self._next_offset() + tensor.nbytes <= len(self._flat)

    @torch.no_grad()
    def add(self, name: str, tensor: Tensor) -> None:
        offset = self._next_offset()
        self._used = offset + tensor.nbytes
        room = self._flat[offset : self._used]
        room.view(tensor.dtype).view(tensor.shape).copy_(tensor)
        dtype = str(tensor.dtype).removeprefix("torch.")
        spec = TensorSpec(name, tuple(tensor.shape), dtype, checksum(room.numpy()))
        self._entries.append((spec, offset))

    def bucket(self) -> Bucket:
        return Bucket(self._flat[: self._used].numpy(), tuple(self._entries))

    def _next_offset(self) -> int:
        return -(-self._used // ALIGNMENT) * ALIGNMENT


def _as_tensor(data: np.ndarray) -> Tensor:
    """uint8 [bytes] on the same memory; torch knows no read-only tensors and would warn."""
    if data.size == 0:
        return torch.empty(0, dtype=torch.uint8)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(data)
