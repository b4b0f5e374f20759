"""Named tensors as a few lots of bytes: cheap to hand over, readable without a copy."""

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

Specs = tuple[TensorSpec, ...]


@dataclass(frozen=True)
class Staged:
    """Some tensors in one flat tensor, on the device where a transport wants them."""

    flat: Tensor  # uint8 [bytes]
    entries: Entries

    @property
    def specs(self) -> Specs:
        """What lies in it."""
        return tuple(spec for spec, _ in self.entries)

    @property
    def parts(self) -> list[Tensor]:
        """The bytes of each tensor."""
        return [self.flat[offset : offset + spec.num_bytes] for spec, offset in self.entries]


@dataclass(frozen=True)
class Bucket:
    """Some tensors in this machine's memory, the bytes of each in an array of its own."""

    arrays: tuple[np.ndarray, ...]  # uint8 [bytes] each
    specs: Specs

    @property
    def parts(self) -> list[Tensor]:
        """The bytes of each tensor, on the same memory."""
        return [as_tensor(array) for array in self.arrays]


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
    _require_positive(bucket_bytes)
    filling = _Filling(bucket_bytes, device)
    for name, tensor in named_tensors:
        if not filling.has_room_for(tensor):
            yield filling.finish()
        filling.add(name, tensor)
    if not filling.is_empty:
        yield filling.finish()


def grouped(
    named_tensors: Iterable[tuple[str, Tensor]], *, bucket_bytes: int
) -> Iterator[list[tuple[str, Tensor]]]:
    """The tensors themselves, in lots of at most `bucket_bytes`; a larger one is a lot of its own.

    Raises:
        ValueError: `bucket_bytes` is not positive.
    """
    _require_positive(bucket_bytes)
    group: list[tuple[str, Tensor]] = []
    num_bytes = 0
    for name, tensor in named_tensors:
        if group and num_bytes + tensor.nbytes > bucket_bytes:
            yield group
            group, num_bytes = [], 0
        group.append((name, tensor))
        num_bytes += tensor.nbytes
    if group:
        yield group


def specs_of(group: list[tuple[str, Tensor]], sums: list[int]) -> Specs:
    """What is to be told about some tensors whose checksums are known."""
    return tuple(
        TensorSpec.of(name, tensor, checksum)
        for (name, tensor), checksum in zip(group, sums, strict=True)
    )


def unpack(bucket: Bucket | Staged, *, verify: bool = False) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a bucket as views of its bytes: read them, never write to them.

    Args:
        bucket: May be read-only memory of the Ray object store; the views keep it alive.
        verify: Compare all bytes with their checksums before the first tensor is handed out.

    Raises:
        WeightError: a checksum does not match.
    """
    parts = bucket.parts
    if verify:
        for spec, arrived in zip(bucket.specs, checksums(parts), strict=True):
            if arrived != spec.checksum:
                raise WeightError(
                    f"{spec.name}: the bytes that arrived do not have the checksum that was sent. "
                    "Push the weights again; if it happens again, the machine's memory is at fault."
                )
    for spec, part in zip(bucket.specs, parts, strict=True):
        yield spec.name, part.view(getattr(torch, spec.dtype)).view(spec.shape)


def as_bytes(tensor: Tensor) -> Tensor:
    """uint8 [bytes] in row-major order, on the CPU; on the tensor's own memory if it lies so."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def as_tensor(data: np.ndarray) -> Tensor:
    """uint8 [bytes] on the same memory; torch knows no read-only tensors and would warn."""
    if data.size == 0:
        return torch.empty(0, dtype=torch.uint8)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(data)


def _require_positive(bucket_bytes: int) -> None:
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes ({bucket_bytes}): a bucket holds at least one byte.")


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
        group = [(name, room) for name, room, _ in self._tensors]
        sums = checksums([flat[offset : offset + room.nbytes] for _, room, offset in self._tensors])
        offsets = (offset for _, _, offset in self._tensors)
        entries = tuple(zip(specs_of(group, sums), offsets, strict=True))
        self._tensors, self._used = [], 0
        return Staged(flat, entries)

    def _next_offset(self) -> int:
        return -(-self._used // ALIGNMENT) * ALIGNMENT
