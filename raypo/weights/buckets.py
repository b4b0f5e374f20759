"""Buckets: many named tensors packed into few byte arrays, readable without a copy."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from raypo.weights.manifest import TensorSpec, WeightError, checksums

ALIGNMENT = 64
"""Alignment of tensors in a bucket, in bytes, so that each can be viewed in its own dtype."""

Entries = tuple[tuple[TensorSpec, int], ...]
"""Tensors of a bucket, each with its first byte."""

Specs = tuple[TensorSpec, ...]


@dataclass(frozen=True)
class Staged:
    """A bucket as one flat tensor, on the device of the transport."""

    flat: Tensor  # uint8 [bytes]
    entries: Entries

    @property
    def specs(self) -> Specs:
        """Specs of the tensors in the bucket."""
        return tuple(spec for spec, _ in self.entries)

    @property
    def parts(self) -> list[Tensor]:
        """Bytes of each tensor."""
        return [self.flat[offset : offset + spec.num_bytes] for spec, offset in self.entries]


@dataclass(frozen=True)
class Bucket:
    """A bucket in host memory, with one byte array for each tensor."""

    arrays: tuple[np.ndarray, ...]  # uint8 [bytes] each
    specs: Specs

    @property
    def parts(self) -> list[Tensor]:
        """Bytes of each tensor, without a copy."""
        return [as_tensor(array) for array in self.arrays]


def stage(
    named_tensors: Iterable[tuple[str, Tensor]],
    *,
    bucket_bytes: int,
    device: torch.device | str = "cpu",
) -> Iterator[Staged]:
    """Pack tensors into buckets of at most `bucket_bytes`; larger tensors get their own bucket.

    Each tensor is copied before the next one is requested, so gathered ZeRO-3 tensors may be freed
    as the iterator moves on. All buckets reuse the same memory: finish one before the next.

    Args:
        named_tensors: Tensors on any device, of any layout. Names are unique over the whole push.
        bucket_bytes: Size of a bucket in bytes.
        device: Device of the buckets.

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
    """Group tensors, without a copy, up to `bucket_bytes` each; larger ones get their own group.

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
    """Return the specs of some tensors, given their checksums."""
    return tuple(
        TensorSpec.of(name, tensor, checksum)
        for (name, tensor), checksum in zip(group, sums, strict=True)
    )


def unpack(bucket: Bucket | Staged, *, verify: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a bucket as views of its bytes. Never write to them.

    Args:
        bucket: The bucket, possibly in read-only memory of the Ray object store. The views keep it
            alive.
        verify: Whether to compare all checksums before the first tensor is yielded.

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
    """Return a tensor's bytes on the CPU, uint8 [bytes] in row-major order; a view if possible."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def as_tensor(data: np.ndarray) -> Tensor:
    """Return an array as a tensor, uint8 [bytes], without a copy."""
    if data.size == 0:
        return torch.empty(0, dtype=torch.uint8)
    with warnings.catch_warnings():  # torch has no read-only tensors
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(data)


def _require_positive(bucket_bytes: int) -> None:
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes ({bucket_bytes}): a bucket holds at least one byte.")


class _Filling:
    """Memory that all buckets share, while tensors are copied into it."""

    def __init__(self, bucket_bytes: int, device: torch.device | str) -> None:
        self._bucket_bytes = bucket_bytes
        # Pages are touched as they fill, so a small model costs little of it.
        self._flat = torch.empty(bucket_bytes, dtype=torch.uint8, device=device)
        self._used = 0
        self._tensors: list[tuple[str, Tensor, int]] = []
        """Name, view of the bucket with shape and dtype of the tensor, and first byte."""

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
