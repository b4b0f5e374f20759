"""What a sweep wants: metrics, their direction, and constraints; which of two trials is better."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from raypo.config.sweep import Constraint, SweepConfig

Metrics = Mapping[str, float]

VALUE = "sweep/value"
"""One number a report for schedulers: larger is better, whatever the sweep maximises."""
STEP = "step"
INFEASIBLE = -1e9
"""Below every feasible value."""
UNKNOWN = -1e18


@dataclass(frozen=True)
class Goal:
    """Judges trials by their last known metrics."""

    metrics: tuple[str, ...]
    signs: tuple[float, ...]
    """1 where the metric is to be large, -1 where it is to be small."""
    constraints: tuple[str, ...] = ()

    @classmethod
    def of(cls, sweep: SweepConfig) -> Goal:
        """The goal that a sweep file states."""
        signs = tuple(1.0 if mode == "max" else -1.0 for mode in sweep.mode)
        return cls(sweep.metric, signs, sweep.constraint)

    def gains(self, known: Metrics) -> tuple[float, ...]:
        """The metrics, signed so that larger is better; -inf where one is unknown or NaN."""
        values = [known.get(metric, math.nan) for metric in self.metrics]
        return tuple(
            -math.inf if math.isnan(value) else sign * value
            for sign, value in zip(self.signs, values, strict=True)
        )

    def excess(self, known: Metrics) -> tuple[float, ...]:
        """By how much each constraint is broken; 0 or less where it is kept."""
        rules = [Constraint(text) for text in self.constraints]
        return tuple(rule.excess(known.get(rule.metric, math.nan)) for rule in rules)

    def is_feasible(self, known: Metrics) -> bool:
        """Whether all constraints are kept."""
        return all(value <= 0.0 for value in self.excess(known))

    def broken(self, known: Metrics) -> tuple[str, ...]:
        """The constraints that are not kept."""
        pairs = zip(self.constraints, self.excess(known), strict=True)
        return tuple(text for text, excess in pairs if excess > 0.0)

    def value(self, known: Metrics) -> float:
        """The first metric as one finite number: infeasible below feasible, unknown last."""
        gain = self.gains(known)[0]
        if not math.isfinite(gain):
            return UNKNOWN
        if self.is_feasible(known):
            return gain
        worst = max(self.excess(known))
        return INFEASIBLE - worst if math.isfinite(worst) else UNKNOWN

    def dominates(self, one: Metrics, other: Metrics) -> bool:
        """Whether one is at least as good in every metric and better in some (Pareto)."""
        pairs = list(zip(self.gains(one), self.gains(other), strict=True))
        return all(a >= b for a, b in pairs) and any(a > b for a, b in pairs)

    def ranks(self, trials: Sequence[Metrics]) -> list[int]:
        """Rank of each trial from 1, ties by their order.

        Feasible ones first: Pareto front by front, within a front by the first metric. Then the
        infeasible ones by how much they break, then those without a score.
        """
        fronts = self._fronts(trials)
        keys = [
            (fronts.get(row, len(trials)), -self.value(known), row)
            for row, known in enumerate(trials)
        ]
        order = sorted(range(len(trials)), key=keys.__getitem__)
        ranks = [0] * len(trials)
        for rank, row in enumerate(order, start=1):
            ranks[row] = rank
        return ranks

    def front(self, trials: Sequence[Metrics]) -> set[int]:
        """Rows that no feasible trial dominates; of one metric, the best."""
        return {row for row, number in self._fronts(trials).items() if number == 0}

    def _fronts(self, trials: Sequence[Metrics]) -> dict[int, int]:
        """Row of each feasible trial with a score -> number of its Pareto front."""
        left = [row for row, known in enumerate(trials) if self.value(known) > INFEASIBLE]
        fronts: dict[int, int] = {}
        number = 0
        while left:
            front = [row for row in left if not self._is_dominated(trials, row, left)]
            fronts |= dict.fromkeys(front, number)
            left = [row for row in left if row not in fronts]
            number += 1
        return fronts

    def _is_dominated(self, trials: Sequence[Metrics], row: int, others: Iterable[int]) -> bool:
        return any(self.dominates(trials[other], trials[row]) for other in others)


def known_metrics(rows: Iterable[Metrics]) -> dict[str, float]:
    """The last value of each metric; an evaluation before the first update counts as its first."""
    known: dict[str, float] = {}
    for row in rows:
        for name, value in row.items():
            known.setdefault(name.replace("eval/initial_", "eval/"), value)
            known[name] = value
    return known


def as_report(known: Metrics, goal: Goal) -> dict[str, float]:
    """Metrics as Tune gets them: with the number that schedulers judge by."""
    return {**known, VALUE: goal.value(known)}
