"""The folder of a sweep: recorded config, status and completion.

This module imports neither Ray nor torch.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

from raypo.checks.resume_checks import check_recorded_inputs
from raypo.config import NUMBERS_DO_NOT_DEPEND_ON, AnyConfig, ConfigError, parse_run_config
from raypo.config.auto_values import decided_as
from raypo.config.base import RECORDED_BASE
from raypo.config.sweep_config import SweepConfig
from raypo.storage.folder import below
from raypo.storage.run_files import RunFiles
from raypo.storage.run_state import PATIENCE_S, RunStatus, shown_location, status_of
from raypo.tuning.goal import Goal
from raypo.tuning.record import TRIALS, best_of, read_trials

TRIALS_FOLDER = "trials"
"""Folder of the trials' runs, relative to the sweep's folder."""
TRIALS_DO_NOT_DEPEND_ON = (
    "max_concurrent",
    "num_samples",
    "overrides",  # compared as part of the base, which contains them
    "storage_path",
)
"""Keys of a sweep file that may change when the sweep resumes or is extended with trials."""


def trial_files(files: RunFiles, name: str) -> RunFiles:
    """Return the files of a trial's run.

    Args:
        files: The sweep's folder.
        name: Name of the trial.
    """
    return RunFiles(below(files.location, TRIALS_FOLDER), name)


def recorded_sweep(files: RunFiles) -> tuple[SweepConfig, dict[str, Any]] | None:
    """Read a folder's sweep and the values of its base, or None if there is no sweep."""
    recorded = files.config() or {}
    base = recorded.pop(RECORDED_BASE, None)
    if base is None:
        return None
    return SweepConfig.parse(recorded, origin=f"{files.location}/config.yaml"), base


def recorded_config(sweep: SweepConfig, base: AnyConfig) -> dict[str, Any]:
    """Return the content of the folder's config.yaml."""
    values = sweep.model_dump(mode="json", exclude_unset=True)
    return {"name": sweep.name, **values, RECORDED_BASE: base.model_dump(mode="json")}


def check_sweep_folder(sweep: SweepConfig, base: AnyConfig, files: RunFiles) -> None:
    """Refuse to continue in a folder of another sweep, or with changed inputs.

    Raises:
        ConfigError: a key differs or a file has changed; the message lists all of them.
    """
    files.check_unused()
    if not files.exists():
        return
    recorded = recorded_sweep(files)
    if recorded is None:
        raise ConfigError(
            f"name ({sweep.name}): {files.location} holds a run, not a sweep. Choose another "
            "name or storage_path."
        )
    recorded_sweep_config, recorded_base = recorded
    origin = f"{files.location}/config.yaml"
    changes = recorded_sweep_config.differences(sweep, ignore=TRIALS_DO_NOT_DEPEND_ON)
    recorded_base_config = parse_run_config(recorded_base, origin=origin)
    changes += [f"{sweep.base}, {change}" for change in base_changes(recorded_base_config, base)]
    if changes:
        lines = "\n  ".join(changes)
        raise ConfigError(
            f"name ({sweep.name}): {files.location} holds another sweep:\n  {lines}\nChange "
            "these keys back to resume it, choose another name, or start over with --fresh."
        )
    if read_trials(files):
        check_recorded_inputs(base, files)


def base_changes(recorded: AnyConfig, base: AnyConfig) -> list[str]:
    """Return `key: recorded -> current` for each changed key of the base that may not change."""
    current = decided_as(base, recorded.model_dump())
    return recorded.differences(current, ignore=("name", *NUMBERS_DO_NOT_DEPEND_ON))


def is_complete(sweep: SweepConfig, files: RunFiles) -> bool:
    """Return True if the folder's sweep has finished with enough trials, and none failed."""
    summary = files.summary()
    return (
        summary is not None
        and summary["status"] == "finished"
        and summary["num_trials"] >= sweep.num_trials
        and not summary["trials"]["failed"]
    )


def sweep_status(files: RunFiles, now: float) -> RunStatus | None:
    """Return the status of a folder's sweep, or None if it holds no sweep.

    Args:
        files: The folder.
        now: Seconds since 1970.
    """
    recorded = recorded_sweep(files)
    if recorded is None:
        return None
    sweep_config, _ = recorded
    trials, summary = read_trials(files), files.summary() or {}
    written_at = files.written_at(TRIALS if trials else "config.yaml")
    age_s = max(now - written_at, 0.0) if written_at is not None else None
    final_status = (
        summary["status"] if summary.get("num_trials", -1) >= sweep_config.num_trials else None
    )
    status = status_of(files, final_status, is_silent=age_s is not None and age_s > PATIENCE_S)
    goal = Goal.of(sweep_config)
    best = best_of(trials, goal)
    counts = Counter(trial.status for trial in trials)
    counts_text = ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))
    location = shown_location(files.location)
    notes = [f"Its trials: {counts_text or 'none yet'}; raypo status {location}/{TRIALS_FOLDER}"]
    if best is not None:
        notes.append(f"The best so far is {best.name}.")
    is_finished = status == "finished"
    return RunStatus(
        name=files.name,
        location=location,
        recipe="sweep",
        status=status,
        done=sum(trial.has_ended for trial in trials),
        total=sweep_config.num_trials,
        scores=tuple((name, best.metrics[name]) for name in goal.metrics) if best else (),
        age_s=age_s,
        step_s=None,
        go_on=f"raypo {'report' if is_finished else 'sweep'} {location}",
        notes=tuple(notes),
        unit="trial",
    )


def with_trial_status(run: RunStatus, files: RunFiles) -> RunStatus:
    """Return a run's status. For a trial, it includes the status that the sweep has recorded.

    Only the sweep knows that its scheduler stopped a trial.
    """
    storage, _, _ = files.location.rpartition("/")
    sweep_location, _, folder = storage.rpartition("/")
    if folder != TRIALS_FOLDER or run.status == "running":
        return run
    trials = {trial.name: trial for trial in read_trials(RunFiles.at(sweep_location))}
    if run.name not in trials:
        return run
    trial, next_command = trials[run.name], f"raypo sweep {shown_location(sweep_location)}"
    if trial.has_ended:
        next_command = f"raypo report {run.location}"
    if not trial.has_ended and trial.status not in ("failed", "interrupted"):
        return replace(run, go_on=next_command)
    return replace(run, status=trial.status, notes=(), go_on=next_command)
