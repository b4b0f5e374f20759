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
from raypo.report.change import held_out_scores
from raypo.storage.folder import below
from raypo.storage.run_files import RunFiles
from raypo.storage.summary import installed_versions
from raypo.tracking.tensorboard import write_hparams
from raypo.tuning.goal import KL, REWARD_MODEL, SCORE, Goal
from raypo.tuning.held_out import who_is_best
from raypo.tuning.record import TRIALS, TrialRecord, best_of, ranked, write_trials
from raypo.tuning.sweep_folder import TRIALS_FOLDER
from raypo.tuning.view import point_text

BEST = "best.yaml"


@dataclass(frozen=True)
class Outcome:
    """Result of a sweep."""

    status: str
    """finished, failed (an error occurred, or no trial has a score) or interrupted."""
    location: str
    best: TrialRecord | None
    front: tuple[TrialRecord, ...]
    """Trials on the Pareto front. With one metric, this is the best trial."""
    broken: tuple[str, ...]
    """Constraints that the best trial violates."""
    failed: tuple[TrialRecord, ...]
    records: tuple[TrialRecord, ...]
    wall_s: float
    lead: str = ""
    """Sentence on the lead of the best trial over the next, and whether it may be chance."""
    below_start: tuple[str, ...] = ()
    """Sentence that no trial is better than the start, if that is so."""

    @property
    def device_s(self) -> float:
        """Device-seconds of all trials."""
        return sum(record.device_s for record in self.records)

    def lines(self) -> list[str]:
        """Return the outcome as lines for the terminal."""
        lines = []
        for record in self.failed:
            lines.append(f"{record.name} failed: {record.error}")
        if self.best is not None:
            metrics = ", ".join(f"{k} {v:.4g}" for k, v in self._headline().items())
            lines.append(f"best: {self.best.name}, {point_text(self.best.point)}; {metrics}")
            lines.append(self.lead)
            lines += self.below_start
            if self.broken:
                lines.append(
                    "no trial satisfies all constraints; this one violates "
                    f"{', '.join(self.broken)}"
                )
            if len(self.front) > 1:
                names = ", ".join(record.name for record in self.front)
                lines.append(f"Pareto front (*): {names}")
            lines.append(f"run it: raypo train {self.location}/{BEST}")
        lines.append(
            f"raypo: sweep {self.status} in {duration(self.wall_s)}, {self.device_s:.0f} "
            f"device-seconds of trials; table in {self.location}/{TRIALS}"
        )
        return lines

    def _headline(self) -> dict[str, float]:
        assert self.best is not None
        known = self.best.metrics
        return {k: known[k] for k in (SCORE, REWARD_MODEL, KL) if k in known}


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
        base: The base run config as written when the sweep began, with overrides.
        status: finished, interrupted, or failed if the sweep itself raised.
        wall_s: Seconds of this attempt.
    """
    goal = Goal.of(sweep)
    ordered = sorted(records, key=lambda record: record.number)
    best_first = ranked(ordered, goal)
    front = goal.front([record.judged for record in best_first])
    best = best_of(ordered, goal)
    if best is None and status == "finished":
        status = "failed"
    trials = below(files.location, TRIALS_FOLDER)
    outcome = Outcome(
        status=status,
        location=files.location,
        best=best,
        front=tuple(best_first[row] for row in sorted(front)),
        broken=goal.broken(best.metrics) if best else (),
        failed=tuple(record for record in ordered if record.status == "failed"),
        records=tuple(ordered),
        wall_s=wall_s,
        below_start=_below_start(goal, ordered),
        lead=""
        if best is None
        else who_is_best(
            best_first,
            goal,
            lambda trial: held_out_scores(RunFiles(trials, trial.name), trial.scored_step),
        ),
    )
    if ordered:
        write_trials(files, ordered, goal)
    _write_hparams(files, goal, ordered)
    if best is not None:
        files.write(BEST, best_config(sweep, base, best).encode())
    earlier = (files.summary() or {}).get("wall_s", 0.0)
    files.write_summary(_summary(outcome, sweep, wall_s=earlier + wall_s))
    files.sync()
    return outcome


def _below_start(goal: Goal, records: Sequence[TrialRecord]) -> tuple[str, ...]:
    """Return a sentence if no trial's score is better than the one before the first update."""
    metric, sign = goal.metrics[0], goal.signs[0]
    start = metric.replace("eval/", "eval/initial_", 1)
    pairs = [
        (each.metrics[start], each.metrics[metric])
        for each in records
        if start in each.metrics and metric in each.metrics and each.scored_step
    ]
    if not pairs or any(sign * (score - before) > 0 for before, score in pairs):
        return ()
    return (
        f"No trial is better than the start: before the first update {label_of(metric)} was "
        f"{pairs[0][0]:.4g}.",
    )


def best_config(sweep: SweepConfig, base: Mapping[str, Any], best: TrialRecord) -> str:
    """Return the best trial as a run config: the base as written, with the trial's values."""
    own: dict[str, Any] = {"name": f"{sweep.name}-best", "storage_path": sweep.storage_path}
    values = with_values(base, {**best.point, **own})
    head = [
        f"# The best trial of the sweep {sweep.name}: {best.name}, {point_text(best.point)}.",
        f"# Its base is {sweep.base}; relative paths start where the sweep was started.",
    ]
    if best.status == "stopped":
        scored = best.scored_step
        values["num_steps"] = scored or best.step
        which = f"of step {scored}" if scored else "from before the first update"
        head.append(f"# It was stopped after step {best.step}; its score is {which}.")
    if sweep.scheduler.kind == "pbt":
        head.append("# These are its last values; before each copy it trained with others.")
    text = yaml.safe_dump(escaped(values), sort_keys=False, allow_unicode=True)
    return "\n".join([*head, text])


def _write_hparams(files: RunFiles, goal: Goal, records: Sequence[TrialRecord]) -> None:
    """Write each trial's point and last metrics beside its curves, for TensorBoard."""
    shown = {*goal.named, SCORE, REWARD_MODEL, KL}
    for record in records:
        metrics = {name: value for name, value in record.metrics.items() if name in shown}
        if metrics:
            run = RunFiles(below(files.location, TRIALS_FOLDER), record.name)
            write_hparams(run.folder, record.point, metrics, step=record.step)
            run.sync()


def _summary(outcome: Outcome, sweep: SweepConfig, *, wall_s: float) -> dict[str, Any]:
    counts = {
        status: sum(record.status == status for record in outcome.records)
        for status in ("finished", "stopped", "failed", "interrupted")
    }
    best = outcome.best
    return {
        "status": outcome.status,
        "recipe": "sweep",
        "num_trials": sweep.num_trials,
        "trials": counts,
        "wall_s": wall_s,
        "device_s": outcome.device_s,
        "best": None
        if best is None
        else {"name": best.name, "point": best.point, "metrics": best.metrics},
        "versions": installed_versions(),
    }
