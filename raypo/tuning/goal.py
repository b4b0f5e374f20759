"""Objective of a sweep: metrics, their directions and constraints; comparison of trials."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from raypo.config import AnyConfig, ConfigError
from raypo.config.sweep_config import Constraint, SweepConfig
from raypo.metrics.catalogue import doubt_about

Metrics = Mapping[str, float]

SCORE, REWARD_MODEL = "eval/score_mean", "eval/reward_model_mean"
KL = "kl/ref_response_mean"
VALUE = "sweep/value"
"""Key of the value that schedulers compare, which each report has. Larger is always better."""
SCORED_STEP = "sweep/scored_step"
"""Key of the step at which the first metric was last measured. 0 means before the first update."""
STEP = "step"
INFEASIBLE = -1e9
"""Upper bound of the value of an infeasible trial. It is below the value of every feasible
trial."""
UNKNOWN = -1e18
"""Value of a trial whose score, or a metric that a constraint bounds, is unknown."""


@dataclass(frozen=True)
class Goal:
    """Objective by which trials are compared, from their last known metrics."""

    metrics: tuple[str, ...]
    signs: tuple[float, ...]
    """1 for a metric to maximise, -1 for one to minimise."""
    constraints: tuple[Constraint, ...] = ()

    @classmethod
    def of(cls, sweep: SweepConfig) -> Goal:
        """Return the goal of a sweep's config."""
        signs = tuple(1.0 if mode == "max" else -1.0 for mode in sweep.mode)
        return cls(sweep.metric, signs, sweep.constraint)

    @property
    def named(self) -> list[str]:
        """Names of the metrics to optimise, and of the metrics that constraints bound."""
        return [*self.metrics, *(each.metric for each in self.constraints)]

    def gains(self, known: Metrics) -> tuple[float, ...]:
        """Return the metrics, signed so that larger is better. Unknown or NaN becomes -inf."""
        values = [known.get(metric, math.nan) for metric in self.metrics]
        return tuple(
            -math.inf if math.isnan(value) else sign * value
            for sign, value in zip(self.signs, values, strict=True)
        )

    def excess(self, known: Metrics) -> tuple[float, ...]:
        """Return the violation of each constraint, which is 0 or less if it is satisfied."""
        return tuple(each.excess(known.get(each.metric, math.nan)) for each in self.constraints)

    def is_feasible(self, known: Metrics) -> bool:
        """Return True if all constraints are satisfied."""
        return all(value <= 0.0 for value in self.excess(known))

    def broken(self, known: Metrics) -> tuple[str, ...]:
        """Return the violated constraints."""
        pairs = zip(self.constraints, self.excess(known), strict=True)
        return tuple(str(each) for each, excess in pairs if excess > 0.0)

    def value(self, known: Metrics) -> float:
        """Return the first metric as a finite number, larger is better.

        Infeasible trials have lower values than all feasible ones, and trials without a score have
        the lowest value.
        """
        gain = self.gains(known)[0]
        if not math.isfinite(gain):
            return UNKNOWN
        if self.is_feasible(known):
            return gain
        worst = max(self.excess(known))
        return INFEASIBLE - worst if math.isfinite(worst) else UNKNOWN

    def dominates(self, one: Metrics, other: Metrics) -> bool:
        """Return True if `one` is nowhere worse than `other`, and better in at least one metric."""
        pairs = list(zip(self.gains(one), self.gains(other), strict=True))
        return all(a >= b for a, b in pairs) and any(a > b for a, b in pairs)

    def ranks(self, trials: Sequence[Metrics]) -> list[int]:
        """Rank the trials from 1; ties keep their order.

        Feasible trials come first, then infeasible ones, then those without a score. Scores of
        different steps are never compared. Among feasible trials, and likewise among infeasible
        ones, a score of a later step ranks first, as in successive halving (arXiv:1810.05934). A
        stopped trial therefore ranks below trials that reached a later score.

        Feasible trials of the same step are ordered by Pareto front, then by the first metric.
        Infeasible trials of the same step are ordered by their largest violation.
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
        """Return the rows of the Pareto front among the feasible trials with the latest score.

        With one metric these are the best trials.
        """
        return {row for row, number in self._fronts(trials).items() if number == 0}

    def _fronts(self, trials: Sequence[Metrics]) -> dict[int, int]:
        """Map the row of each feasible trial with a score to the number of its front.

        Fronts are numbered from 0, those of the latest step first.
        """
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


def check_metrics(sweep: SweepConfig, base: AnyConfig) -> None:
    """Refuse a metric or a constraint of a sweep that no trial can log.

    Raises:
        ConfigError: a name is unknown, and there is no callback that could add it.
    """
    for name in sweep.metric:
        check_metric("metric", name, base)
    for each in sweep.constraint:
        check_metric("constraint", each.metric, base)


def check_metric(key: str, name: str, base: AnyConfig) -> None:
    """Refuse a metric that no run of this config can log.

    Args:
        key: Config key or argument that names the metric, for the message.
        name: The metric.
        base: Config of the runs. Its callbacks may add metrics of any name.
    """
    remedy = doubt_about(name, base.recipe)
    if remedy is not None and not base.callbacks:
        raise ConfigError(
            f"{key} ({name}): no run of the recipe {base.recipe} logs this metric. {remedy}"
        )


def scored_step(known: Metrics) -> int:
    """Return the step of a trial's score, or 0 if it has none."""
    return int(known.get(SCORED_STEP, 0))


def known_metrics(rows: Iterable[Metrics], goal: Goal | None) -> dict[str, float]:
    """Return the last value of each metric.

    Until a metric `eval/x` is measured, its value is that of the initial evaluation,
    `eval/initial_x`.

    Args:
        rows: Metrics by step. The first row may be the known metrics of earlier steps.
        goal: Objective. The last step at which its first metric was measured is added as
            SCORED_STEP. None means that no such entry is added.
    """
    known: dict[str, float] = {}
    score = goal.metrics[0] if goal else None
    for row in rows:
        if score in row:
            known[SCORED_STEP] = row.get(SCORED_STEP, row.get(STEP, 0))
        for name, value in row.items():
            known.setdefault(name.replace("eval/initial_", "eval/"), value)
            known[name] = value
        if score in known:
            known.setdefault(SCORED_STEP, 0)
    return known


def as_report(known: Metrics, goal: Goal | None) -> dict[str, float]:
    """Return the metrics for a report to Tune, with the value that a sweep's scheduler compares."""
    return {**known, VALUE: goal.value(known)} if goal else {**known}
