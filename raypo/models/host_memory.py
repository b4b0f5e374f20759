"""Where tensors wait in RAM while others use the GPU: pinned memory that stays."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

HOST = "cpu"
"""Device type of what is there already."""
BLOCK_BYTES = 1 << 28
"""torch rounds pinned memory up to a power of two, so storages of any size share blocks of one."""


class HostMemory:
    """Moves tensors to the host by their storages, and back: views of them stay valid.

    A copy to pinned memory takes a tenth of the time that one to pageable memory takes, and to pin
    it takes longer than the copy. So each storage keeps its place on the host for as long as the
    storage lives; then the next one gets that place.
    """

    def __init__(self) -> None:
        self._places: dict[int, tuple[StorageWeakRef, list[Tensor]]] = {}
        """By the address of a storage: its bytes on the host, uint8 [bytes] each. The weak
        reference also keeps the address from being given to another storage."""
        self._away: dict[int, tuple[torch.UntypedStorage, int, bool]] = {}
        """By address: storages that are empty, the bytes that they had, and whether all were 0."""
        self._free: list[Tensor] = []
        """Pinned memory without an owner, uint8 [bytes] each."""

    def take(self, tensors: Iterable[Tensor], *, unchanged: bool = False) -> None:
        """Empty the storages of these tensors; what lies on the host already stays.

        Args:
            unchanged: Nobody writes to them, so that what was once copied need not be again.
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
        """Empty the storages of tensors whose contents nobody reads again, without a copy.

        Args:
            zeros: They come back as zeros; else with any contents.
        """
        for address, storage in self._present(tensors):
            self._release(address)
            self._away[address] = storage, storage.nbytes(), zeros
        self._empty()

    def give_back(self) -> None:
        """Fill the storages that were emptied, where they were."""
        for address, (storage, size, zeros) in self._away.items():
            storage.resize_(size)
            if zeros:
                _flat(storage).zero_()
            for device, host in self._pairs(address, storage):
                device.copy_(host, non_blocking=True)
        self._away = {}
        if torch.cuda.is_available():  # DeepSpeed gathers on a stream that waits for no other
            torch.cuda.current_stream().synchronize()

    def _present(self, tensors: Iterable[Tensor]) -> Iterator[tuple[int, torch.UntypedStorage]]:
        """Yield the storages that are on the device, by their addresses."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            address, is_empty = storage._cdata, storage.nbytes() == 0
            if is_empty or address in self._away or storage.device.type == HOST:
                continue
            if storage.resizable():  # a file's mapped memory is not
                yield address, storage

    def _empty(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # before the memory is others'
        for storage, *_ in self._away.values():
            storage.resize_(0)

    def _pairs(
        self, address: int, storage: torch.UntypedStorage
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the bytes of a storage on its device, and their place on the host."""
        if places := self._places_of(address):
            sizes = [len(place) for place in places]
            yield from zip(_flat(storage).split(sizes), places, strict=True)

    def _places_of(self, address: int) -> list[Tensor]:
        _, places = self._places.get(address, (None, []))
        return places

    def _forget_the_dead(self) -> None:
        """Free the places of storages that are gone, such as moments before a checkpoint's."""
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
            place, rest = piece[:size], piece[size:]
            if len(rest):
                self._free.append(rest)
            size -= len(place)
            yield place


def _flat(storage: torch.UntypedStorage) -> Tensor:
    """Return all bytes of a storage, uint8."""
    flat: Tensor = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return flat.set_(storage)  # pyright: ignore[reportCallIssue, reportArgumentType]
