"""Ranked table of a sweep's trials: live in a terminal, otherwise printed as lines."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from raypo.metrics.catalogue import label_of
from raypo.metrics.clock import duration
from raypo.tuning.goal import KL, REWARD_MODEL, Goal
from raypo.tuning.record import TrialRecord, best_of, ranked

if TYPE_CHECKING:
    from rich.table import Table

MOST_ROWS = 24
_ALWAYS = ("at step", "steps", "status", "trial")
"""Columns that are always shown, besides the tried values and the sweep's metrics."""
_GAP = 2
"""Spaces between two columns."""
_RANKING = (
    "Ranked by the step that the score is of (at step), then by the score: scores of different "
    "steps are not compared."
)
_STYLES = {
    "running": "cyan",
    "stopped": "yellow",
    "failed": "red",
    "interrupted": "magenta",
    "infeasible": "dim",
}


class SweepView:
    """Terminal output of a sweep."""

    def __init__(
        self,
        goal: Goal,
        *,
        num_trials: int | None,
        num_steps: int,
        device: str,
        stream: TextIO | None = None,
    ) -> None:
        """Start the live table, if the stream is a terminal.

        Args:
            goal: Objective of the sweep.
            num_trials: Number of trials of the sweep. None means that there is no limit.
            num_steps: Steps of a whole trial.
            device: Unit of cost: CPU or GPU.
            stream: Output. None means standard output.
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
        """Print a line above the table."""
        if self._live is not None:
            self._console.print(text, markup=False, highlight=False)
        else:
            self._stream.write(f"{text}\n")
            self._stream.flush()

    def started(self, record: TrialRecord) -> None:
        """Print that a trial starts."""
        self.message(f"{record.name} starts: {point_text(record.point)}")

    def ended(self, record: TrialRecord, records: Sequence[TrialRecord]) -> None:
        """Print the end of a trial, its result, and the best of the trials that have ended."""
        scores = ", ".join(
            f"{name} {record.metrics[name]:.4g}"
            for name in self._goal.metrics
            if name in record.metrics
        )
        cost = f"{duration(record.seconds)}, {record.device_s:.0f} {self._device}-seconds"
        words = [f"{record.name} {record.status} at step {record.step}", scores, cost, record.error]
        best = best_of([each for each in records if each.has_ended], self._goal)
        if best is not None:
            score = best.metrics[self._goal.metrics[0]]
            words.append(f"best so far: {best.name}, {score:.4g} at step {best.scored_step}")
        self.message("; ".join(word for word in words if word))

    def show(self, records: Sequence[TrialRecord]) -> None:
        """Update the live table, if there is one."""
        if self._live is not None:
            self._live.update(self.table(records))

    def close(self, records: Sequence[TrialRecord]) -> None:
        """End the live table and print the final one."""
        if self._live is not None:
            self._live.stop()
            self._live = None
        self._console.print(self.table(records), soft_wrap=False)

    def table(self, records: Sequence[TrialRecord]) -> Table:
        """Return the table of trials, best first: tried values, then results.

        No cell is truncated. If the console is too narrow, the least important columns are left out
        (`trials.parquet` has all columns). If it is still too narrow, the values share one column.
        """
        from rich.box import SIMPLE_HEAD
        from rich.table import Table
        from rich.text import Text

        best_first = ranked(records, self._goal)
        front = self._goal.front([record.judged for record in best_first])
        shown = best_first[:MOST_ROWS]
        steps = {record.scored_step for record in shown if record.metrics}
        ended = sum(record.has_ended or record.status == "failed" for record in records)
        table = Table(
            title=f"{ended} of {self._num_trials or len(records)} trials ended",
            title_justify="left",
            caption=_RANKING if len(steps) > 1 else None,
            caption_justify="left",
            box=SIMPLE_HEAD,
            padding=(0, _GAP - 1, 0, 0),  # the box adds one more space
            show_edge=False,
        )
        ranks = {"rank": [f"{row + 1}{'*' * (row in front)}" for row in range(len(shown))]}
        values, room = _values(shown), self._console.width
        columns = self._columns(shown)
        while len(columns) > self._num_needed and _width(ranks | values | columns) > room:
            columns.popitem()
        if _width(ranks | values | columns) > room:
            each = [zip(values, row, strict=True) for row in zip(*values.values(), strict=True)]
            values = {"values": [" ".join(f"{k}={v}" for k, v in pairs if v) for pairs in each]}
        for name, cells in (ranks | values | columns).items():
            is_free = name == "values"
            table.add_column(
                name,
                justify="left" if is_free or name == "status" else "right",
                overflow="fold",
                min_width=None if is_free else _width({name: cells}),
            )
        for record, cells in zip(
            shown, zip(*(ranks | values | columns).values(), strict=True), strict=True
        ):
            table.add_row(*map(Text, cells), style=_STYLES.get(status_words(record, self._goal)))
        return table

    @property
    def _num_needed(self) -> int:
        return len(self._goal.metrics) + len(_ALWAYS)

    def _columns(self, shown: Sequence[TrialRecord]) -> dict[str, list[str]]:
        """Return the columns of results by heading, the least important column last."""
        metrics = [*self._goal.named, REWARD_MODEL, KL]
        seen = [m for m in dict.fromkeys(metrics) if any(m in r.metrics for r in shown)]
        by_metric = {
            _heading(name): [_number(record.metrics.get(name, math.nan)) for record in shown]
            for name in [*self._goal.metrics, *seen]
        }
        always = {
            "at step": [str(record.scored_step) for record in shown],
            "steps": [f"{record.step}/{self._num_steps}" for record in shown],
            "status": [status_words(record, self._goal) for record in shown],
            "trial": [record.name.rpartition("-")[2] for record in shown],
        }
        goal = {name: by_metric.pop(name) for name in map(_heading, self._goal.metrics)}
        cost = {f"{self._device}-s": [f"{record.device_s:.0f}" for record in shown]}
        return goal | always | by_metric | cost


def status_words(record: TrialRecord, goal: Goal) -> str:
    """Return a trial's status, or "infeasible" if it has ended and violates a constraint."""
    is_broken = record.has_ended and not goal.is_feasible(record.metrics)
    return "infeasible" if is_broken else record.status


def _values(shown: Sequence[TrialRecord]) -> dict[str, list[str]]:
    """Return columns of the tried values. A heading is the key without its section if that is
    unique.
    """
    keys = list(dict.fromkeys(key for record in shown for key in record.point))
    tails = [key.partition(".")[2] or key for key in keys]
    names = [t if tails.count(t) == 1 else key for key, t in zip(keys, tails, strict=True)]
    return {
        name: [value_text(record.point.get(key, "")) for record in shown]
        for key, name in zip(keys, names, strict=True)
    }


def _width(columns: Mapping[str, Sequence[str]]) -> int:
    """Return the width of a table in characters. Headings wrap between words; cells never wrap."""
    widths = [max(map(len, [*name.split(), *cells])) for name, cells in columns.items()]
    return sum(widths) + _GAP * (len(widths) - 1)


def _heading(metric: str) -> str:
    return label_of(metric).partition(",")[0]


def point_text(point: dict[str, Any]) -> str:
    """Format a point, like `ppo.kl.coef=0.1, seed=2`."""
    return ", ".join(f"{key}={value_text(value)}" for key, value in point.items())


def value_text(value: Any) -> str:
    """Format a value of the space, floats with 4 digits."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _number(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.4g}"
