"""Buckets: named tensors, packed into a few byte arrays that can be read without a copy."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from raypo.weights.manifest import TensorSpec, WeightError, checksums

ALIGNMENT = 64
"""Alignment of the tensors in a bucket, in bytes. Any dtype can be viewed at this alignment."""

Entries = tuple[tuple[TensorSpec, int], ...]
"""Specs of the tensors in a bucket, each with the tensor's offset in bytes."""

Specs = tuple[TensorSpec, ...]


class FlatBucket:
    """Base class of buckets whose tensors are stored in one flat tensor."""

    entries: Entries

    @property
    def specs(self) -> Specs:
        """Specs of the tensors in the bucket."""
        return tuple(spec for spec, _ in self.entries)


@dataclass(frozen=True)
class StagedBucket(FlatBucket):
    """Bucket as one flat tensor on the transport's device."""

    flat: Tensor  # uint8 [bytes]
    entries: Entries

    @property
    def parts(self) -> list[Tensor]:
        """Bytes of each tensor."""
        return [self.flat[offset : offset + spec.num_bytes] for spec, offset in self.entries]


@dataclass(frozen=True)
class Bucket:
    """Bucket in host memory, with one byte array per tensor."""

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
) -> Iterator[StagedBucket]:
    """Pack tensors into buckets of at most `bucket_bytes`; larger tensors get their own bucket.

    Each tensor is copied before the next one is requested, so `named_tensors` may free a gathered
    ZeRO-3 tensor when it advances. All buckets reuse the same memory: the caller must finish with a
    bucket before it requests the next one.

    Args:
        named_tensors: Tensors on any device and in any layout, with names that are unique in the
            push.
        bucket_bytes: Size of a bucket in bytes.
        device: Device of the buckets.

    Raises:
        ValueError: `bucket_bytes` is not positive.
    """
    _require_positive(bucket_bytes)
    # The OS allocates a page at the first write, so a small model uses little of this buffer.
    flat = torch.empty(bucket_bytes, dtype=torch.uint8, device=device)
    end, packed = 0, list[tuple[str, Tensor, int]]()  # name, view of the bucket, first byte
    for name, tensor in named_tensors:
        offset = -(-end // ALIGNMENT) * ALIGNMENT
        if packed and offset + tensor.nbytes > bucket_bytes:
            yield _to_staged_bucket(flat[:end], packed)
            offset, packed = 0, []
        end = offset + tensor.nbytes
        if end > len(flat):  # the tensor is larger than a bucket
            flat = torch.empty(end, dtype=torch.uint8, device=device)
        with torch.no_grad():
            view = flat[offset:end].view(tensor.dtype).view(tensor.shape)
            view.copy_(tensor)
        packed.append((name, view, offset))
    if packed:
        yield _to_staged_bucket(flat[:end], packed)


def _to_staged_bucket(flat: Tensor, packed: list[tuple[str, Tensor, int]]) -> StagedBucket:
    sums = checksums([flat[offset : offset + view.nbytes] for _, view, offset in packed])
    specs = specs_of([(name, view) for name, view, _ in packed], sums)
    return StagedBucket(flat, tuple(zip(specs, (offset for _, _, offset in packed), strict=True)))


def group_by_size(
    named_tensors: Iterable[tuple[str, Tensor]], *, bucket_bytes: int
) -> Iterator[list[tuple[str, Tensor]]]:
    """Split tensors into groups of at most `bucket_bytes`, without a copy.

    A larger tensor gets its own group.

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
    """Return the specs of named tensors with these checksums."""
    return tuple(
        TensorSpec.of(name, tensor, checksum)
        for (name, tensor), checksum in zip(group, sums, strict=True)
    )


def unpack(bucket: Bucket | StagedBucket, *, verify: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a bucket as views of its bytes. Callers must not write to the views.

    Args:
        bucket: The bucket, possibly in read-only memory of Ray's object store. The views keep this
            memory alive.
        verify: Whether to verify all checksums before the first tensor is yielded.

    Raises:
        WeightError: a checksum does not match.
    """
    parts = bucket.parts
    if verify:
        for spec, checksum in zip(bucket.specs, checksums(parts), strict=True):
            if checksum != spec.checksum:
                raise WeightError(
                    f"{spec.name}: the bytes that arrived do not have the checksum that was "
                    "sent. Push the weights again; if it happens again, the machine's memory "
                    "may be faulty."
                )
    for spec, part in zip(bucket.specs, parts, strict=True):
        yield spec.name, part.view(getattr(torch, spec.dtype)).view(spec.shape)


def as_bytes(tensor: Tensor) -> Tensor:
    """Return a tensor's bytes in row-major order, uint8 [bytes] on the CPU. A view if possible."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def as_tensor(data: np.ndarray) -> Tensor:
    """Return an array as a tensor, uint8 [bytes], without a copy."""
    if data.size == 0:
        return torch.empty(0, dtype=torch.uint8)
    with warnings.catch_warnings():  # torch warns because it has no read-only tensors
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(data)


def _require_positive(bucket_bytes: int) -> None:
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes ({bucket_bytes}): a bucket must hold at least one byte.")
