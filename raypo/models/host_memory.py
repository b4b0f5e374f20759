"""Offloading of tensors to pinned host memory that is reused."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

HOST = "cpu"
"""Device type of storages that need no offloading."""
BLOCK_BYTES = 1 << 28
"""Size of a pinned block. torch rounds the size of pinned memory up to a power of two, so storages
share blocks of such a size."""


class HostMemory:
    """Offloader of tensors. It moves their storages, so that views stay valid.

    A copy to pinned memory takes a tenth of the time of a copy to pageable memory, but pinning
    takes longer than the copy. So a storage keeps its pinned memory until the storage is freed.
    Other storages then reuse that memory.
    """

    def __init__(self) -> None:
        self._places: dict[int, tuple[StorageWeakRef, list[Tensor]]] = {}
        """Host memory of each storage, by address, as uint8 [bytes] tensors. The weak reference
        also prevents the address from being reused."""
        self._away: dict[int, tuple[torch.UntypedStorage, int, bool]] = {}
        """Offloaded storages, by address. Each entry is the storage, its size in bytes, and True if
        it is to be restored as zeros."""
        self._free: list[Tensor] = []
        """Unused pinned memory, uint8 [bytes] each."""

    def take(self, tensors: Iterable[Tensor], *, unchanged: bool = False) -> None:
        """Copy the storages of these tensors to the host and free their device memory.

        Storages that are already on the host are skipped.

        Args:
            tensors: Tensors to offload.
            unchanged: True if the contents never change. A storage is then copied only once.
        """
        self._forget_the_dead()
        for address, storage in self._present(tensors):
            size = storage.nbytes()
            is_new = sum(map(len, self._places_of(address))) != size
            if is_new:
                self._release(address)
                self._places[address] = StorageWeakRef(storage), list(self._room(size))
            if is_new or not unchanged:
                for device, host in self._pairs(address, storage):
                    host.copy_(device, non_blocking=True)
            self._away[address] = storage, size, False
        self._empty()

    def drop(self, tensors: Iterable[Tensor], *, zeros: bool = False) -> None:
        """Free the device memory of tensors whose contents are not needed, without a copy.

        Args:
            tensors: Tensors to empty.
            zeros: True restores the tensors as zeros. False leaves their contents undefined.
        """
        for address, storage in self._present(tensors):
            self._release(address)
            self._away[address] = storage, storage.nbytes(), zeros
        self._empty()

    def give_back(self) -> None:
        """Restore all offloaded storages on the device."""
        for address, (storage, size, zeros) in self._away.items():
            storage.resize_(size)
            if zeros:
                _flat(storage).zero_()
            for device, host in self._pairs(address, storage):
                device.copy_(host, non_blocking=True)
        self._away = {}
        # Wait for the copies, because DeepSpeed gathers weights on another stream.
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()

    def _present(self, tensors: Iterable[Tensor]) -> Iterator[tuple[int, torch.UntypedStorage]]:
        """Yield the address of each storage to offload, and the storage.

        Storages that are empty, already offloaded, on the host or mapped from a file are skipped.
        The caller adds each storage to `_away`, so a storage of several tensors is yielded once.
        """
        for tensor in tensors:
            storage = tensor.untyped_storage()
            address, is_empty = storage._cdata, storage.nbytes() == 0
            if is_empty or address in self._away or storage.device.type == HOST:
                continue
            if storage.resizable():  # memory mapped from a file is not resizable
                yield address, storage

    def _empty(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # before another process can use the memory
        for storage, *_ in self._away.values():
            storage.resize_(0)

    def _pairs(
        self, address: int, storage: torch.UntypedStorage
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (slice of a storage on its device, host memory of that slice)."""
        if places := self._places_of(address):
            sizes = [len(block) for block in places]
            yield from zip(_flat(storage).split(sizes), places, strict=True)

    def _places_of(self, address: int) -> list[Tensor]:
        _, places = self._places.get(address, (None, []))
        return places

    def _forget_the_dead(self) -> None:
        """Release host memory of freed storages, such as moments that a checkpoint replaced."""
        for address in [key for key, (alive, _) in self._places.items() if alive.expired()]:
            self._release(address)

    def _release(self, address: int) -> None:
        _, places = self._places.pop(address, (None, []))
        self._free += places

    def _room(self, size: int) -> Iterator[Tensor]:
        while size:
            if not self._free:
                pin = torch.cuda.is_available()
                self._free.append(torch.empty(BLOCK_BYTES, dtype=torch.uint8, pin_memory=pin))
            piece = self._free.pop()
            block, rest = piece[:size], piece[size:]
            if len(rest):
                self._free.append(rest)
            size -= len(block)
            yield block


def _flat(storage: torch.UntypedStorage) -> Tensor:
    """Return all bytes of a storage, uint8."""
    flat: Tensor = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return flat.set_(storage)  # pyright: ignore[reportCallIssue, reportArgumentType]
