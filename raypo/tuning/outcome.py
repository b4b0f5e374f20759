"""Outcome of a sweep: the best trial as a run config, and a summary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from raypo.config.base import escaped
from raypo.config.sweep_config import SweepConfig, with_values
from raypo.metrics.catalogue import label_of
from raypo.metrics.clock import duration
from raypo.storage.run_files import RunFiles
from raypo.storage.summary import installed_versions
from raypo.tuning.goal import KL, REWARD_MODEL, SCORE, Goal
from raypo.tuning.held_out import best_trial_text
from raypo.tuning.record import TRIALS, TrialRecord, best_of, ranked, write_trials
from raypo.tuning.view import point_text

BEST = "best.yaml"


@dataclass(frozen=True)
class Outcome:
    """Result of a sweep."""

    status: str
    """finished, failed (an error occurred, or no trial has a score) or interrupted."""
    best: TrialRecord | None
    records: tuple[TrialRecord, ...]
    """All trials, sorted by name."""
    lines: tuple[str, ...]
    """Description for the terminal."""


def write_outcome(
    files: RunFiles,
    sweep: SweepConfig,
    records: Sequence[TrialRecord],
    *,
    base: Mapping[str, Any],
    status: str,
    wall_s: float,
) -> Outcome:
    """Write trials.parquet, best.yaml and summary.json.

    Args:
        files: The sweep's folder.
        sweep: Config of the sweep.
        records: All trials.
        base: Values of the base run config, as written at the start of the sweep, with overrides.
        status: finished, interrupted, or failed if the sweep itself raised.
        wall_s: Seconds of this attempt.
    """
    goal = Goal.of(sweep)
    records = sorted(records, key=lambda record: record.name)
    best = best_of(records, goal)
    if best is None and status == "finished":
        status = "failed"
    lines = [f"{r.name} failed: {r.error}" for r in records if r.status == "failed"]
    if best is not None:
        lines += _best_trial_lines(best, files, records, goal)
        files.write(BEST, best_config(sweep, base, best).encode())
    device_s = sum(record.device_s for record in records)
    lines.append(
        f"raypo: sweep {status} in {duration(wall_s)}, {device_s:.0f} device-seconds of trials; "
        f"table in {files.location}/{TRIALS}"
    )
    if records:
        write_trials(files, records, goal)
    statuses = ("finished", "stopped", "failed", "interrupted")
    files.write_summary(
        {
            "status": status,
            "recipe": "sweep",
            "num_trials": sweep.num_trials,
            "trials": {s: sum(record.status == s for record in records) for s in statuses},
            "wall_s": (files.summary() or {}).get("wall_s", 0.0) + wall_s,
            "device_s": device_s,
            "best": None
            if best is None
            else {"name": best.name, "point": best.point, "metrics": best.metrics},
            "versions": installed_versions(),
        }
    )
    files.sync()
    return Outcome(status, best, tuple(records), tuple(lines))


def _best_trial_lines(
    best: TrialRecord, files: RunFiles, records: Sequence[TrialRecord], goal: Goal
) -> list[str]:
    ranked_records = ranked(records, goal)
    metrics = [
        f"{name} {best.metrics[name]:.4g}"
        for name in (SCORE, REWARD_MODEL, KL)
        if name in best.metrics
    ]
    lines = [f"best: {best.name}, {point_text(best.point)}; {', '.join(metrics)}"]
    lines.append(best_trial_text(ranked_records, goal, files))
    metric, sign = goal.metrics[0], goal.signs[0]
    initial_metric = metric.replace("eval/", "eval/initial_", 1)
    pairs = [
        (record.metrics[initial_metric], record.metrics[metric])
        for record in records
        if initial_metric in record.metrics and metric in record.metrics and record.scored_step
    ]
    if pairs and all(sign * (score - initial_score) <= 0 for initial_score, score in pairs):
        lines.append(
            f"No trial is better than the start: before the first update {label_of(metric)} was "
            f"{pairs[0][0]:.4g}."
        )
    if violated := goal.broken(best.metrics):
        lines.append(f"no trial satisfies all constraints; this one violates {', '.join(violated)}")
    front = sorted(goal.front([record.judged for record in ranked_records]))
    if len(front) > 1:
        lines.append(f"Pareto front (*): {', '.join(ranked_records[row].name for row in front)}")
    lines.append(f"run it: raypo train {files.location}/{BEST}")
    return lines


def best_config(sweep: SweepConfig, base: Mapping[str, Any], best: TrialRecord) -> str:
    """Return the run config of the best trial: the base as written, with the trial's values."""
    identity: dict[str, Any] = {"name": f"{sweep.name}-best", "storage_path": sweep.storage_path}
    values = with_values(base, {**best.point, **identity})
    header = [
        f"# The best trial of the sweep {sweep.name}: {best.name}, {point_text(best.point)}.",
        f"# Its base is {sweep.base}; relative paths start where the sweep was started.",
    ]
    if best.status == "stopped":
        scored_step = best.scored_step
        values["num_steps"] = scored_step or best.step
        score_origin = f"of step {scored_step}" if scored_step else "from before the first update"
        header.append(f"# It was stopped after step {best.step}; its score is {score_origin}.")
    if sweep.scheduler.kind == "pbt":
        header.append("# These are its last values; before each copy it trained with others.")
    text = yaml.safe_dump(escaped(values), sort_keys=False, allow_unicode=True)
    return "\n".join([*header, text])
