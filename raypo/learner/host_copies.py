"""Copies of tensors in RAM, pinned on GPUs, in memory that the next copies reuse."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

BLOCK_BYTES = 1 << 28
"""Least size of a block. torch rounds the size of pinned memory up to a power of two, so blocks
have such sizes, and tensors share them."""
ALIGNMENT = 64


class HostCopies:
    """Copies of tensors.

    A copy to pinned memory takes a tenth of the time of a copy to pageable memory, but pinning
    takes longer than the copy. On CPUs, too, the first use of memory takes longer than a copy. So
    the memory stays allocated.
    """

    def __init__(self) -> None:
        self._blocks: list[Tensor] = []  # uint8 [bytes] each
        self._index = self._offset = 0  # start of the unused memory

    def restart(self) -> None:
        """Let the next copies overwrite all earlier ones."""
        self._index = self._offset = 0

    def of(self, content: Any) -> Any:
        """Return nested dictionaries with a copy of each tensor. Other values stay the same."""
        if isinstance(content, Tensor):
            return self._copy(content)
        if isinstance(content, dict):
            return {key: self.of(value) for key, value in content.items()}
        return content

    def _copy(self, tensor: Tensor) -> Tensor:
        copy: Tensor = torch.empty(0, dtype=tensor.dtype)
        # A storage of its own, because torch.save writes the whole storage of a tensor.
        copy.set_(self._room(tensor.nbytes), 0, tensor.shape)  # pyright: ignore
        # It blocks, because a tensor that ZeRO-3 has gathered is freed on another stream.
        return copy.copy_(tensor.detach())

    def _room(self, size: int) -> torch.UntypedStorage:
        """Return unused memory of this size, as a storage that shares the memory of its block."""
        while self._index < len(self._blocks):
            block, start = self._blocks[self._index], self._offset
            if start + size <= len(block):
                self._offset = start + -(-size // ALIGNMENT) * ALIGNMENT
                return block.untyped_storage()[start : start + size]
            self._index, self._offset = self._index + 1, 0
        whole = max(BLOCK_BYTES, 1 << (size - 1).bit_length())
        pin = torch.cuda.is_available()
        self._blocks.append(torch.empty(whole, dtype=torch.uint8, pin_memory=pin))
        return self._room(size)


def tensors_in(content: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested dictionaries."""
    if isinstance(content, Tensor):
        yield content
    elif isinstance(content, dict):
        for value in content.values():
            yield from tensors_in(value)
