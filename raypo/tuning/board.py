"""Record and display a sweep's trials while Tune runs them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ray.tune import Callback
from ray.tune.experiment import Trial

from raypo.tuning.goal import STEP, VALUE
from raypo.tuning.record import POINT, Point, TrialRecord
from raypo.tuning.view import SweepView

WRITE_EVERY_S = 10.0
"""Interval in seconds at which records are saved while trials run."""


class Board(Callback):
    """Tune callback that records starts, reports and ends of trials."""

    def __init__(
        self,
        records: Mapping[int, TrialRecord],
        view: SweepView,
        *,
        num_steps: int,
        num_devices: float,
        is_stopping: Callable[[], bool],
        write: Callable[[], None] = lambda: None,
        number_of: Callable[[Trial], int] | None = None,
        point_of: Callable[[Trial], Point] = lambda trial: dict(trial.config[POINT]),
    ) -> None:
        """Begin with the records of earlier attempts.

        Args:
            records: Records of earlier attempts by trial number.
            view: Display of the sweep.
            num_steps: Steps of a whole trial.
            num_devices: Devices that a trial holds.
            is_stopping: Function that returns True if trials end because the user has requested a
                stop.
            write: Function that saves the records for a later attempt.
            number_of: Function that returns a trial's number. None means that its name ends with
                the number.
            point_of: Function that returns a trial's values by key.
        """
        self.records = dict(records)
        self._view, self._num_steps, self._num_devices = view, num_steps, num_devices
        self._write, self._is_stopping = write, is_stopping
        self._number_of, self._point_of = number_of or number_in_name, point_of
        self._looked = self._written = time.monotonic()

    def __getstate__(self) -> dict[str, Any]:
        return {}  # Tune pickles callbacks for its own restore, which sweeps do not use

    def on_trial_start(self, iteration: int, trials: list[Trial], trial: Trial, **_: Any) -> None:
        """Record that a trial starts, or resumes after a pause."""
        record = self._record_of(trial)
        is_new = record.status not in ("running", "waiting") or not record.point
        record.point, record.status, record.error = self._point_of(trial), "running", ""
        self._keep()
        if is_new:
            self._view.started(record)

    def on_trial_result(
        self, iteration: int, trials: list[Trial], trial: Trial, result: dict, **_: Any
    ) -> None:
        """Record a trial's report of a step."""
        record = self.records[self._number_of(trial)]
        record.metrics = metrics_of(result)
        record.step = int(result.get(STEP, record.step))

    def on_trial_complete(
        self, iteration: int, trials: list[Trial], trial: Trial, **_: Any
    ) -> None:
        """Record that a trial finished or was stopped."""
        record = self.records.get(self._number_of(trial))
        if record is None or record.status == "waiting":  # stopped before it started
            return
        self._add_time(trials)
        if record.step >= self._num_steps:
            record.status = "finished"
        else:
            record.status = "interrupted" if self._is_stopping() else "stopped"
        self._keep()
        self._view.ended(record, list(self.records.values()))

    def on_trial_error(self, iteration: int, trials: list[Trial], trial: Trial, **_: Any) -> None:
        """Record that a trial failed. The other trials continue."""
        record = self._record_of(trial)  # a new record if the trial never started
        record.point = self._point_of(trial)
        self._add_time(trials)
        record.status = "interrupted" if self._is_stopping() else "failed"
        record.error = last_line(error_text(trial))
        self._keep()
        self._view.ended(record, list(self.records.values()))

    def on_step_end(self, iteration: int, trials: list[Trial], **_: Any) -> None:
        """Update times and display; Tune calls this after each iteration of its loop."""
        self._add_time(trials)
        self._view.show(list(self.records.values()))
        if time.monotonic() - self._written > WRITE_EVERY_S:
            self._keep()

    def close(self) -> None:
        """Mark trials that are still running as interrupted, after Tune has ended."""
        for record in self.records.values():
            if record.status == "running":
                record.status = "interrupted"

    def _record_of(self, trial: Trial) -> TrialRecord:
        number = self._number_of(trial)
        return self.records.setdefault(number, TrialRecord(number, str(trial), {}))

    def _add_time(self, trials: list[Trial]) -> None:
        now = time.monotonic()
        for trial in trials:
            record = self.records.get(self._number_of(trial))
            if record is not None and record.status == "running" and trial.status == Trial.RUNNING:
                record.seconds += now - self._looked
                record.device_s += (now - self._looked) * self._num_devices
        self._looked = now

    def _keep(self) -> None:
        self._write()
        self._written = time.monotonic()


def number_in_name(trial: Trial) -> int:
    """Return a trial's number, parsed from its name."""
    return int(str(trial).rpartition("-")[2])


def metrics_of(result: Mapping[str, Any]) -> dict[str, float]:
    """Return raypo's metrics in a report, without the entries that Tune and the sweep add."""
    return {
        name: float(value)
        for name, value in result.items()
        if "/" in name and name != VALUE and isinstance(value, int | float)
    }


def error_text(trial: Trial) -> str:
    """Return the traceback of a trial.

    The traceback is read from the trial's local file. Tune itself reads a copy in the storage,
    which may not exist yet.
    """
    file = Path(trial.error_file) if trial.error_file else None
    return file.read_text() if file is not None and file.exists() else ""


def last_line(text: str) -> str:
    """Return the last non-empty line of a traceback: the error's name and message."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "the trial's process was lost"
