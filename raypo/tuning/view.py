"""Texts about the trials of a sweep: a ranked table, and the line at the end of a trial.

This module does not import Ray.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from typing import Any

from raypo.metrics.catalogue import label_of
from raypo.metrics.clock import duration
from raypo.tuning.goal import KL, REWARD_MODEL, Goal
from raypo.tuning.record import TrialRecord, best_of, ranked

MAX_ROWS = 24
"""Maximum number of trials in the table. `trials.parquet` has all trials."""
_RANKING = (
    "Ranked by the step that the score is of (at step), then by the score: scores of different "
    "steps are not compared."
)


def trial_table(
    records: Sequence[TrialRecord], goal: Goal, *, num_steps: int, device: str, width: int = 0
) -> str:
    """Return a table of trials, best first: tried values, then results.

    Args:
        records: The trials.
        goal: Objective of the sweep.
        num_steps: Steps of a whole trial.
        device: Unit of cost: CPU or GPU.
        width: Maximum number of characters in a line. A wider table is cut into blocks of columns.
            0 means the width of the terminal.
    """
    import pandas as pd

    ranked_records = ranked(records, goal)
    front = goal.front([record.judged for record in ranked_records])
    shown_records = ranked_records[:MAX_ROWS]
    keys = list(dict.fromkeys(key for record in shown_records for key in record.point))
    short_keys = [key.partition(".")[2] or key for key in keys]
    names = [
        short if short_keys.count(short) == 1 else key
        for key, short in zip(keys, short_keys, strict=True)
    ]
    metrics = [*goal.named, REWARD_MODEL, KL]
    other_metrics = [name for name in metrics[len(goal.metrics) :] if name not in goal.metrics]
    other_metrics = [
        name for name in other_metrics if any(name in record.metrics for record in shown_records)
    ]

    def cells(record: TrialRecord, metrics: Sequence[str]) -> dict[str, str]:
        return {
            label_of(name).partition(",")[0]: value_text(record.metrics.get(name, ""))
            for name in metrics
        }

    rows = [
        {
            "rank": f"{row + 1}{'*' * (row in front)}",
            **{
                column: value_text(record.point.get(k, ""))
                for k, column in zip(keys, names, strict=True)
            },
            **cells(record, goal.metrics),
            "at step": str(record.scored_step),
            "steps": f"{record.step}/{num_steps}",
            "status": status_words(record, goal),
            "trial": record.name.rpartition("-")[2],
            **cells(record, other_metrics),
            f"{device}-s": f"{record.device_s:.0f}",
        }
        for row, record in enumerate(shown_records)
    ]
    if not rows:
        return "no trial has started"
    width = width or shutil.get_terminal_size().columns
    lines = [pd.DataFrame(rows).to_string(index=False, line_width=width)]
    if len({record.scored_step for record in shown_records if record.metrics}) > 1:
        lines.append(_RANKING)
    return "\n".join(lines)


def ended_line(
    record: TrialRecord, records: Sequence[TrialRecord], goal: Goal, *, device: str
) -> str:
    """Return a line about the end of a trial: result, cost, and the best trial that has ended."""
    scores = [
        f"{metric} {record.metrics[metric]:.4g}"
        for metric in goal.metrics
        if metric in record.metrics
    ]
    cost = f"{duration(record.seconds)}, {record.device_s:.0f} {device}-seconds"
    parts = [f"{record.name} {record.status} at step {record.step}", ", ".join(scores), cost]
    parts.append(record.error)
    best = best_of([trial for trial in records if trial.has_ended], goal)
    if best is not None:
        score = best.metrics[goal.metrics[0]]
        parts.append(f"best so far: {best.name}, {score:.4g} at step {best.scored_step}")
    return "; ".join(filter(None, parts))


def status_words(record: TrialRecord, goal: Goal) -> str:
    """Return a trial's status, or "infeasible" if it has ended and violates a constraint."""
    is_infeasible = record.has_ended and goal.broken(record.metrics)
    return "infeasible" if is_infeasible else record.status


def point_text(point: dict[str, Any]) -> str:
    """Format a point, like `ppo.kl.coef=0.1, seed=2`."""
    return ", ".join(f"{key}={value_text(value)}" for key, value in point.items())


def value_text(value: Any) -> str:
    """Format a value of the space, floats with 4 digits."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
