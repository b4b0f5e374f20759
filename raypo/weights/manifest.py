"""What a push of weights contains: names, shapes, dtypes and checksums, as plain data."""

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
"""A single one does not read as fast as the memory gives."""


class WeightError(RuntimeError):
    """Weights that arrived are not the weights that were sent, or not the model's."""


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a push."""

    name: str
    """The name in the Hugging Face `state_dict`."""
    shape: tuple[int, ...]
    dtype: str
    """torch's word without the prefix, like float32."""
    checksum: int
    """What `checksums` says of the tensor's bytes in row-major order."""

    @classmethod
    def of(cls, name: str, tensor: Tensor, checksum: int) -> TensorSpec:
        """What is to be told about a tensor."""
        dtype = str(tensor.dtype).removeprefix("torch.")
        return cls(name, tuple(tensor.shape), dtype, checksum)

    @property
    def num_bytes(self) -> int:
        """Bytes that the tensor occupies."""
        return math.prod(self.shape) * getattr(torch, self.dtype).itemsize


@dataclass(frozen=True)
class Manifest:
    """All tensors of one weight version, in the order they were sent."""

    version: int
    tensors: tuple[TensorSpec, ...]

    @classmethod
    def of(cls, version: int, tensors: Iterable[TensorSpec]) -> Manifest:
        """A manifest whose names are known to be unique.

        Raises:
            WeightError: a name comes twice.
        """
        tensors = tuple(tensors)
        counts = Counter(tensor.name for tensor in tensors)
        twice = sorted(name for name, count in counts.items() if count > 1)
        if twice:
            raise WeightError(f"a push may name each tensor once; named twice: {', '.join(twice)}.")
        return cls(version, tensors)

    def differences(self, other: Manifest) -> list[str]:
        """One readable line for each thing that `other` has not, has otherwise, or has too much."""
        lines = []
        if self.version != other.version:
            lines.append(f"version: {self.version} -> {other.version}")
        mine = {tensor.name: tensor for tensor in self.tensors}
        theirs = {tensor.name: tensor for tensor in other.tensors}
        lines += [f"{name}: missing" for name in mine if name not in theirs]
        lines += [f"{name}: unknown" for name in theirs if name not in mine]
        for name in (name for name in mine if name in theirs):
            for field in ("shape", "dtype", "checksum"):
                here, there = getattr(mine[name], field), getattr(theirs[name], field)
                if here != there:
                    lines.append(f"{name}: {field} {here} -> {there}")
        return lines


def checksums(parts: Sequence[Tensor]) -> list[int]:
    """One number for the bytes of each part; the two sides of a push take the same kind.

    Host memory has xxHash's 64 bits. On a GPU it is a sum of 64-bit words, each times an odd
    number that depends on its place: a changed word or two that changed places give another sum.

    Args:
        parts: uint8 [bytes] each, contiguous, aligned to 8 bytes; all on one device.
    """
    if not parts or parts[0].device.type == "cpu":
        with ThreadPoolExecutor(HASH_THREADS) as threads:  # xxhash lets go of the GIL
            return list(threads.map(_xxhash, parts))
    return torch.stack([word_sum(part) for part in parts]).tolist()


def _xxhash(part: Tensor) -> int:
    return xxhash.xxh3_64_intdigest(part.numpy().data)


def word_sum(part: Tensor, *, chunk_words: int = 1 << 22) -> Tensor:
    """Scalar int64 on the part's device: its words, weighted by place, summed modulo 2**64."""
    num_words = len(part) // 8
    total = torch.zeros((), dtype=torch.int64, device=part.device)
    for start in range(0, num_words, chunk_words):
        words = part[8 * start : 8 * min(start + chunk_words, num_words)].view(torch.int64)
        place = torch.arange(start, start + len(words), device=part.device)
        total += (words * (2 * place + 1)).sum()
    rest = part[8 * num_words :].to(torch.int64)
    place = torch.arange(num_words, num_words + len(rest), device=part.device)
    return total + (rest * (2 * place + 1)).sum()


def summary(lines: list[str], *, at_most: int = 8) -> str:
    """The first lines as one text, with a count of the rest."""
    rest = len(lines) - at_most
    return "; ".join(lines[:at_most]) + (f"; and {rest} more" if rest > 0 else "")
