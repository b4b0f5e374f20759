"""Status of runs, read from their files, as a table or a paragraph. Needs no Ray."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raypo.config import ConfigError
from raypo.custom.loader import source_files
from raypo.metrics.catalogue import HEADLINES, reference
from raypo.metrics.clock import duration
from raypo.storage.run_files import RunFiles

if TYPE_CHECKING:
    from rich.table import Table

PATIENCE_STEPS, PATIENCE_S = 10.0, 600.0
"""Thresholds in steps and in seconds. A run is silent if its last write is older than both."""
RECENT_STEPS = 10
"""Number of recent steps whose median time is reported as the seconds per step."""
_HEADS = ("run", "recipe", "status", "step", "score", "last", "a step", "left")


@dataclass(frozen=True)
class RunStatus:
    """Status of a run or a sweep."""

    name: str
    location: str
    """Folder or URI, as commands accept it."""
    recipe: str
    status: str
    """running, finished, failed, interrupted, or dead (killed before it could end)."""
    done: int
    """Completed steps of a run, or ended trials of a sweep."""
    total: int | None
    scores: tuple[tuple[str, float], ...]
    """Label and last value of each success metric; the table shows the first one."""
    age_s: float | None
    """Seconds since the last step, or since the start if there is none."""
    step_s: float | None
    """Seconds per step. None means unknown."""
    go_on: str
    """Command with which the user can continue."""
    notes: tuple[str, ...] = ()
    """Additional remarks, a sentence each."""
    unit: str = "step"
    log: str | None = None

    @property
    def left_s(self) -> float | None:
        """Estimated seconds left, or None if the run is not running, or if the time is unknown."""
        if self.status != "running" or self.step_s is None or self.total is None:
            return None
        return (self.total - self.done) * self.step_s


def run_status(files: RunFiles, now: float) -> RunStatus | None:
    """Return the status of a run, read from its files, or None if the folder has no run.

    Args:
        files: Files of the run.
        now: Current time, in seconds since 1970.
    """
    config, rows, summary = files.config(), files.metrics(), files.summary() or {}
    if config is None and not rows:
        return None
    written = files.written_at("metrics.jsonl" if rows else "config.yaml")
    age_s = max(now - written, 0.0) if written is not None else None
    step_s = _step_seconds(rows)
    is_silent = age_s is not None and age_s > max(PATIENCE_S, PATIENCE_STEPS * (step_s or 0.0))
    # If a resumed run was killed, the summary still describes the attempt before it.
    done = rows[-1]["step"] if rows else 0
    ended = summary["status"] if summary and summary.get("steps", done) >= done else None
    status = status_of(files, ended, is_silent=is_silent)
    location, config = shown_location(files.location), config or {}
    return RunStatus(
        name=files.name,
        location=location,
        recipe=str(config.get("recipe", "ppo")),
        status=status,
        done=int(done),
        total=config.get("num_steps"),
        scores=tuple(_scores(rows)),
        age_s=age_s,
        step_s=step_s,
        go_on=_command(config, location, status),
        notes=_notes(status, done, age_s if is_silent else None),
        log=f"{location}/logs/worker_0.log",
    )


def _step_seconds(rows: Sequence[Mapping[str, Any]]) -> float | None:
    seconds = [row["time/step_s"] for row in rows[-RECENT_STEPS:] if "time/step_s" in row]
    return statistics.median(seconds) if seconds else None


def status_of(files: RunFiles, ended: str | None, *, is_silent: bool) -> str:
    """Return running, dead, or the status in the summary.

    Args:
        files: Files of the run.
        ended: Status in the summary. None means that this attempt has no summary.
        is_silent: True if nothing was written for long. A run at a URI has no lock, so it counts as
            dead if it is silent and `ended` is None.
    """
    is_running = files.is_running()
    if is_running:
        return "running"
    if ended is not None:
        return ended
    return "running" if is_running is None and not is_silent else "dead"


def shown_location(location: str) -> str:
    """Return a folder as a relative path if it is below the current one. A URI is unchanged."""
    path = Path(location)
    is_below = "://" not in location and path.is_relative_to(Path.cwd())
    return str(path.relative_to(Path.cwd())) if is_below else location


def table(runs: Sequence[RunStatus]) -> Table:
    """Return a table with a line per run, without empty columns. Only names may wrap."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="")
    columns = [column for column in zip(_HEADS, *map(_cells, runs), strict=True) if any(column[1:])]
    for head, *_ in columns:
        table.add_column(head, no_wrap=head != "run", overflow="fold")
    for row in zip(*(cells for _, *cells in columns), strict=True):
        table.add_row(*row)
    return table


def paragraph(run: RunStatus) -> list[str]:
    """Describe one run in several lines."""
    lines = [f"{run.name}: {run.recipe}, {run.status}, {progress(run)}"]
    lines += [f"  {head:<10} {text}" for head, text in facts(run)]
    return lines + [f"  {note}" for note in run.notes]


def progress(run: RunStatus) -> str:
    """Return how far a run is, like `step 3 of 10`."""
    of_all = f" of {run.total}" if run.total is not None else ""
    return f"{run.unit} {run.done}{of_all}"


def facts(run: RunStatus) -> list[tuple[str, str]]:
    """Return the known facts of a run as pairs of heading and text."""
    timing = [f"{duration(run.age_s)} ago"] if run.age_s is not None and run.done else []
    timing += [f"{run.step_s:.3g} s per {run.unit}"] if run.step_s is not None else []
    timing += [f"about {duration(run.left_s)} left"] if run.left_s is not None else []
    scores = [f"{label} {value:.4g}" for label, value in run.scores]
    facts = (
        (f"last {run.unit}", ", ".join(timing)),
        ("scores", ", ".join(scores)),
        ("files", run.location),
        ("log", run.log or ""),
        ("go on", run.go_on),
    )
    return [(head, text) for head, text in facts if text]


def _scores(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, float]]:
    """Return the last finite value of each headline metric, or else its initial value."""
    scores: list[tuple[str, float]] = []
    for metric in HEADLINES:
        values = [row[metric.name] for row in rows if math.isfinite(row.get(metric.name, math.nan))]
        if (last := values[-1] if values else reference(rows, metric.name)) is not None:
            scores.append((metric.label, last))
    return scores


def _command(config: Mapping[str, Any], location: str, status: str) -> str:
    if status == "finished":
        return f"raypo report {location}"
    function = str((config.get("reward") or {}).get("function") or "")
    if function and not source_files(function):  # it was given in Python
        return "the same Python script; its reward function exists only there"
    if "://" in location:
        return "the same raypo train command"
    return f"raypo train {location}"


def _notes(status: str, done: int, silent_s: float | None) -> tuple[str, ...]:
    if status == "dead":
        return ("No process writes to it any more, and it did not end by itself: it was killed.",)
    if status == "running" and silent_s is not None:
        return (
            (
                f"Its process is alive, but has written nothing for {duration(silent_s)}: see the "
                "log."
            ),
        )
    if status == "running" and not done:
        return ("It is starting: no step has ended yet.",)
    return ()


def _cells(run: RunStatus) -> tuple[str, ...]:
    score = f"{run.scores[0][1]:.4g}" if run.scores else ""
    step_s = "" if run.step_s is None else f"{run.step_s:.3g} s"
    progress = f"{run.done}/{run.total or '?'}"
    last, left = (
        "" if seconds is None else duration(seconds) for seconds in (run.age_s, run.left_s)
    )
    return run.name, run.recipe, run.status, progress, score, last, step_s, left


def no_run(location: str) -> ConfigError:
    """Return the error for a location that has no run and no folder of runs."""
    return ConfigError(
        f"RUN ({location}): there is neither a run nor a folder of runs. Give "
        "<storage_path>/<name>, or <storage_path> for all of its runs; raypo train starts one."
    )
