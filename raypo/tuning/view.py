"""The ranked table of a sweep's trials, live in a terminal, as lines elsewhere."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TextIO

from raypo.metrics.report.verdict import duration
from raypo.tuning.goal import Goal
from raypo.tuning.record import TrialRecord

if TYPE_CHECKING:
    from rich.table import Table

MOST_ROWS = 24
_COLOURS = {
    "running": "cyan",
    "finished": "green",
    "stopped": "yellow",
    "failed": "red",
    "interrupted": "magenta",
}


class SweepView:
    """What a person sees of a sweep."""

    def __init__(
        self,
        goal: Goal,
        *,
        num_trials: int,
        num_steps: int,
        device: str,
        stream: TextIO | None = None,
    ) -> None:
        """Nothing is written yet.

        Args:
            device: The unit of cost: CPU or GPU.
        """
        from rich.console import Console
        from rich.live import Live

        self._goal, self._num_trials, self._num_steps = goal, num_trials, num_steps
        self._device = device
        self._stream = stream or sys.stdout
        can_draw = self._stream.isatty() and not os.environ.get("CI")
        self._console = Console(file=self._stream, soft_wrap=not can_draw)
        self._live = Live(console=self._console, transient=True) if can_draw else None
        if self._live is not None:
            self._live.start()

    def message(self, text: str) -> None:
        """A line of its own, above the table."""
        if self._live is not None:
            self._console.print(text, markup=False, highlight=False)
        else:
            self._stream.write(f"{text}\n")
            self._stream.flush()

    def started(self, record: TrialRecord) -> None:
        """A trial starts."""
        self.message(f"{record.name} starts: {point_text(record.point)}")

    def reported(self, record: TrialRecord) -> None:
        """A trial reports a step; without a live table nothing is said of it."""

    def ended(self, record: TrialRecord) -> None:
        """A trial has ended."""
        scores = ", ".join(
            f"{name} {record.metrics[name]:.4g}"
            for name in self._goal.metrics
            if name in record.metrics
        )
        cost = f"{duration(record.seconds)}, {record.device_s:.0f} {self._device}-seconds"
        words = [f"{record.name} {record.status} at step {record.step}", scores, cost, record.error]
        self.message("; ".join(word for word in words if word))

    def show(self, records: Sequence[TrialRecord]) -> None:
        """The table as it is now, in a terminal."""
        if self._live is not None:
            self._live.update(self.table(records))

    def close(self, records: Sequence[TrialRecord]) -> None:
        """The last table, which stays."""
        if self._live is not None:
            self._live.stop()
            self._live = None
        self._console.print(self.table(records))

    def table(self, records: Sequence[TrialRecord]) -> Table:
        """The trials, best first."""
        from rich.table import Table

        ended = sum(record.has_ended or record.status == "failed" for record in records)
        table = Table(title=f"{ended} of {self._num_trials} trials ended", title_justify="left")
        keys = list(dict.fromkeys(key for record in records for key in record.point))
        extra = [text.split()[0] for text in self._goal.constraints]
        extra += ["eval/reward_model_mean", "kl/ref_response_mean"]
        metrics = list(dict.fromkeys([*self._goal.metrics, *extra]))
        metrics = [m for m in metrics if any(m in record.metrics for record in records)]
        for name in ("rank", "trial", "status", "step", *keys, *metrics, f"{self._device}-s"):
            table.add_column(name, justify="right" if name not in ("trial", "status") else "left")
        ranks = self._goal.ranks([record.judged for record in records])
        front = self._goal.front([record.judged for record in records])
        ranked = sorted(zip(ranks, range(len(records)), records, strict=True))[:MOST_ROWS]
        for rank, row, record in ranked:
            cells = [
                f"{rank}{'*' if row in front else ''}",
                record.name,
                f"[{_COLOURS.get(record.status, '')}]{record.status}[/]"
                if record.status in _COLOURS
                else record.status,
                f"{record.step}/{self._num_steps}",
                *(value_text(record.point.get(key)) for key in keys),
                *(_number(record.metrics.get(name, math.nan)) for name in metrics),
                f"{record.device_s:.0f}",
            ]
            broken = not self._goal.is_feasible(record.metrics)
            table.add_row(*cells, style="dim" if broken and record.has_ended else "")
        return table


def point_text(point: dict[str, Any]) -> str:
    """`ppo.kl.coef=0.1, seed=2`."""
    return ", ".join(f"{key}={value_text(value)}" for key, value in point.items())


def value_text(value: Any) -> str:
    """A value of the space, short."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _number(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.4g}"
