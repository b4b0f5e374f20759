"""Sequences of prompts or examples that may be larger than memory."""

from __future__ import annotations

import os
import pickle
import tempfile
import weakref
from abc import abstractmethod
from array import array
from collections.abc import Iterable, Sequence
from threading import Lock
from typing import TypeVar, overload

from typing_extensions import override

from raypo.config import ConfigError

Item = TypeVar("Item")

MEMORY_BYTES = 64 << 20
"""Largest size of a store in memory, in bytes. A larger store is written to a temporary file."""


class LazySequence(Sequence[Item]):
    """Sequence that makes an item at each access. A slice is a view: its items are made later."""

    @abstractmethod
    def item(self, index: int) -> Item:
        """Return the item at an index from 0."""

    @overload
    def __getitem__(self, index: int) -> Item: ...
    @overload
    def __getitem__(self, index: slice) -> Selection[Item]: ...
    @override
    def __getitem__(self, index: int | slice) -> Item | Selection[Item]:
        if isinstance(index, slice):
            return Selection(self, range(len(self))[index])
        return self.item(range(len(self))[index])


class Selection(LazySequence[Item]):
    """Items of a sequence at given indices."""

    def __init__(self, items: Sequence[Item], indices: Sequence[int]) -> None:
        self._items, self._indices = items, indices

    def __len__(self) -> int:
        return len(self._indices)

    @override
    def item(self, index: int) -> Item:
        return self._items[self._indices[index]]


class Joined(LazySequence[Item]):
    """Items of one sequence, followed by those of another."""

    def __init__(self, first: Sequence[Item], second: Sequence[Item]) -> None:
        self._first, self._second = first, second

    def __len__(self) -> int:
        return len(self._first) + len(self._second)

    @override
    def item(self, index: int) -> Item:
        in_second = index - len(self._first)
        return self._first[index] if in_second < 0 else self._second[in_second]


class ItemStore(LazySequence[Item]):
    """Append-only list of pickled items, with an index of 8 bytes per item in memory.

    Up to `MEMORY_BYTES`, the pickles are in memory too. A larger store is written to an unnamed
    temporary file in `TMPDIR`, which disappears with the process. Any thread may read the store.
    """

    def __init__(self, items: Iterable[Item] = ()) -> None:
        self._file = tempfile.SpooledTemporaryFile(max_size=MEMORY_BYTES)  # noqa: SIM115
        weakref.finalize(self, self._file.close)
        self._lock = Lock()  # all threads share the file's position
        self._ends = array("q", [0])
        for item in items:
            self.append(item)

    def append(self, item: Item) -> None:
        """Add an item at the end.

        Raises:
            ConfigError: the temporary folder is full, or cannot be written to.
        """
        content = pickle.dumps(item, protocol=pickle.HIGHEST_PROTOCOL)
        try:
            with self._lock:
                self._file.seek(self._ends[-1])
                self._file.write(content)
        except OSError as error:
            raise ConfigError(
                f"TMPDIR ({os.environ.get('TMPDIR')}): rows that do not fit into memory are "
                f"stored in the temporary folder, but a file there cannot be written: {error}. "
                "Set TMPDIR to a folder with more room, on every node."
            ) from error
        self._ends.append(self._ends[-1] + len(content))

    def __len__(self) -> int:
        return len(self._ends) - 1

    @override
    def item(self, index: int) -> Item:
        with self._lock:
            self._file.seek(self._ends[index])
            content = self._file.read(self._ends[index + 1] - self._ends[index])
        return pickle.loads(content)
