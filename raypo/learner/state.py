"""Learner state other than the models: random state and skipped updates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from raypo.collectives import Workers
from raypo.storage.checkpoints import DigestedFile

StateFiles = dict[str, dict[str, Any]]
"""Content of a worker's files in a checkpoint, by file name: nested dictionaries of tensors and
plain values, for `write_tensors`. The tensors are those that training goes on to change."""


class NonFiniteUpdateError(RuntimeError):
    """Error: too many updates in a row had a loss or gradient that is not finite."""


class SkippedUpdates:
    """Counter of consecutive skipped updates, which stops the run after too many."""

    def __init__(self, most: int, rate_keys: str) -> None:
        """Start at 0.

        Args:
            most: `learner.max_skipped_updates`.
            rate_keys: Config keys of the learning rates, for the error message.
        """
        self.in_a_row = 0
        self._most, self._rate_keys = most, rate_keys

    def count(self, applied: bool) -> None:
        """Count an update that was applied or skipped.

        Raises:
            NonFiniteUpdateError: too many updates in a row were skipped.
        """
        self.in_a_row = 0 if applied else self.in_a_row + 1
        if self.in_a_row > self._most:
            raise NonFiniteUpdateError(
                f"{self.in_a_row} updates in a row had a loss or gradient that is not finite "
                f"(learner.max_skipped_updates is {self._most}). Lower {self._rate_keys}, or look "
                f"for extreme scores or examples in this step."
            )


def write_tensors(path: Path, content: dict[str, Any]) -> list[Any]:
    """Write tensors and plain values to a file for `torch.load`.

    Returns:
        The file's entry in the checkpoint's manifest (`raypo.storage.checkpoints`).

    Raises:
        OSError: writing failed, for example because the disk is full.
    """
    # torch.load does not compare checksums, and computing them takes six times as long as the rest
    # of torch.save. The checkpoint's manifest has digests of all files.
    torch.serialization.set_crc32_options(False)
    try:
        with path.open("wb") as file:
            digested: Any = DigestedFile(file)
            torch.save(content, digested)
        return digested.entry
    except RuntimeError as error:
        # While torch.save (2.11) handles a write error, it raises another error, which only says
        # that the file does not have the expected length.
        raise error.__context__ if isinstance(error.__context__, OSError) else error from None
    finally:
        torch.serialization.set_crc32_options(True)


def worker_state(workers: Workers, skipped: SkippedUpdates) -> StateFiles:
    """Return the file of this worker's random state and counters."""
    state = {"torch": torch.get_rng_state(), "skipped_in_a_row": skipped.in_a_row}
    return {f"learner_{workers.rank}.pt": state}


def load_worker_state(directory: Path, workers: Workers, skipped: SkippedUpdates) -> None:
    """Restore the state that `worker_state` returned.

    If there are more workers than saved states, the additional workers get the states of the first
    ones. After the start, no recipe of raypo draws from torch's random state, so this affects only
    custom functions.
    """
    count = len(list(directory.glob("learner_*.pt")))
    state = torch.load(directory / f"learner_{workers.rank % count}.pt", weights_only=True)
    torch.set_rng_state(state["torch"])
    skipped.in_a_row = state["skipped_in_a_row"]
