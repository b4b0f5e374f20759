"""TensorBoard event files in the run folder."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

HPARAMS_SUFFIX = ".hparams"


class TensorBoard:
    """Writes the metrics of each step as scalars, on disk when `write` returns.

    It drives tensorboardX's record writer directly: `SummaryWriter` writes from a thread of its
    own, and its `flush` does not wait for that thread, so that a killed run loses its last steps.
    """

    def __init__(self, folder: str | Path, *, first_step: int = 1, suffix: str = "") -> None:
        """Open a new event file.

        Args:
            folder: Where event files of earlier attempts may lie.
            first_step: The step that comes first; TensorBoard hides this step and later ones of
                earlier files, so that a resumed run has one curve.
            suffix: How the file's name ends; by default with the id of this process.
        """
        from tensorboardX.event_file_writer import EventsWriter

        # Their classes are made at run time.
        self._events = import_module("tensorboardX.proto.event_pb2")
        self._summary = import_module("tensorboardX.proto.summary_pb2").Summary
        Path(folder).mkdir(parents=True, exist_ok=True)
        self._writer = EventsWriter(str(Path(folder) / "events"), suffix or f".{os.getpid()}")
        if first_step > 1:
            start = self._events.SessionLog(status=self._events.SessionLog.START)
            self.add(first_step, session_log=start)
        self._writer.flush()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of one step, all of them finite."""
        scalars = [self._summary.Value(tag=k, simple_value=float(v)) for k, v in metrics.items()]
        self.add(step, summary=self._summary(value=scalars))
        self._writer.flush()

    def add(self, step: int, **content: Any) -> None:
        """Write one event, which is on disk after the next `write` or `close`."""
        event = self._events.Event(wall_time=time.time(), step=step, **content)
        self._writer.write_event(event)

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()


def write_hparams(
    folder: str | Path, point: Mapping[str, Any], metrics: Mapping[str, float], *, step: int
) -> None:
    """A trial for TensorBoard's HParams page, in place of what an earlier call wrote there.

    Args:
        folder: The trial's run folder.
        point: Key of the run config -> the value that was tried.
        metrics: The last metrics of the trial; what is not finite is left out.
        step: The step that they were measured at.
    """
    from tensorboardX.summary import hparams

    for earlier in Path(folder).glob(f"*{HPARAMS_SUFFIX}"):
        earlier.unlink()
    plain = {k: v if isinstance(v, bool | int | float | str) else str(v) for k, v in point.items()}
    finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
    board = TensorBoard(folder, suffix=HPARAMS_SUFFIX)
    for each in hparams(plain, finite):
        board.add(step, summary=each)
    board.write(step, finite)
    board.close()
