"""What a sweep wants: metrics, their direction, and constraints; which of two trials is better."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from raypo.config.sweep_config import Constraint, SweepConfig

Metrics = Mapping[str, float]

SCORE, REWARD_MODEL = "eval/score_mean", "eval/reward_model_mean"
KL = "kl/ref_response_mean"
VALUE = "sweep/value"
"""One number a report for schedulers: larger is better, whatever the sweep maximises."""
SCORED_STEP = "sweep/scored_step"
"""The step that the first metric's last known value is of; 0: before the first update."""
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
    constraints: tuple[Constraint, ...] = ()

    @classmethod
    def of(cls, sweep: SweepConfig) -> Goal:
        """The goal that a sweep file states."""
        signs = tuple(1.0 if mode == "max" else -1.0 for mode in sweep.mode)
        return cls(sweep.metric, signs, sweep.constraint)

    @property
    def named(self) -> list[str]:
        """The metrics, and those that constraints bound."""
        return [*self.metrics, *(each.metric for each in self.constraints)]

    def gains(self, known: Metrics) -> tuple[float, ...]:
        """The metrics, signed so that larger is better; -inf where one is unknown or NaN."""
        values = [known.get(metric, math.nan) for metric in self.metrics]
        return tuple(
            -math.inf if math.isnan(value) else sign * value
            for sign, value in zip(self.signs, values, strict=True)
        )

    def excess(self, known: Metrics) -> tuple[float, ...]:
        """By how much each constraint is broken; 0 or less where it is kept."""
        return tuple(each.excess(known.get(each.metric, math.nan)) for each in self.constraints)

    def is_feasible(self, known: Metrics) -> bool:
        """Whether all constraints are kept."""
        return all(value <= 0.0 for value in self.excess(known))

    def broken(self, known: Metrics) -> tuple[str, ...]:
        """The constraints that are not kept."""
        pairs = zip(self.constraints, self.excess(known), strict=True)
        return tuple(str(each) for each, excess in pairs if excess > 0.0)

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

        Scores of different steps are never compared: the trials whose score is of a later step
        come first, as those do that successive halving (arXiv:1810.05934) let go on. A trial that
        came to its end is before all that were stopped.

        Feasible ones first: of those of a step Pareto front by front, within a front by the first
        metric. Then the infeasible ones, those of a step by how much they break, then those
        without a score.
        """
        fronts = self._fronts(trials)
        keys = [
            (
                fronts.get(row, len(trials)),
                self.value(known) <= UNKNOWN,
                -scored_step(known),
                -self.value(known),
                row,
            )
            for row, known in enumerate(trials)
        ]
        order = sorted(range(len(trials)), key=keys.__getitem__)
        ranks = [0] * len(trials)
        for rank, row in enumerate(order, start=1):
            ranks[row] = rank
        return ranks

    def front(self, trials: Sequence[Metrics]) -> set[int]:
        """Rows of the latest scores that no feasible trial of them dominates; of one metric, the
        best.
        """
        return {row for row, number in self._fronts(trials).items() if number == 0}

    def _fronts(self, trials: Sequence[Metrics]) -> dict[int, int]:
        """Row of each feasible trial with a score -> number of its front, latest step first."""
        left = [row for row, known in enumerate(trials) if self.value(known) > INFEASIBLE]
        fronts: dict[int, int] = {}
        number = 0
        while left:
            latest = max(scored_step(trials[row]) for row in left)
            peers = [row for row in left if scored_step(trials[row]) == latest]
            front = [
                row
                for row in peers
                if not any(self.dominates(trials[other], trials[row]) for other in peers)
            ]
            fronts |= dict.fromkeys(front, number)
            left = [row for row in left if row not in fronts]
            number += 1
        return fronts


def scored_step(known: Metrics) -> int:
    """The step that a trial's score is of; 0 where none is known."""
    return int(known.get(SCORED_STEP, 0))


def known_metrics(rows: Iterable[Metrics], goal: Goal) -> dict[str, float]:
    """The last value of each metric; an evaluation before the first update counts as its first.

    Args:
        rows: Metrics by step; what was known before may stand first.
        goal: Of its first metric the step of the last value is kept: SCORED_STEP.
    """
    known: dict[str, float] = {}
    score = goal.metrics[0]
    for row in rows:
        if score in row:
            known[SCORED_STEP] = row.get(SCORED_STEP, row.get(STEP, 0))
        for name, value in row.items():
            known.setdefault(name.replace("eval/initial_", "eval/"), value)
            known[name] = value
        if score in known:
            known.setdefault(SCORED_STEP, 0)
    return known


def as_report(known: Metrics, goal: Goal) -> dict[str, float]:
    """Metrics as Tune gets them: with the number that schedulers judge by."""
    return {**known, VALUE: goal.value(known)}
