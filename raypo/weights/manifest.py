"""Manifest of a weight push: the name, shape, dtype and checksum of each tensor."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
import xxhash
from torch import Tensor

HASH_THREADS = 2
"""Number of threads that compute checksums. One thread does not use the full memory bandwidth."""


class WeightError(RuntimeError):
    """The received weights differ from the sent weights, or do not fit the model."""


@dataclass(frozen=True)
class TensorSpec:
    """Specification of one tensor of a push."""

    name: str
    """Name in the Hugging Face `state_dict`."""
    shape: tuple[int, ...]
    dtype: str
    """Name of the torch dtype without its prefix, such as float32."""
    checksum: int
    """Checksum (`checksums`) of the tensor's bytes in row-major order."""

    @classmethod
    def of(cls, name: str, tensor: Tensor, checksum: int) -> TensorSpec:
        """Return the spec of a tensor with this checksum."""
        dtype = str(tensor.dtype).removeprefix("torch.")
        return cls(name, tuple(tensor.shape), dtype, checksum)

    @property
    def num_bytes(self) -> int:
        """Size of the tensor in bytes."""
        return math.prod(self.shape) * getattr(torch, self.dtype).itemsize


@dataclass(frozen=True)
class Manifest:
    """Specs of all tensors of a weight version, in the order in which they were sent."""

    version: int
    tensors: tuple[TensorSpec, ...]

    @classmethod
    def of(cls, version: int, tensors: Iterable[TensorSpec]) -> Manifest:
        """Return the manifest of these tensors, whose names must be unique.

        Raises:
            WeightError: a name occurs twice.
        """
        tensors = tuple(tensors)
        counts = Counter(tensor.name for tensor in tensors)
        duplicates = sorted(name for name, count in counts.items() if count > 1)
        if duplicates:
            raise WeightError(
                "a push may contain each tensor only once; these occur twice: "
                f"{', '.join(duplicates)}."
            )
        return cls(version, tensors)

    def differences(self, other: Manifest) -> list[str]:
        """Return a readable line for each tensor that is missing, unknown or changed in `other`."""
        lines = []
        if self.version != other.version:
            lines.append(f"version: {self.version} -> {other.version}")
        sent = {tensor.name: tensor for tensor in self.tensors}
        arrived = {tensor.name: tensor for tensor in other.tensors}
        lines += [f"{name}: missing" for name in sent if name not in arrived]
        lines += [f"{name}: unknown" for name in arrived if name not in sent]
        for name in (name for name in sent if name in arrived):
            for field in ("shape", "dtype", "checksum"):
                sent_value, arrived_value = (
                    getattr(sent[name], field),
                    getattr(arrived[name], field),
                )
                if sent_value != arrived_value:
                    lines.append(f"{name}: {field} {sent_value} -> {arrived_value}")
        return lines


def checksums(parts: Sequence[Tensor]) -> list[int]:
    """Return a checksum of each tensor's bytes.

    In host memory, the checksum is a 64-bit xxHash. On a GPU, it is a sum of 64-bit words
    (`word_sum`). Each word is multiplied by an odd number that depends on its position, so that a
    changed word or two swapped words change the sum. Both sides of a push use the same kind.

    Args:
        parts: Tensors, uint8 [bytes] each, contiguous, aligned to 8 bytes, and all on one device.
    """
    if not parts or parts[0].device.type == "cpu":
        with ThreadPoolExecutor(HASH_THREADS) as threads:  # xxhash releases the GIL
            return list(threads.map(_xxhash, parts))
    return torch.stack([word_sum(part) for part in parts]).tolist()


def _xxhash(part: Tensor) -> int:
    return xxhash.xxh3_64_intdigest(part.numpy().data)


def word_sum(part: Tensor, *, chunk_words: int = 1 << 22) -> Tensor:
    """Return the position-weighted sum of a tensor's 64-bit words, modulo 2**64.

    Args:
        part: uint8 [bytes], aligned to 8 bytes.
        chunk_words: Number of words that are summed in one operation.

    Returns:
        Scalar int64 on the device of `part`.
    """
    num_words = len(part) // 8
    total = torch.zeros((), dtype=torch.int64, device=part.device)
    for start in range(0, num_words, chunk_words):
        words = part[8 * start : 8 * min(start + chunk_words, num_words)].view(torch.int64)
        position = torch.arange(start, start + len(words), device=part.device)
        total += (words * (2 * position + 1)).sum()
    remainder = part[8 * num_words :].to(torch.int64)
    position = torch.arange(num_words, num_words + len(remainder), device=part.device)
    return total + (remainder * (2 * position + 1)).sum()


def summary(lines: list[str], *, max_lines: int = 8) -> str:
    """Join the first lines into one string, followed by the number of omitted lines."""
    num_omitted = len(lines) - max_lines
    return "; ".join(lines[:max_lines]) + (f"; and {num_omitted} more" if num_omitted > 0 else "")
