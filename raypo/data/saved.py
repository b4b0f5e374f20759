"""Folders that the `save_to_disk` of `datasets` wrote, read by Arrow alone and row by row."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

_OF_ONE, _OF_SPLITS = "state.json", "dataset_dict.json"


def is_saved(path: str) -> bool:
    """Whether a path is such a folder: of one data set, or of several splits."""
    return any((Path(path) / name).is_file() for name in (_OF_ONE, _OF_SPLITS))


def splits_of(folder: Path) -> list[str]:
    """The splits of a folder that was written of several; empty where it was of one."""
    listed = folder / _OF_SPLITS
    return json.loads(listed.read_text())["splits"] if listed.is_file() else []


class SavedTable:
    """The rows of a folder of one data set; its files are mapped into memory, not read into it."""

    def __init__(self, folder: Path) -> None:
        """Map the files and note where their batches begin.

        Raises:
            OSError: a file is missing, or is not what it should be.
        """
        import pyarrow as pa

        files = json.loads((folder / _OF_ONE).read_text())["_data_files"]
        maps = [pa.memory_map(str(folder / file["filename"])) for file in files]
        self._batches = [batch for each in maps for batch in pa.ipc.open_stream(each)]
        self._ends = list(accumulate(batch.num_rows for batch in self._batches))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for batch in self._batches:
            yield from batch.to_pylist()

    def __getitem__(self, place: int) -> dict[str, Any]:
        number = bisect_right(self._ends, place)
        batch = self._batches[number]
        return batch.slice(place - self._ends[number] + batch.num_rows, 1).to_pylist()[0]
