"""TensorBoard event files in the run folder."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any


class TensorBoard:
    """Writes the metrics of each step as scalars; what is not finite is left out.

    It drives tensorboardX's record writer directly: `SummaryWriter` writes from a thread of its
    own, and its `flush` does not wait for that thread, so that a killed run loses its last steps.
    """

    def __init__(self, folder: str | Path, *, first_step: int = 1) -> None:
        """Open a new event file.

        Args:
            folder: Where event files of earlier attempts may lie.
            first_step: The step that comes first; TensorBoard hides this step and later ones of
                earlier files, so that a resumed run has one curve.
        """
        from tensorboardX.event_file_writer import EventsWriter

        events = import_module("tensorboardX.proto.event_pb2")  # classes made at run time
        self._event = events.Event
        self._summary = import_module("tensorboardX.proto.summary_pb2").Summary
        Path(folder).mkdir(parents=True, exist_ok=True)
        self._writer = EventsWriter(str(Path(folder) / "events"), f".{os.getpid()}")
        if first_step > 1:
            start = events.SessionLog(status=events.SessionLog.START)
            self._writer.write_event(
                self._event(wall_time=time.time(), step=first_step, session_log=start)
            )
        self._writer.flush()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """The metrics of one step, on disk when this returns."""
        scalars = [
            self._summary.Value(tag=name, simple_value=float(value))
            for name, value in metrics.items()
            if math.isfinite(value)
        ]
        self._writer.write_event(
            self._event(wall_time=time.time(), step=step, summary=self._summary(value=scalars))
        )
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()


HPARAMS_SUFFIX = ".hparams"


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
    from tensorboardX.event_file_writer import EventsWriter
    from tensorboardX.summary import hparams

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for earlier in folder.glob(f"*{HPARAMS_SUFFIX}"):
        earlier.unlink()
    event = import_module("tensorboardX.proto.event_pb2").Event
    summary = import_module("tensorboardX.proto.summary_pb2").Summary
    plain = {k: v if isinstance(v, bool | int | float | str) else str(v) for k, v in point.items()}
    finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
    scalars = summary(value=[summary.Value(tag=k, simple_value=v) for k, v in finite.items()])
    writer = EventsWriter(str(folder / "events"), HPARAMS_SUFFIX)
    for each in (*hparams(plain, finite), scalars):
        writer.write_event(event(wall_time=time.time(), step=step, summary=each))
    writer.close()
