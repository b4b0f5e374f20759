"""What a person sees while a run goes on: a calm view of it, one line a step, warnings once."""

from __future__ import annotations

import math
import os
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

from raypo.metrics.catalogue import METRICS, Metric, label_of
from raypo.metrics.clock import duration
from raypo.tracking.warnings import Watch, phase_seconds

_COLUMNS = [metric for metric in METRICS.values() if metric.line]
_BLOCKS = "▁▂▃▄▅▆▇█"
_COLOURS = ("blue", "yellow", "green", "magenta", "cyan", "red", "bright_black", "bright_blue")
_WIDTH = 24
"""Characters of a bar, and steps of the curve."""


class Console:
    """Shows a run on a terminal, or as plain lines where there is none or in CI."""

    def __init__(
        self, stream: TextIO | None = None, *, config: Mapping[str, Any] | None = None
    ) -> None:
        """Nothing is written before `start`.

        Args:
            stream: Where to write; None: standard output. What can be drawn on is drawn on: a
                terminal, where CI is not set.
            config: The resolved config, which some warnings ask.
        """
        self._stream = stream or sys.stdout
        is_plain = bool(os.environ.get("CI")) or os.environ.get("TERM") == "dumb"
        self._live = self._stream.isatty() and not is_plain
        self._view: LiveView | None = None
        self._watch = Watch(config)
        self._num_steps = self._step = 0
        self._folder = ""
        self._rows: list[Mapping[str, float]] = []
        """Every step of the run so far, those of earlier commands included."""
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
        """Say what runs and where; only a terminal shows the token, for other lines are kept.

        Args:
            rows: Steps of earlier commands, with which a resumed run is compared.
        """
        self._num_steps, self._folder, self._rows = num_steps, str(folder), [*rows]
        if self._live:
            self._view = LiveView(self._stream, num_steps)
        self.message(f"raypo: {run_name}, {_count(num_steps, 'step')}, files in {folder}")
        if dashboard_url:
            self.message(f"Ray dashboard: {dashboard_url}")
            self.message(f"  Actors: those named raypo:{run_name}:* by role; RayTrainWorker learns")
            self.message("  Metrics: curves, where Prometheus and Grafana run: see `raypo monitor`")
            if dashboard_token:
                shown = dashboard_token if self._live else "what `ray get-auth-token` prints"
                self.message(f"  the token that it asks for: {shown}")

    def resume(self, first_step: int) -> None:
        """Say which step comes first, counted from 1, where it is not the first of the run."""
        self._step = first_step - 1
        self._rows = [row for row in self._rows if row["step"] < first_step]
        self._watch.resume(self._rows)
        if self._step:
            self.message(f"Resuming after step {self._step}.")
        if self._view is not None:
            self._view.reset(self._view.task, completed=self._step)

    def phase(self, text: str) -> None:
        """Say what is going on now; as plain lines only until the first step has ended."""
        if self._view is not None:
            self._view.update(self._view.task, phase=text)
        elif not self._has_step:
            self.message(text)

    def step(self, metrics: Mapping[str, float]) -> None:
        """Write one line for a step that has ended, and what it warns of, once.

        Without the key `step` the steps are counted.
        """
        self._step = int(metrics.get("step", self._step + 1))
        self._has_step = True
        self._rows.append({**metrics, "step": self._step})
        self.message(step_line(self._step, self._num_steps, metrics))
        for finding in self._watch.add(self._rows[-1]):
            self.message(f"warning: {finding.text} {finding.remedy}")
        if self._view is not None:
            self._view.step(self._step, metrics)

    def message(self, text: str) -> None:
        """Write a line of its own, above the live view."""
        if self._view is not None:
            self._view.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            self._stream.write(f"{text}\n")
            self._stream.flush()

    def close(self, status: str, wall_s: float | None = None) -> None:
        """Take the live view away and say how the run ended; a second call does nothing.

        Args:
            status: How it ended, in a word.
            wall_s: Seconds that it took, as its summary says; None: unknown.
        """
        if self._closed:
            return
        self._closed = True
        if self._view is not None:
            self._view.stop()
        words = [f"{status} after {_count(self._step, 'step')}"]
        words += [] if wall_s is None else [f"in {duration(wall_s)}"]
        scores = [row.get("rollout/score_mean", math.nan) for row in self._rows]
        if finite := [score for score in scores if math.isfinite(score)]:
            words.append(f"(score {finite[0]:+.3f} -> {finite[-1]:+.3f})")
        self.message(f"raypo: {' '.join(words)}, files in {self._folder}")


class LiveView(Progress):
    """A bar of steps with the time left, the newest metrics, the score's curve, a step's phases."""

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
            speed_estimate_period=3600.0,  # steps of minutes are the rule
        )
        self.task = self.add_task("", total=num_steps, phase="starting")
        self.start()

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the metrics of a step that has ended; one that it lacks keeps its last value."""
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
            text = "  ".join([curve_line(self._curve), *_values(_COLUMNS, self._metrics)]).strip()
            yield Text(text, no_wrap=True, overflow="ellipsis")
        if self._phases:
            yield phase_bar(self._phases)


def step_line(step: int, num_steps: int, metrics: Mapping[str, float]) -> str:
    """A step in one line; metrics that are not there are left out."""
    columns = sorted(_COLUMNS, key=lambda each: each.name.startswith("eval/"))  # of few steps: last
    return "  ".join(
        [f"step {step:{len(str(num_steps))}d}/{num_steps}", *_values(columns, metrics)]
    )


def _values(columns: Sequence[Metric], metrics: Mapping[str, float]) -> list[str]:
    return [
        each.line.format(metrics[each.name])
        for each in columns
        if each.name in metrics and (metrics[each.name] or not each.unless_zero)
    ]


def curve_line(values: Sequence[float]) -> str:
    """Values as a line of blocks between their least and their greatest."""
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
    """A coloured bar of a step's phases, and the largest of them in words."""
    bar, words = Text("time ", no_wrap=True, overflow="ellipsis"), Text()
    for (name, value), colour in zip(seconds.items(), cycle(_COLOURS), strict=False):
        share = value / (sum(seconds.values()) or 1.0)
        bar.append("█" * round(share * _WIDTH), style=colour)
        if share >= 0.05:
            words.append(f"  {label_of(name)} {share:.0%}", style=colour)
    return bar.append_text(words)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
