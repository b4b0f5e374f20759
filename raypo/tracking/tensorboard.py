"""TensorBoard event files in the run folder."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any


class TensorBoard:
    """Writer of the metrics of each step as scalars. They are on disk when `write` returns.

    It uses tensorboardX's record writer directly: `SummaryWriter` writes from its own thread, and
    its `flush` does not wait for that thread, so a killed run would lose its last steps.
    """

    def __init__(self, folder: str | Path, *, first_step: int = 1) -> None:
        """Open a new event file.

        Args:
            folder: Folder for event files. It may contain the files of earlier attempts.
            first_step: Next step to be written. TensorBoard then hides what earlier files have for
                this and later steps, so that a resumed run has one curve.
        """
        from tensorboardX.event_file_writer import EventsWriter

        # tensorboardX creates these classes at run time.
        self._events = import_module("tensorboardX.proto.event_pb2")
        self._summary = import_module("tensorboardX.proto.summary_pb2").Summary
        Path(folder).mkdir(parents=True, exist_ok=True)
        self._writer = EventsWriter(str(Path(folder) / "events"), f".{os.getpid()}")
        if first_step > 1:
            start = self._events.SessionLog(status=self._events.SessionLog.START)
            self._add(first_step, session_log=start)
        self._writer.flush()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of one step. All values must be finite."""
        scalars = [self._summary.Value(tag=k, simple_value=float(v)) for k, v in metrics.items()]
        self._add(step, summary=self._summary(value=scalars))
        self._writer.flush()

    def _add(self, step: int, **content: Any) -> None:
        """Write one event. The next `write` or `close` flushes it to disk."""
        event = self._events.Event(wall_time=time.time(), step=step, **content)
        self._writer.write_event(event)

    def close(self, status: str = "finished") -> None:
        """Close the event file. The status of the run is not shown."""
        self._writer.close()
