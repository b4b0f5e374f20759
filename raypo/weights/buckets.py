"""Named tensors as a few flat byte arrays: cheap to hand over, readable without a copy."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from raypo.weights.manifest import TensorSpec, WeightError, checksums

ALIGNMENT = 64
"""Bytes; every tensor starts at a multiple, so that it can be viewed in its own dtype."""

Entries = tuple[tuple[TensorSpec, int], ...]
"""What lies in a bucket, and at which byte."""


@dataclass(frozen=True)
class Staged:
    """Some tensors in one flat tensor, on the device where a transport wants them."""

    flat: Tensor  # uint8 [bytes]
    entries: Entries


@dataclass(frozen=True)
class Bucket:
    """Some tensors in one flat array of this machine's memory."""

    data: np.ndarray  # uint8 [bytes]
    entries: Entries


def stage(
    named_tensors: Iterable[tuple[str, Tensor]],
    *,
    bucket_bytes: int,
    device: torch.device | str = "cpu",
) -> Iterator[Staged]:
    """Buckets of at most `bucket_bytes`; a tensor larger than that gets a bucket of its own.

    Lazy: a tensor is copied before the next one is asked for, and a bucket is handed out before
    the next one is filled, so gathered ZeRO-3 tensors may vanish as the iterator moves on. All
    buckets lie in the same memory: be done with one before asking for the next.

    Args:
        named_tensors: On any device, of any layout; names are unique over the whole push.
        bucket_bytes: Size of a bucket in bytes.
        device: Where the buckets lie.

    Raises:
        ValueError: `bucket_bytes` is not positive.
    """
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes ({bucket_bytes}): a bucket holds at least one byte.")
    filling = _Filling(bucket_bytes, device)
    for name, tensor in named_tensors:
        if not filling.has_room_for(tensor):
            yield filling.finish()
        filling.add(name, tensor)
    if not filling.is_empty:
        yield filling.finish()


def pack(named_tensors: Iterable[tuple[str, Tensor]], *, bucket_bytes: int) -> Iterator[Bucket]:
    """As `stage`, on the CPU, but every bucket has memory of its own."""
    for staged in stage(named_tensors, bucket_bytes=bucket_bytes):
        yield Bucket(staged.flat.numpy().copy(), staged.entries)


def unpack(bucket: Bucket | Staged, *, verify: bool = False) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a bucket as views of its bytes: read them, never write to them.

    Args:
        bucket: May be read-only memory of the Ray object store; the views keep it alive.
        verify: Compare all bytes with their checksums before the first tensor is handed out.

    Raises:
        WeightError: a checksum does not match.
    """
    flat = bucket.flat if isinstance(bucket, Staged) else as_tensor(bucket.data)
    parts = [flat[offset : offset + spec.num_bytes] for spec, offset in bucket.entries]
    if verify:
        for (spec, _), arrived in zip(bucket.entries, checksums(parts), strict=True):
            if arrived != spec.checksum:
                raise WeightError(
                    f"{spec.name}: the bytes that arrived do not have the checksum that was sent. "
                    "Push the weights again; if it happens again, the machine's memory is at fault."
                )
    for (spec, _), part in zip(bucket.entries, parts, strict=True):
        yield spec.name, part.view(getattr(torch, spec.dtype)).view(spec.shape)


def as_tensor(data: np.ndarray) -> Tensor:
    """uint8 [bytes] on the same memory; torch knows no read-only tensors and would warn."""
    if data.size == 0:
        return torch.empty(0, dtype=torch.uint8)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(data)


class _Filling:
    """The memory of the buckets while tensors are copied into it."""

    def __init__(self, bucket_bytes: int, device: torch.device | str) -> None:
        self._bucket_bytes = bucket_bytes
        # Pages are touched as they fill, so a small model costs little of it.
        self._flat = torch.empty(bucket_bytes, dtype=torch.uint8, device=device)
        self._used = 0
        self._tensors: list[tuple[str, Tensor, int]] = []
        """Name, an empty tensor of its shape and dtype, first byte."""

    @property
    def is_empty(self) -> bool:
        return not self._tensors

    def has_room_for(self, tensor: Tensor) -> bool:
        return self.is_empty or self._next_offset() + tensor.nbytes <= self._bucket_bytes

    @torch.no_grad()
    def add(self, name: str, tensor: Tensor) -> None:
        offset = self._next_offset()
        self._used = offset + tensor.nbytes
        if self._used > len(self._flat):  # one tensor larger than a bucket
            self._flat = torch.empty(self._used, dtype=torch.uint8, device=self._flat.device)
        room = self._flat[offset : self._used].view(tensor.dtype).view(tensor.shape)
        room.copy_(tensor)
        self._tensors.append((name, room, offset))

    def finish(self) -> Staged:
        flat = self._flat[: self._used]
        parts = [flat[offset : offset + room.nbytes] for _, room, offset in self._tensors]
        entries = tuple(
            (TensorSpec.of(name, room, checksum), offset)
            for (name, room, offset), checksum in zip(self._tensors, checksums(parts), strict=True)
        )
        self._tensors, self._used = [], 0
        return Staged(flat, entries)

    def _next_offset(self) -> int:
        return -(-self._used // ALIGNMENT) * ALIGNMENT
