"""What a person sees while a run goes on: a calm view of it, one line a step, warnings once."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

from raypo.metrics.clock import duration
from raypo.tracking.live_view import LiveView
from raypo.tracking.warnings import Watch

_COLUMNS: tuple[tuple[str, tuple[str, ...], Callable[[float], str]], ...] = (
    ("accuracy", ("train/accuracy",), lambda v: f"{v:.1%}"),
    ("score", ("rollout/score_mean",), lambda v: f"{v:+.3f}"),
    ("kl", ("kl/ref_response_mean", "kl/ref_mean"), lambda v: f"{v:.3f}"),
    ("length", ("rollout/response_tokens_mean",), lambda v: f"{v:.1f}"),
    ("ratios clipped", ("ppo/clip_fraction",), lambda v: f"{v:.1%}"),
    ("loss", ("train/loss",), lambda v: f"{v:.4f}"),
    ("", ("perf/samples_per_s",), lambda v: f"{v:.1f} samples/s"),
    ("", ("time/step_s",), lambda v: f"{v:.1f} s"),
    ("waited", ("time/wait_for_rollouts_s",), lambda v: f"{v:.1f} s"),
    ("engines idle", ("perf/engine_idle_s",), lambda v: f"{v:.1f} s"),
    ("eval", ("eval/score_mean",), lambda v: f"{v:+.3f}"),
    ("eval accuracy", ("eval/accuracy",), lambda v: f"{v:.1%}"),
    ("eval loss", ("eval/loss",), lambda v: f"{v:.4f}"),
)
"""Label, the metric names it may stand for (the first that is there), format."""


class Console:
    """Tells a run to a terminal, or as plain lines where there is none or in CI."""

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
        self._scores: list[float] = []
        self._closed = False

    def start(
        self,
        run_name: str,
        num_steps: int,
        dashboard_url: str | None,
        folder: str | Path,
        dashboard_token: str | None = None,
    ) -> None:
        """Say what runs and where; only a terminal shows the token, for other lines are kept."""
        self._num_steps, self._folder = num_steps, str(folder)
        if self._live:
            self._view = LiveView(self._stream, num_steps)
        self.message(f"raypo: {run_name}, {_count(num_steps, 'step')}, files in {folder}")
        if dashboard_url:
            self.message(f"Ray dashboard: {dashboard_url}")
            self.message(f"  Actors: those named raypo:{run_name}:* by role; RayTrainWorker learns")
            self.message("  Metrics: curves, while `raypo monitor` runs Grafana beside it")
            if dashboard_token:
                shown = dashboard_token if self._live else "what `ray get-auth-token` prints"
                self.message(f"  the token that it asks for: {shown}")

    def resume(self, first_step: int) -> None:
        """Say which step comes first, counted from 1, where it is not the first of the run."""
        self._step = first_step - 1
        if self._step:
            self.message(f"Resuming after step {self._step}.")
        if self._view is not None:
            self._view.resume(self._step)

    def phase(self, text: str) -> None:
        """What is going on now; as plain lines only until the first step has ended."""
        if self._view is not None:
            self._view.phase(text)
        elif not self._scores:
            self.message(text)

    def step(self, metrics: Mapping[str, float]) -> None:
        """One line for a step that has ended, and what it warns of, once.

        Without the key `step` the steps are counted.
        """
        self._step = int(metrics.get("step", self._step + 1))
        self._scores.append(metrics.get("rollout/score_mean", math.nan))
        self.message(step_line(self._step, self._num_steps, metrics))
        for finding in self._watch.add({**metrics, "step": self._step}):
            self.message(f"warning: {finding.text} {finding.remedy}")
        if self._view is not None:
            self._view.step(self._step, metrics)

    def message(self, text: str) -> None:
        """A line of its own, above the live view."""
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
            self._view.close()
        words = [f"{status} after {_count(self._step, 'step')}"]
        words += [] if wall_s is None else [f"in {duration(wall_s)}"]
        if any(map(math.isfinite, self._scores)):
            words.append(f"(score {self._scores[0]:+.3f} -> {self._scores[-1]:+.3f})")
        self.message(f"raypo: {' '.join(words)}, files in {self._folder}")


def step_line(step: int, num_steps: int, metrics: Mapping[str, float]) -> str:
    """A step in one line; metrics that are not there are left out."""
    width = len(str(num_steps))
    parts = [f"step {step:{width}d}/{num_steps}"]
    for label, names, show in _COLUMNS:
        value = next((metrics[name] for name in names if name in metrics), None)
        if value is not None:
            parts.append(f"{label} {show(value)}".strip())
    return "  ".join(parts)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
