"""A rule on a run's metrics, and what rules share to read them.

A rule reads the metrics of all steps so far and the resolved config. Its docstring is its
definition, which docs/doctor.md repeats.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from raypo.metrics.catalogue import Row

PATIENCE = 3
"""Consecutive steps for which most conditions must hold, so that one outlier is ignored."""
PROMPTS_PER_STEP = "rollout.prompts_per_step"
"""Key by which rules know how much of a mean score is chance."""
ROUNDS = ("rejection_sampling", "iterative_dpo", "distillation")
"""Recipes that sample in rounds: they refuse every `rollout.mode` but sync."""


class History:
    """Metrics of a run so far. Checks get it with at least one step."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.first: Row = {}
        """Metrics of the first step, which includes those from before the first update."""
        self.last: Row = {}
        self._values: dict[str, list[float]] = {}

    def add(self, row: Row) -> None:
        """Add the metrics of a step."""
        self.first, self.last = self.first or row, row
        self.num_steps += 1
        for name, value in row.items():
            if math.isfinite(value):
                self._values.setdefault(name, []).append(value)

    def values(self, name: str) -> list[float]:
        """Return the finite values of a metric, in the order of the steps."""
        return self._values.get(name, [])

    def at_start(self, name: str) -> list[float]:
        """Return a metric's value in the first step, or [] if it has none."""
        value = self.first.get(name, math.nan)
        return [value] if math.isfinite(value) else []

    def newest(self, name: str, count: int = PATIENCE) -> list[float]:
        """Return a metric's last values. Steps without the metric may lie between them.

        The list is empty if there are fewer values, or if the newest step lacks the metric.
        """
        values = self.values(name) if name in self.last else []
        return values[-count:] if len(values) >= count else []


Alarm = tuple[str, str] | None
"""Problem, with its figure, and remedy, with its key. None if the rule does not match."""
Check = Callable[[History, Mapping[str, Any]], Alarm]
"""Function of a run's metrics so far and of its resolved config."""


@dataclass(frozen=True)
class Rule:
    """A sign that something is wrong with a run."""

    name: str
    within: int
    """Number of steps with the sickness, from the first one on, in which it is named. It counts
    evaluations if the rule reads held-out scores."""
    check: Check

    @property
    def definition(self) -> str:
        """Return the condition in words: the docstring of the check."""
        return inspect.cleandoc(self.check.__doc__ or "").replace("\n", " ")


def rule(within: int = PATIENCE) -> Callable[[Check], Rule]:
    """Make a rule, named like the function, of a check."""
    return lambda check: Rule(getattr(check, "__name__"), within, check)  # noqa: B009


def value_at(config: Mapping[str, Any], key: str) -> Any:
    """Return the value of a dotted key, or None if the config lacks it."""
    value: Any = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value
