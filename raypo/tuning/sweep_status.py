"""How a sweep stands, from its files alone. Needs no Ray."""

from __future__ import annotations

from dataclasses import replace

from raypo.config.base import RECORDED_BASE
from raypo.config.sweep_config import SweepConfig
from raypo.storage.run_files import RunFiles
from raypo.storage.run_state import PATIENCE_S, RunStatus, shown_location, status_of
from raypo.tuning.goal import Goal
from raypo.tuning.record import TRIALS, best_of, read_trials
from raypo.tuning.sweep_folder import TRIALS_FOLDER

KEYS = ("name", "base", "space", "searcher", "num_samples", "metric", "mode", "constraint")
"""Of a sweep's recorded config: the others may be of a version that wrote them otherwise."""


def sweep_status(files: RunFiles, now: float) -> RunStatus | None:
    """How a sweep stands; None where the folder holds none.

    Args:
        now: Seconds since 1970.
    """
    recorded = files.config() or {}
    if recorded.pop(RECORDED_BASE, None) is None:
        return None
    needed = {key: recorded[key] for key in KEYS if key in recorded}
    sweep = SweepConfig.parse(needed, origin=f"{files.location}/config.yaml")
    trials, summary = read_trials(files), files.summary() or {}
    written = files.written_at(TRIALS if trials else "config.yaml")
    age_s = max(now - written, 0.0) if written is not None else None
    ended = summary["status"] if summary.get("num_trials", -1) >= sweep.num_trials else None
    status = status_of(files, ended, is_silent=age_s is not None and age_s > PATIENCE_S)
    goal = Goal.of(sweep)
    best = best_of(trials, goal)
    counts = {each.status: sum(t.status == each.status for t in trials) for each in trials}
    words = ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))
    location = shown_location(files.location)
    notes = [f"Its trials: {words or 'none yet'}; raypo status {location}/{TRIALS_FOLDER}"]
    if best is not None:
        notes.append(f"The best so far is {best.name}.")
    is_over = status == "finished"
    return RunStatus(
        name=files.name,
        location=location,
        recipe="sweep",
        status=status,
        done=sum(trial.has_ended for trial in trials),
        total=sweep.num_trials,
        scores=tuple((name, best.metrics[name]) for name in goal.metrics) if best else (),
        age_s=age_s,
        step_s=None,
        go_on=f"raypo {'report' if is_over else 'sweep'} {location}",
        notes=tuple(notes),
        unit="trial",
    )


def as_trial(run: RunStatus, files: RunFiles) -> RunStatus:
    """The run; a trial as its sweep knows it, whose scheduler may have stopped it."""
    storage, _, _ = files.location.rpartition("/")
    sweep_location, _, folder = storage.rpartition("/")
    if folder != TRIALS_FOLDER or run.status == "running":
        return run
    trials = {trial.name: trial for trial in read_trials(RunFiles.at(sweep_location))}
    if run.name not in trials:
        return run
    trial, go_on = trials[run.name], f"raypo sweep {shown_location(sweep_location)}"
    if trial.has_ended:
        go_on = f"raypo report {run.location}"
    known = trial.has_ended or trial.status in ("failed", "interrupted")
    status, notes = (trial.status, ()) if known else (run.status, run.notes)
    return replace(run, status=status, notes=notes, go_on=go_on)
