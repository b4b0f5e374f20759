"""Console output of a run: a live view, one line per step, and each warning once."""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console as Terminal
from rich.console import RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text
from typing_extensions import override

from raypo.health.rules import Watch
from raypo.health.slowness import phase_seconds, slowness
from raypo.metrics.catalogue import METRICS, Metric, before_and_after, label_of
from raypo.metrics.clock import duration
from raypo.storage.rollout_table import PART

_COLUMNS = [metric for metric in METRICS.values() if metric.line]
_BLOCKS = "▁▂▃▄▅▆▇█"
_COLOURS = ("blue", "yellow", "green", "magenta", "cyan", "red", "bright_black", "bright_blue")
_RESULTS = {
    "eval/score_mean": "held-out score",
    "rollout/score_mean": "no held-out score; training score",
    "eval/accuracy": "held-out accuracy",
    "train/loss": "loss",
}
"""Metrics for the last line of a run, with their labels. The first one that the run has is shown.
"""
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
MAX_PARTS = 4
"""Maximum number of named parts of the score in a step line. `reward/...` of metrics.jsonl has all.
"""
SPEED_STEPS = 10
"""Number of steps after which the console says what bounds them. It does so again at the end."""
_WIDTH = 24
"""Width of a bar in characters, and number of steps in the curve."""


def printable(text: str) -> str:
    """Escape control characters, so that a text of others cannot command the terminal.

    Line feeds and tabs stay. Marks that change the direction of writing are escaped, too: they can
    make a text look like another.
    """
    return _CONTROL.sub(lambda match: repr(match[0])[1:-1], text)


class Console:
    """Console of a run: a live view on a terminal, or plain lines elsewhere and in CI."""

    def __init__(
        self, stream: TextIO | None = None, *, config: Mapping[str, Any] | None = None
    ) -> None:
        """Prepare the console. Nothing is written before `start`.

        Args:
            stream: Output stream. None means standard output. The live view is used if the stream
                is a terminal, CI is not set and TERM is not `dumb`.
            config: The resolved config, which some warning rules use.
        """
        self._stream = stream or sys.stdout
        is_plain = bool(os.environ.get("CI")) or os.environ.get("TERM") == "dumb"
        self._live = self._stream.isatty() and not is_plain
        self._view: LiveView | None = None
        self._config = config or {}
        self._watch = Watch(config)
        self._num_steps = self._step = 0
        self._folder = ""
        self._rows: list[Mapping[str, float]] = []
        """Metrics of all steps of the run so far, including the steps before a resume."""
        self._has_step = False
        self._closed = False

    def start(
        self,
        run_name: str,
        num_steps: int,
        dashboard_url: str | None,
        folder: str | Path,
        dashboard_token: str | None = None,
        rows: Sequence[Mapping[str, float]] = (),
    ) -> None:
        """Write the run's name, folder and dashboard.

        The dashboard's token is shown only on a live terminal, because other output may be stored.

        Args:
            run_name: Name of the run.
            num_steps: Total number of steps.
            dashboard_url: URL of the Ray dashboard. None means that there is none.
            folder: Folder of the run's files.
            dashboard_token: Token of the Ray dashboard. None means that it needs none.
            rows: Metrics of the steps that a resumed run has already done, for its warnings.
        """
        self._num_steps, self._folder, self._rows = num_steps, str(folder), [*rows]
        if self._live:
            self._view = LiveView(self._stream, num_steps)
        self.message(f"raypo: {run_name}, {_count(num_steps, 'step')}, files in {folder}")
        if dashboard_url:
            self.message(f"Ray dashboard: {dashboard_url} (actors: raypo:{run_name}:*)")
            if dashboard_token:
                shown = dashboard_token if self._live else "what `ray get-auth-token` prints"
                self.message(f"  the token that it requires: {shown}")

    def resume(self, first_step: int) -> None:
        """Set the step at which the run starts. If it is not the first, report the resume.

        Args:
            first_step: The next step of the run, counted from 1.
        """
        self._step = first_step - 1
        self._rows = [row for row in self._rows if row["step"] < first_step]
        self._watch.resume(self._rows)
        if self._step:
            self.message(f"Resuming after step {self._step}.")
        if self._view is not None:
            self._view.reset(self._view.task, completed=self._step)

    def phase(self, text: str) -> None:
        """Show the current phase. Plain output shows phases only until the first step has ended."""
        if self._view is not None:
            self._view.update(self._view.task, phase=text)
        elif not self._has_step:
            self.message(text)

    def step(self, metrics: Mapping[str, float]) -> None:
        """Write the line of a completed step (key `step`) and its new warnings."""
        self._step = int(metrics["step"])
        self._has_step = True
        self._rows.append(metrics)
        self.message(step_line(self._step, self._num_steps, metrics))
        for finding in self._watch.add(metrics):
            self.message(f"warning: {finding.text} {finding.remedy}")
        if len(self._rows) == SPEED_STEPS and (why := slowness(self._rows, self._config)):
            self.message(f"speed: {why.text}")
        if self._view is not None:
            self._view.step(self._step, metrics)

    def message(self, text: str) -> None:
        """Write a separate line, above the live view. Control characters are escaped."""
        text = printable(text)
        if self._view is not None:
            self._view.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            self._stream.write(f"{text}\n")
            self._stream.flush()

    def close(self, status: str, wall_s: float | None = None, learned: str = "") -> None:
        """Remove the live view and report how the run ended. Idempotent.

        Args:
            status: Status of the ended run, such as `finished`.
            wall_s: Duration from the run's summary, in seconds. None means unknown.
            learned: Sentences on what the run learned. If they are empty, the first and the last
                value of a score or loss are shown instead.
        """
        if self._closed:
            return
        self._closed = True
        if self._view is not None:
            self._view.stop()
        # A run that ends before it calls `resume` knows its earlier steps only from the rows.
        done = max([self._step, *(int(row["step"]) for row in self._rows[-1:])])
        words = [f"{status} after {_count(done, 'step')}"]
        words += [] if wall_s is None else [f"in {duration(wall_s)}"]
        for name, label in _RESULTS.items():
            if not learned and (change := before_and_after(self._rows, name)):
                words.append(f"({label} {change[0]:+.3f} -> {change[1]:+.3f})")
                break
        self.message(f"raypo: {' '.join(words)}, files in {self._folder}")
        if learned:
            self.message(f"  {learned}")
        if why := slowness(self._rows, self._config):
            self.message(f"  speed: {why.text}")
        if status == "finished":
            self.message(f"  its page: raypo report {self._folder}")


class LiveView(Progress):
    """Progress bar with the time left, the latest metrics, the score curve and a step's phases."""

    def __init__(self, stream: TextIO, num_steps: int) -> None:
        self._metrics: dict[str, float] = {}
        self._curve: list[float] = []
        self._phases: dict[str, float] = {}
        super().__init__(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=_WIDTH),
            TimeRemainingColumn(compact=True),
            TextColumn("left, {task.fields[phase]}", markup=False),
            console=Terminal(file=stream, force_terminal=True),
            transient=True,
            refresh_per_second=2,
            speed_estimate_period=3600.0,  # steps often take minutes
        )
        self.task = self.add_task("", total=num_steps, phase="starting")
        self.start()

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the metrics of a completed step. A missing metric keeps its last value."""
        self._metrics |= metrics
        curve = metrics.get("rollout/score_mean", metrics.get("train/loss", math.nan))
        self._curve = [*self._curve, curve][-_WIDTH:]
        self._phases = phase_seconds(metrics)
        is_last = step == self.tasks[0].total
        self.update(self.task, completed=step, phase="ending" if is_last else f"step {step + 1}")

    @override
    def get_renderables(self) -> Iterable[RenderableType]:
        yield from super().get_renderables()
        if self._metrics:
            words = [*_values(_COLUMNS, self._metrics), *_parts(self._metrics)]
            text = "  ".join([curve_line(self._curve), *words]).strip()
            yield Text(text, no_wrap=True, overflow="ellipsis")
        if self._phases:
            yield phase_bar(self._phases)


def step_line(step: int, num_steps: int, metrics: Mapping[str, float]) -> str:
    """Format a step as one line. Missing metrics are left out."""
    # Metrics of evaluations come last, because most steps lack them.
    columns = sorted(_COLUMNS, key=lambda metric: metric.name.startswith("eval/"))
    number = f"step {step:{len(str(num_steps))}d}/{num_steps}"
    return "  ".join([number, *_values(columns, metrics), *_parts(metrics)])


def _values(columns: Sequence[Metric], metrics: Mapping[str, float]) -> list[str]:
    return [
        metric.line.format(metrics[metric.name])
        for metric in columns
        if metric.name in metrics and (metrics[metric.name] or not metric.unless_zero)
    ]


def _parts(metrics: Mapping[str, float]) -> list[str]:
    """Return the first `MAX_PARTS` named parts of the training score."""
    parts = sorted(name for name in metrics if name.startswith(PART))
    return [f"{name.removeprefix(PART)} {metrics[name]:.3g}" for name in parts[:MAX_PARTS]]


def curve_line(values: Sequence[float]) -> str:
    """Format values as a line of block characters, scaled from the minimum to the maximum."""
    finite = [value for value in values if math.isfinite(value)]
    if len(finite) < 2:
        return ""
    low, span = min(finite), (max(finite) - min(finite)) or 1.0
    top = len(_BLOCKS) - 1
    return "".join(
        _BLOCKS[round((value - low) / span * top)] if math.isfinite(value) else " "
        for value in values
    )


def phase_bar(seconds: Mapping[str, float]) -> Text:
    """Return a coloured bar of a step's phases, with the names of the largest ones."""
    bar, words = Text("time ", no_wrap=True, overflow="ellipsis"), Text()
    for (name, value), colour in zip(seconds.items(), cycle(_COLOURS), strict=False):
        share = value / (sum(seconds.values()) or 1.0)
        bar.append("█" * round(share * _WIDTH), style=colour)
        if share >= 0.05:
            words.append(f"  {label_of(name)} {share:.0%}", style=colour)
    return bar.append_text(words)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
