"""Where tensors wait in RAM while others use the GPU: pinned memory that stays."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

HOST = "cpu"
"""Device type of what is there already."""
BLOCK_BYTES = 1 << 28
"""torch rounds pinned memory up to a power of two, so storages of any size share blocks of one."""


class HostMemory:
    """Moves tensors to the host by their storages, and back: views of them stay valid.

    A copy to pinned memory takes a tenth of the time that one to pageable memory takes, and to pin
    it takes longer than the copy. So each storage keeps the place that it once got, for as long as
    this lives: it is meant for weights and optimizer states, which are made once.
    """

    def __init__(self) -> None:
        self._places: dict[int, list[Tensor]] = {}
        """By the address of a storage: its bytes on the host, uint8 [bytes] each."""
        self._away: dict[int, tuple[torch.UntypedStorage, int]] = {}
        """By address: storages that are empty, and the bytes that they had."""
        self._rest = torch.empty(0, dtype=torch.uint8)
        """Of the last block, what nobody has."""

    def take(self, tensors: Iterable[Tensor], *, unchanged: bool = False) -> None:
        """Empty the storages of these tensors; what lies on the host already stays.

        Args:
            unchanged: Nobody writes to them, so that what was once copied need not be again.
        """
        for address, storage in self._present(tensors):
            size = storage.nbytes()
            is_new = sum(map(len, self._places.get(address, ()))) != size
            if is_new:
                self._places[address] = list(self._room(size))
            if is_new or not unchanged:
                for device, host in self._pairs(address, storage):
                    host.copy_(device, non_blocking=True)
            self._away[address] = storage, size
        self._empty()

    def drop(self, tensors: Iterable[Tensor]) -> None:
        """As `take`, of tensors whose contents nobody reads again: they come back with any."""
        for address, storage in self._present(tensors):
            self._places.pop(address, None)
            self._away[address] = storage, storage.nbytes()
        self._empty()

    def give_back(self) -> None:
        """All that was taken, where it was."""
        for address, (storage, size) in self._away.items():
            storage.resize_(size)
            for device, host in self._pairs(address, storage):
                device.copy_(host, non_blocking=True)
        self._away = {}
        if torch.cuda.is_available():  # DeepSpeed gathers on a stream that waits for no other
            torch.cuda.current_stream().synchronize()

    def _present(self, tensors: Iterable[Tensor]) -> Iterator[tuple[int, torch.UntypedStorage]]:
        """Storages that are on the device, by their addresses."""
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
        for storage, _ in self._away.values():
            storage.resize_(0)

    def _pairs(
        self, address: int, storage: torch.UntypedStorage
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """The bytes of a storage on its device, and where they lie on the host."""
        flat: Tensor = torch.empty(0, dtype=torch.uint8, device=storage.device)
        flat.set_(storage)  # pyright: ignore[reportCallIssue, reportArgumentType]
        if places := self._places.get(address):
            yield from zip(flat.split([len(place) for place in places]), places, strict=True)

    def _room(self, size: int) -> Iterator[Tensor]:
        while size:
            if not len(self._rest):
                pin = torch.cuda.is_available()
                self._rest = torch.empty(BLOCK_BYTES, dtype=torch.uint8, pin_memory=pin)
            place, self._rest = self._rest[:size], self._rest[size:]
            size -= len(place)
            yield place
