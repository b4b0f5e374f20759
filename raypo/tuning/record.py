"""What a sweep knows of its trials, kept in one file: `trials.parquet`."""

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
Status = Literal["waiting", "running", "finished", "stopped", "failed", "interrupted"]
ENDED: tuple[Status, ...] = ("finished", "stopped")


@dataclass
class TrialRecord:
    """One trial."""

    number: int
    name: str
    point: dict[str, Any]
    """Dotted key of the run config -> the value that was tried."""
    status: Status = "waiting"
    """stopped: by the scheduler; interrupted, failed: goes on when the sweep is resumed."""
    step: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    """The last known value of each figure."""
    seconds: float = 0.0
    """Wall time, over all attempts."""
    device_s: float = 0.0
    """Seconds times the devices that it held: GPUs where it has any, else CPU cores."""
    error: str = ""
    """The last line of what went wrong."""

    @property
    def judged(self) -> dict[str, float]:
        """What it is ranked by: nothing where it failed."""
        return {} if self.status == "failed" else {SCORED_STEP: self.step, **self.metrics}

    @property
    def scored_step(self) -> int:
        """The step that its score is of."""
        return scored_step(self.judged)

    @property
    def has_ended(self) -> bool:
        """Whether nothing is left to do."""
        return self.status in ENDED


def ranked(records: Sequence[TrialRecord], goal: Goal) -> list[TrialRecord]:
    """Best first."""
    ranks = goal.ranks([record.judged for record in records])
    return [record for _, record in sorted(zip(ranks, records, strict=True), key=lambda p: p[0])]


def best_of(records: Sequence[TrialRecord], goal: Goal) -> TrialRecord | None:
    """The trial that ranks first of those that have a score and did not fail."""
    known = (r for r in ranked(records, goal) if math.isfinite(goal.gains(r.judged)[0]))
    return next(known, None)


def trial_rows(records: Sequence[TrialRecord], goal: Goal) -> list[dict[str, Any]]:
    """One row a trial, the best one first: rank, point, status, cost, last metrics."""
    # Those with a column of their own; the column metrics has all, as JSON.
    shown = (*goal.named, SCORE, REWARD_MODEL, "rollout/score_mean", KL)
    return [
        {
            "rank": rank,
            "number": record.number,
            "name": record.name,
            "status": record.status,
            "feasible": goal.is_feasible(record.metrics),
            "step": record.step,
            "scored_step": record.scored_step,
            "seconds": record.seconds,
            "device_s": record.device_s,
            "error": record.error,
            "point": json.dumps(record.point),
            "metrics": json.dumps({k: v for k, v in record.metrics.items() if math.isfinite(v)}),
            **{f"space/{key}": value for key, value in record.point.items()},
            **{name: record.metrics.get(name, math.nan) for name in shown},
        }
        for rank, record in enumerate(ranked(records, goal), start=1)
    ]


def write_trials(files: RunFiles, records: Sequence[TrialRecord], goal: Goal) -> None:
    """Replace the file as a whole."""
    import pyarrow as pa

    rows = trial_rows(records, goal)
    for key in {key for row in rows for key in row if key.startswith("space/")}:
        for row in rows:
            if isinstance(row.get(key), list | tuple | dict):
                row[key] = json.dumps(row[key])
        kinds = {type(row.get(key)) for row in rows}
        if len(kinds) > 1:  # parquet's columns have one type
            for row in rows:
                row[key] = float(row[key]) if kinds == {int, float} else str(row.get(key))
    files.write(TRIALS, to_parquet(pa.Table.from_pylist(rows)))


def read_trials(files: RunFiles) -> list[TrialRecord]:
    """The trials by number; none where there is no file."""
    content = files.read(TRIALS)
    if content is None:
        return []
    records = [
        TrialRecord(
            point=json.loads(row["point"]),
            metrics=json.loads(row["metrics"]),
            **{name: row[name] for name in _PLAIN},
        )
        for row in from_parquet(content).to_pylist()
    ]
    return sorted(records, key=lambda record: record.number)


_PLAIN = ("number", "name", "status", "step", "seconds", "device_s", "error")
