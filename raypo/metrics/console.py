"""What a person sees while a run goes on: a calm bar and one line a step."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Console as RichConsole
    from rich.progress import Progress

_COLUMNS: tuple[tuple[str, tuple[str, ...], Callable[[float], str]], ...] = (
    ("score", ("rollout/score_mean",), lambda v: f"{v:+.3f}"),
    ("kl", ("kl/ref_response_mean", "kl/ref_mean"), lambda v: f"{v:.3f}"),
    ("clipped", ("ppo/clip_fraction",), lambda v: f"{v:.1%}"),
    ("length", ("rollout/response_tokens_mean",), lambda v: f"{v:.1f}"),
    ("", ("time/step_s",), lambda v: f"{v:.1f} s"),
    ("eval", ("eval/score_mean",), lambda v: f"{v:+.3f}"),
)
"""Label, the metric names it may stand for (the first that is there), format."""


class Console:
    """Tells a run to a terminal, or as plain lines where there is none or in CI."""

    def __init__(self, stream: TextIO | None = None, *, live: bool | None = None) -> None:
        """Nothing is written before `start`.

        Args:
            stream: Where to write; None: standard output.
            live: Whether to draw a bar; None: if the stream is a terminal and CI is not set.
        """
        self._stream = stream or sys.stdout
        self._live = _can_draw(self._stream) if live is None else live
        self._progress: Progress | None = None
        self._rich: RichConsole | None = None
        self._num_steps = self._step = 0
        self._folder = ""
        self._scores: list[float] = []
        self._started = time.monotonic()
        self._closed = False

    def start(
        self,
        run_name: str,
        num_steps: int,
        dashboard_url: str | None,
        folder: str | Path,
    ) -> None:
        """Say what runs and where."""
        self._num_steps, self._folder = num_steps, str(folder)
        self._started = time.monotonic()
        if self._live:
            self._open_bar()
        self.message(f"raypo: {run_name}, {_count(num_steps, 'step')}, files in {folder}")
        if dashboard_url:
            self.message(f"Ray dashboard: {dashboard_url}")

    def resume(self, first_step: int) -> None:
        """Say which step comes first, counted from 1, where it is not the first of the run."""
        self._step = first_step - 1
        if self._step:
            self.message(f"Resuming after step {self._step}.")
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], completed=self._step)

    def phase(self, text: str) -> None:
        """What is going on now; as plain lines only until the first step has ended."""
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], phase=text)
        elif not self._scores:
            self.message(text)

    def step(self, metrics: Mapping[str, float]) -> None:
        """One line for a step that has ended; without the key `step` they are counted."""
        self._step = int(metrics.get("step", self._step + 1))
        self._scores.append(metrics.get("rollout/score_mean", math.nan))
        self.message(step_line(self._step, self._num_steps, metrics))
        if self._progress is not None:
            self._progress.update(
                self._progress.task_ids[0],
                completed=self._step,
                score=f"score {self._scores[-1]:+.3f}",
                phase="",
            )

    def message(self, text: str) -> None:
        """A line of its own, above the bar."""
        if self._rich is not None:
            self._rich.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            self._stream.write(f"{text}\n")
            self._stream.flush()

    def close(self, status: str) -> None:
        """Take the bar away and say how the run ended; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        if self._progress is not None:
            self._progress.stop()
        words = [f"{status} after {_count(self._step, 'step')}"]
        words.append(f"in {_duration(time.monotonic() - self._started)}")
        if self._scores:
            words.append(f"(score {self._scores[0]:+.3f} -> {self._scores[-1]:+.3f})")
        self.message(f"raypo: {' '.join(words)}, files in {self._folder}")

    def _open_bar(self) -> None:
        from rich.console import Console as RichConsole
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        self._rich = RichConsole(file=self._stream, force_terminal=True)
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=24),
            TimeRemainingColumn(compact=True),
            TextColumn("{task.fields[score]}", markup=False),
            TextColumn("{task.fields[phase]}", markup=False),
            console=self._rich,
            transient=True,
            refresh_per_second=2,
        )
        # Steps of minutes are the rule: the time left must not forget the last one.
        self._progress.speed_estimate_period = 3600.0
        self._progress.add_task("", total=self._num_steps, completed=self._step, score="", phase="")
        self._progress.start()


def step_line(step: int, num_steps: int, metrics: Mapping[str, float]) -> str:
    """A step in one line; figures that are not there are left out."""
    width = len(str(num_steps))
    parts = [f"step {step:{width}d}/{num_steps}"]
    for label, names, show in _COLUMNS:
        value = next((metrics[name] for name in names if name in metrics), None)
        if value is not None:
            parts.append(f"{label} {show(value)}".strip())
    return "  ".join(parts)


def _can_draw(stream: TextIO) -> bool:
    return stream.isatty() and not os.environ.get("CI") and os.environ.get("TERM") != "dumb"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
