"""Records of a sweep's trials, stored in `trials.parquet`."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from raypo.storage.parquet import from_parquet, to_parquet
from raypo.storage.run_files import RunFiles
from raypo.tuning.goal import KL, REWARD_MODEL, SCORE, SCORED_STEP, Goal, scored_step

TRIALS = "trials.parquet"
Point = dict[str, Any]
"""Values of a trial, by dotted key of the run config."""
Status = Literal["waiting", "running", "finished", "stopped", "failed", "interrupted"]
ENDED_STATUSES: tuple[Status, ...] = ("finished", "stopped")


@dataclass
class TrialRecord:
    """Record of a trial."""

    name: str
    point: Point
    status: Status = "waiting"
    """State of the trial. A stopped trial was ended by the scheduler. An interrupted or failed
    trial continues when the sweep resumes."""
    step: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    """Last known value of each metric."""
    seconds: float = 0.0
    """Wall time in seconds, over all attempts."""
    device_s: float = 0.0
    """Seconds times devices held. The devices are GPUs if the trial has any, otherwise CPU
    cores."""
    error: str = ""
    """Last line of the error. Empty if the trial did not fail."""

    @property
    def judged(self) -> dict[str, float]:
        """Metrics by which the trial is ranked. Empty if the trial failed."""
        return {} if self.status == "failed" else {SCORED_STEP: self.step, **self.metrics}

    @property
    def scored_step(self) -> int:
        """Step of the trial's score."""
        return scored_step(self.judged)

    @property
    def has_ended(self) -> bool:
        """True if the trial finished or was stopped by the scheduler."""
        return self.status in ENDED_STATUSES


def ranked(records: Sequence[TrialRecord], goal: Goal) -> list[TrialRecord]:
    """Sort trials, best first."""
    ranks = goal.ranks([record.judged for record in records])
    return [record for _, record in sorted(zip(ranks, records, strict=True), key=lambda p: p[0])]


def best_of(records: Sequence[TrialRecord], goal: Goal) -> TrialRecord | None:
    """Return the highest ranked trial that has a score and did not fail.

    The result is None if there is no such trial.
    """
    scored = (r for r in ranked(records, goal) if math.isfinite(goal.gains(r.judged)[0]))
    return next(scored, None)


def trial_rows(records: Sequence[TrialRecord], goal: Goal) -> list[dict[str, Any]]:
    """Return one row per trial, best first: rank, point, status, cost, last metrics."""
    # These metrics have separate columns. The column `metrics` has all metrics, as JSON.
    metric_columns = (*goal.named, SCORE, REWARD_MODEL, "rollout/score_mean", KL)
    return [
        {
            "rank": rank,
            "name": record.name,
            "status": record.status,
            "feasible": not goal.broken(record.metrics),
            "step": record.step,
            "scored_step": record.scored_step,
            "seconds": record.seconds,
            "device_s": record.device_s,
            "error": record.error,
            "point": json.dumps(record.point),
            "metrics": json.dumps(
                {k: value2 for k, value2 in record.metrics.items() if math.isfinite(value2)}
            ),
            **{f"space/{key}": value for key, value in record.point.items()},
            **{name: record.metrics.get(name, math.nan) for name in metric_columns},
        }
        for rank, record in enumerate(ranked(records, goal), start=1)
    ]


def write_trials(files: RunFiles, records: Sequence[TrialRecord], goal: Goal) -> None:
    """Replace `trials.parquet` with these records."""
    import pyarrow as pa

    rows = trial_rows(records, goal)
    for key in {key for row in rows for key in row if key.startswith("space/")}:
        for row in rows:
            if isinstance(row.get(key), list | tuple | dict):
                row[key] = json.dumps(row[key])
        types = {type(row.get(key)) for row in rows}
        if len(types) > 1:  # a parquet column has a single type
            for row in rows:
                row[key] = float(row[key]) if types == {int, float} else str(row.get(key))
    files.write(TRIALS, to_parquet(pa.Table.from_pylist(rows)))


def read_trials(files: RunFiles) -> list[TrialRecord]:
    """Read the trials, sorted by name. The list is empty if there is no file."""
    content = files.read(TRIALS)
    if content is None:
        return []
    records = [
        TrialRecord(
            point=json.loads(row["point"]),
            metrics=json.loads(row["metrics"]),
            **{name: row[name] for name in _PLAIN_COLUMNS},
        )
        for row in from_parquet(content).to_pylist()
    ]
    return sorted(records, key=lambda record: record.name)


_PLAIN_COLUMNS = ("name", "status", "step", "seconds", "device_s", "error")
