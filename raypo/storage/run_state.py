"""How runs stand, read from their files: a line for each, or a paragraph on one. Needs no Ray."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raypo.config import ConfigError
from raypo.metrics.catalogue import HEADLINES, reference
from raypo.metrics.clock import duration
from raypo.storage.run_files import RunFiles

if TYPE_CHECKING:
    from rich.table import Table

PATIENCE_STEPS, PATIENCE_S = 10.0, 600.0
"""A run that has written nothing for so many of its steps, and seconds, is silent."""
RECENT_STEPS = 10
"""Steps that the seconds of a step are the median of."""
_HEADS = ("run", "recipe", "status", "step", "score", "last", "a step", "left")


@dataclass(frozen=True)
class RunStatus:
    """How a run or a sweep stands."""

    name: str
    location: str
    """Folder or URI, as a command takes it."""
    recipe: str
    status: str
    """running, finished, failed, interrupted, or dead: killed before it could end."""
    done: int
    """Steps of a run, or trials of a sweep that have ended."""
    total: int | None
    scores: tuple[tuple[str, float], ...]
    """What it is judged by, in words, with the last value; the first is what a line shows."""
    age_s: float | None
    """Seconds since the last step, or since the start where there is none."""
    step_s: float | None
    """Seconds of a step; None where it is not known."""
    go_on: str
    """The command that goes on from here."""
    notes: tuple[str, ...] = ()
    """What else there is to say, a sentence each."""
    unit: str = "step"
    log: str | None = None

    @property
    def left_s(self) -> float | None:
        """Seconds that the steps left will take, of a run that goes on."""
        if self.status != "running" or self.step_s is None or self.total is None:
            return None
        return (self.total - self.done) * self.step_s


def run_status(files: RunFiles, now: float) -> RunStatus | None:
    """How a run stands by its files; None where the folder holds no run.

    Args:
        now: Seconds since 1970.
    """
    config, rows, summary = files.config(), files.metrics(), files.summary() or {}
    if config is None and not rows:
        return None
    written = files.written_at("metrics.jsonl" if rows else "config.yaml")
    age_s = max(now - written, 0.0) if written is not None else None
    step_s = _step_seconds(rows)
    is_silent = age_s is not None and age_s > max(PATIENCE_S, PATIENCE_STEPS * (step_s or 0.0))
    # A run that was resumed and killed has the summary of its attempt before that one.
    done = rows[-1]["step"] if rows else 0
    ended = summary["status"] if summary and summary.get("steps", done) >= done else None
    status = status_of(files, ended, is_silent=is_silent)
    return _standing(files.name, files.location, config or {}, rows, status, age_s, is_silent)


def status_in_progress(name: str, standing: Mapping[str, Any], now: float) -> RunStatus:
    """How a run stands that is under way on a cluster, as its monitor knows it.

    Args:
        standing: See `raypo.cluster.messenger.Monitor.standing`.
        now: Seconds since 1970.
    """
    age_s, rows = max(now - standing["changed_at"], 0.0), [standing["metrics"]]
    run = _standing(name, standing["location"], standing, rows, "running", age_s, False)
    return replace(run, go_on="", log=None)  # its folder may be out of reach


def _standing(
    name: str,
    location: str,
    config: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    status: str,
    age_s: float | None,
    is_silent: bool,
) -> RunStatus:
    location, done = shown_location(location), int(rows[-1].get("step", 0)) if rows else 0
    return RunStatus(
        name=name,
        location=location,
        recipe=str(config.get("recipe", "ppo")),
        status=status,
        done=done,
        total=config.get("num_steps"),
        scores=tuple(_scores(rows)),
        age_s=age_s,
        step_s=_step_seconds(rows),
        go_on=_command(config, location, status),
        notes=_notes(status, done, age_s if is_silent else None),
        log=f"{location}/logs/worker_0.log",
    )


def _step_seconds(rows: Sequence[Mapping[str, Any]]) -> float | None:
    seconds = [row["time/step_s"] for row in rows[-RECENT_STEPS:] if "time/step_s" in row]
    return statistics.median(seconds) if seconds else None


def status_of(files: RunFiles, ended: str | None, *, is_silent: bool) -> str:
    """running, dead, or how it ended.

    Args:
        ended: What the summary says; None where there is none of this attempt.
        is_silent: Nothing was written for long; it counts at a URI, where there is no lock.
    """
    is_running = files.is_running()
    if is_running:
        return "running"
    if ended is not None:
        return ended
    return "running" if is_running is None and not is_silent else "dead"


def shown_location(location: str) -> str:
    """A folder as it is named from the current one; a URI as it is."""
    path = Path(location)
    is_below = "://" not in location and path.is_relative_to(Path.cwd())
    return str(path.relative_to(Path.cwd())) if is_below else location


def table(runs: Sequence[RunStatus]) -> Table:
    """A line each; columns that no run fills are left out, and only names may wrap."""
    from rich.table import Table

    found = Table(box=None, pad_edge=False, header_style="")
    columns = [each for each in zip(_HEADS, *map(_cells, runs), strict=True) if any(each[1:])]
    for head, *_ in columns:
        found.add_column(head, no_wrap=head != "run", overflow="fold")
    for row in zip(*(cells for _, *cells in columns), strict=True):
        found.add_row(*row)
    return found


def paragraph(run: RunStatus) -> list[str]:
    """One run in some lines."""
    of_all = f" of {run.total}" if run.total is not None else ""
    lines = [f"{run.name}: {run.recipe}, {run.status}, {run.unit} {run.done}{of_all}"]
    timing = [f"{duration(run.age_s)} ago"] if run.age_s is not None and run.done else []
    timing += [f"{run.step_s:.3g} s per {run.unit}"] if run.step_s is not None else []
    timing += [f"about {duration(run.left_s)} left"] if run.left_s is not None else []
    scores = [f"{label} {value:.4g}" for label, value in run.scores]
    for head, text in (
        (f"last {run.unit}", ", ".join(timing)),
        ("scores", ", ".join(scores)),
        ("files", run.location),
        ("log", run.log or ""),
        ("go on", run.go_on),
    ):
        if text:
            lines.append(f"  {head:<10} {text}")
    return lines + [f"  {note}" for note in run.notes]


def _scores(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, float]]:
    """The last finite value of each headline, and the held-out one of the start."""
    found: list[tuple[str, float]] = []
    for metric in HEADLINES:
        values = [row[metric.name] for row in rows if math.isfinite(row.get(metric.name, math.nan))]
        if (last := values[-1] if values else reference(rows, metric.name)) is not None:
            found.append((metric.label, last))
    return found


def _command(config: Mapping[str, Any], location: str, status: str) -> str:
    if status == "finished":
        return f"raypo report {location}"
    function = str((config.get("reward") or {}).get("function") or "")
    if function.startswith("__main__:"):
        return "the same Python script; its reward function is known there only"
    if "://" in location:
        return "the same raypo train command"
    return f"raypo train {location}"


def _notes(status: str, done: int, silent_s: float | None) -> tuple[str, ...]:
    if status == "dead":
        return ("No process writes to it any more, and it did not end by itself: it was killed.",)
    if status == "running" and silent_s is not None:
        return (f"It is alive, but has written nothing for {duration(silent_s)}: see the log.",)
    if status == "running" and not done:
        return ("It is starting: no step has ended yet.",)
    return ()


def _cells(run: RunStatus) -> tuple[str, ...]:
    score = f"{run.scores[0][1]:.4g}" if run.scores else ""
    step_s = "" if run.step_s is None else f"{run.step_s:.3g} s"
    progress = f"{run.done}/{run.total or '?'}"
    last, left = ("" if each is None else duration(each) for each in (run.age_s, run.left_s))
    return run.name, run.recipe, run.status, progress, score, last, step_s, left


def no_run(location: str) -> ConfigError:
    """What is said where neither a run nor runs are."""
    return ConfigError(
        f"RUN ({location}): no run is there, nor a folder of runs. Give <storage_path>/<name>, or "
        "<storage_path> for all of its runs; raypo train starts one."
    )
