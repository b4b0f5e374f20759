"""Record and display an experiment's trials while Tune runs them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from ray.tune import Callback
from ray.tune.experiment import Trial

from raypo.config import AnyConfig
from raypo.tracking.console import Console
from raypo.tuning.capacity import SweepPlan
from raypo.tuning.experiment import Interruption
from raypo.tuning.goal import STEP, VALUE, Goal
from raypo.tuning.record import TrialRecord
from raypo.tuning.trial import point_of
from raypo.tuning.view import ended_line, point_text, trial_table

WRITE_EVERY_S = 10.0
"""Interval in seconds at which records are saved while trials run."""


class Board(Callback):
    """Tune callback that records starts, reports and ends of trials, and prints them."""

    def __init__(
        self,
        base: AnyConfig,
        goal: Goal,
        plan: SweepPlan,
        *,
        interruption: Interruption,
        records: Iterable[TrialRecord] = (),
        write: Callable[[list[TrialRecord]], None] = lambda records: None,
        is_shown: bool = True,
    ) -> None:
        """Start with the records of earlier attempts.

        Args:
            base: Run config of a trial, without the values of the space.
            goal: Objective of the experiment.
            plan: Devices of a trial.
            interruption: Request of the user to end all trials.
            records: Records of earlier attempts.
            write: Function that saves the records for a later attempt.
            is_shown: Whether to print to the terminal.
        """
        self._base, self._goal, self._plan = base, goal, plan
        self._interruption, self._write, self._is_shown = interruption, write, is_shown
        self._records = {record.name: record for record in records}
        self._checked_at = self._written_at = time.monotonic()

    def __getstate__(self) -> dict[str, Any]:
        return {}  # Tune pickles callbacks for its own restore

    @property
    def records(self) -> list[TrialRecord]:
        """The trials of this attempt and earlier ones."""
        return list(self._records.values())

    def on_trial_start(self, iteration: int, trials: list[Trial], trial: Trial, **_: Any) -> None:
        """Record that a trial starts, or resumes after a pause."""
        record = self._record_of(trial)
        is_resumed, record.status, record.error = record.status == "running", "running", ""
        self._save()
        if not is_resumed:
            self._print(f"{record.name} starts: {point_text(record.point)}")

    def on_trial_result(
        self, iteration: int, trials: list[Trial], trial: Trial, result: dict, **_: Any
    ) -> None:
        """Record a trial's report of a step."""
        record = self._records[str(trial)]
        record.metrics = metrics_of(result)
        record.step = int(result.get(STEP, record.step))

    def on_trial_complete(
        self, iteration: int, trials: list[Trial], trial: Trial, **_: Any
    ) -> None:
        """Record that a trial finished or was stopped."""
        if str(trial) in self._records:  # it is absent if the trial was stopped before it started
            self._add_time(trials)
            is_complete = self._records[str(trial)].step >= self._base.num_steps
            self._end(trial, "finished" if is_complete else "stopped")

    def on_trial_error(self, iteration: int, trials: list[Trial], trial: Trial, **_: Any) -> None:
        """Record that a trial failed. The other trials continue."""
        self._add_time(trials)
        self._record_of(trial).error = last_line(error_text(trial))
        self._end(trial, "interrupted" if self._interruption.is_wanted else "failed")

    def on_step_end(self, iteration: int, trials: list[Trial], **_: Any) -> None:
        """Update the times; Tune calls this after each iteration of its loop."""
        self._add_time(trials)
        if time.monotonic() - self._written_at > WRITE_EVERY_S:
            self._save()

    def close(self) -> None:
        """Mark trials that are still running as interrupted, after Tune has ended."""
        for record in self.records:
            if record.status == "running":
                record.status = "interrupted"
        num_steps, device = self._base.num_steps, self._plan.device
        self._print(trial_table(self.records, self._goal, num_steps=num_steps, device=device))

    def _end(self, trial: Trial, status: Any) -> None:
        record = self._records[str(trial)]
        record.status = status
        self._save()
        self._print(ended_line(record, self.records, self._goal, device=self._plan.device))

    def _record_of(self, trial: Trial) -> TrialRecord:
        """Return the record of a trial with its current values. The first call creates it."""
        record = self._records.setdefault(str(trial), TrialRecord(str(trial), {}))
        record.point = point_of(trial.config, type(self._base))
        return record

    def _add_time(self, trials: list[Trial]) -> None:
        now = time.monotonic()
        for trial in trials:
            record = self._records.get(str(trial))
            if record is not None and record.status == "running" and trial.status == Trial.RUNNING:
                record.seconds += now - self._checked_at
                record.device_s += (now - self._checked_at) * self._plan.num_devices
        self._checked_at = now

    def _save(self) -> None:
        self._write(self.records)
        self._written_at = time.monotonic()

    def _print(self, text: str) -> None:
        if self._is_shown:
            Console().message(text)


def metrics_of(result: Mapping[str, Any]) -> dict[str, float]:
    """Return raypo's metrics from a report, without the entries of Tune and the sweep."""
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
