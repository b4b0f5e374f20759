"""What a push of weights contains: names, shapes, dtypes and checksums, as plain data."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np


class WeightError(RuntimeError):
    """Weights that arrived are not the weights that were sent, or not the model's."""


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a push."""

    name: str
    """As the Hugging Face `state_dict` has it."""
    shape: tuple[int, ...]
    dtype: str
    """torch's word without the prefix, like float32."""
    checksum: int
    """CRC-32 of the tensor's bytes in row-major order."""


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


def checksum(data: np.ndarray) -> int:
    """CRC-32 of a contiguous array's bytes."""
    return zlib.crc32(data.reshape(-1).view(np.uint8).data)


def summary(lines: list[str], *, at_most: int = 8) -> str:
    """The first lines as one text, with a count of the rest."""
    rest = len(lines) - at_most
    return "; ".join(lines[:at_most]) + (f"; and {rest} more" if rest > 0 else "")
