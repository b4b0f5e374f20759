"""The few lines at the foot of a terminal that say how a run stands."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TextIO

from raypo.tracking.warnings import phase_seconds

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

_BLOCKS = "▁▂▃▄▅▆▇█"
_COLOURS = ("blue", "yellow", "green", "magenta", "cyan", "red", "bright_black", "bright_blue")
_CURVE_STEPS = 24
_BAR_WIDTH = 24
_METRICS: tuple[tuple[str, str, str], ...] = (
    ("score", "rollout/score_mean", "+.3f"),
    ("held out", "eval/score_mean", "+.3f"),
    ("loss", "train/loss", ".3f"),
    ("KL", "kl/ref_response_mean", ".2f"),
    ("length", "rollout/response_tokens_mean", ".1f"),
    ("samples/s", "perf/samples_per_s", ".1f"),
    ("s per step", "time/step_s", ".1f"),
)


class LiveView:
    """A bar of steps with the time left, the newest metrics, the score's curve, a step's phases."""

    def __init__(self, stream: TextIO, num_steps: int) -> None:
        from rich.console import Console
        from rich.live import Live
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
        from rich.progress import TimeRemainingColumn as TimeLeft

        self.console = Console(file=stream, force_terminal=True)
        self._bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=_BAR_WIDTH),
            TimeLeft(compact=True),
            TextColumn("left, {task.fields[phase]}", markup=False),
            console=self.console,
        )
        # Steps of minutes are the rule: the time left must not forget the last one.
        self._bar.speed_estimate_period = 3600.0
        self._num_steps = num_steps
        self._task = self._bar.add_task("", total=num_steps, phase="starting")
        self._metrics: dict[str, float] = {}
        self._curve: list[float] = []
        self._phases: dict[str, float] = {}
        self._live = Live(
            get_renderable=self._render,
            console=self.console,
            transient=True,
            refresh_per_second=2,
        )
        self._live.start()

    def resume(self, step: int) -> None:
        """Begin after a step that was done before."""
        self._bar.reset(self._task, completed=step)

    def phase(self, text: str) -> None:
        """What is going on now."""
        self._bar.update(self._task, phase=text)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the metrics of a step that has ended; one that it lacks keeps its last value."""
        self._metrics |= {name: metrics[name] for _, name, _ in _METRICS if name in metrics}
        curve = metrics.get("rollout/score_mean", metrics.get("train/loss", math.nan))
        self._curve = [*self._curve, curve][-_CURVE_STEPS:]
        self._phases = phase_seconds(metrics)
        phase = f"step {step + 1}" if step < self._num_steps else "ending"
        self._bar.update(self._task, completed=step, phase=phase)

    def close(self) -> None:
        """Take the lines away."""
        self._live.stop()

    def _render(self) -> RenderableType:
        from rich.console import Group
        from rich.text import Text

        lines: list[RenderableType] = [self._bar]
        if self._metrics:
            shown = [
                f"{label} {self._metrics[name]:{form}}"
                for label, name, form in _METRICS
                if name in self._metrics
            ]
            text = "  ".join([curve_line(self._curve), *shown]).strip()
            lines.append(Text(text, no_wrap=True, overflow="ellipsis"))
        if self._phases:
            lines.append(phase_bar(self._phases))
        return Group(*lines)


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
    from rich.text import Text

    total = sum(seconds.values()) or 1.0
    bar, words = Text("time ", no_wrap=True, overflow="ellipsis"), Text()
    for number, (name, value) in enumerate(seconds.items()):
        colour, share = _COLOURS[number % len(_COLOURS)], value / total
        bar.append("█" * round(share * _BAR_WIDTH), style=colour)
        if share >= 0.05:
            label = name.removeprefix("time/").removesuffix("_s").replace("_", " ")
            words.append(f"  {label} {share:.0%}", style=colour)
    return bar.append_text(words)
