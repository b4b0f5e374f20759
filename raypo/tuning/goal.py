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
"""Key of the value that a sweep's scheduler compares. Larger is always better."""
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
    """Objective of a sweep, which compares trials by the last value of each metric."""

    metrics: tuple[str, ...]
    signs: tuple[float, ...]
    """1 if the metric is maximised, -1 if it is minimised."""
    constraints: tuple[Constraint, ...] = ()

    @classmethod
    def of(cls, sweep: SweepConfig) -> Goal:
        """Return the goal of a sweep's config."""
        signs = tuple(1.0 if mode == "max" else -1.0 for mode in sweep.mode)
        return cls(sweep.metric, signs, sweep.constraint)

    @property
    def named(self) -> list[str]:
        """Names of the metrics to optimise, and of the metrics that constraints bound."""
        return [*self.metrics, *(constraint.metric for constraint in self.constraints)]

    def gains(self, metrics: Metrics) -> tuple[float, ...]:
        """Return the metrics, signed so that larger is better. Unknown or NaN becomes -inf."""
        values = [metrics.get(name, math.nan) for name in self.metrics]
        return tuple(
            -math.inf if math.isnan(value) else sign * value
            for sign, value in zip(self.signs, values, strict=True)
        )

    def excess(self, metrics: Metrics) -> dict[str, float]:
        """Return the violation of each constraint. A satisfied constraint has at most 0."""
        return {
            str(constraint): constraint.excess(metrics.get(constraint.metric, math.nan))
            for constraint in self.constraints
        }

    def broken(self, metrics: Metrics) -> tuple[str, ...]:
        """Return the violated constraints."""
        return tuple(name for name, excess in self.excess(metrics).items() if excess > 0.0)

    def value(self, metrics: Metrics) -> float:
        """Return the first metric as a finite number. Larger is better.

        Infeasible trials have lower values than all feasible ones, and trials without a score have
        the lowest value.
        """
        gain = self.gains(metrics)[0]
        worst = max(self.excess(metrics).values(), default=0.0)
        if not math.isfinite(gain) or not math.isfinite(worst):
            return UNKNOWN
        return gain if worst <= 0.0 else INFEASIBLE - worst

    def ranks(self, trials: Sequence[Metrics]) -> list[int]:
        """Rank the trials from 1; ties keep their order.

        Feasible trials come first, then infeasible trials, then trials without a score. Scores of
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
                self.value(metrics) <= UNKNOWN,
                -scored_step(metrics),
                -self.value(metrics),
                row,
            )
            for row, metrics in enumerate(trials)
        ]
        order = sorted(keys)
        return [order.index(key) + 1 for key in keys]

    def front(self, trials: Sequence[Metrics]) -> set[int]:
        """Return the rows of the Pareto front among the feasible trials with the latest score.

        With one metric these are the best trials.
        """
        return {row for row, front_index in self._fronts(trials).items() if front_index == 0}

    def _fronts(self, trials: Sequence[Metrics]) -> dict[int, int]:
        """Map the row of each feasible trial with a score to the index of its Pareto front.

        The fronts of the latest step come first, from index 0.
        """
        gains = [self.gains(metrics) for metrics in trials]
        unassigned = [row for row, metrics in enumerate(trials) if self.value(metrics) > INFEASIBLE]
        fronts: dict[int, int] = {}
        front_index = 0
        while unassigned:
            latest = max(scored_step(trials[row]) for row in unassigned)
            peers = [row for row in unassigned if scored_step(trials[row]) == latest]
            for row in peers:
                rivals = (gains[rival] for rival in peers if gains[rival] != gains[row])
                if not any(all(map(float.__ge__, rival, gains[row])) for rival in rivals):
                    fronts[row] = front_index
            unassigned = [row for row in unassigned if row not in fronts]
            front_index += 1
        return fronts


def check_metrics(sweep: SweepConfig, base: AnyConfig) -> None:
    """Refuse a metric or a constraint of a sweep that no trial can log.

    Raises:
        ConfigError: a name is unknown, and there is no callback that could add it.
    """
    for name in sweep.metric:
        check_metric("metric", name, base)
    for constraint in sweep.constraint:
        check_metric("constraint", constraint.metric, base)


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


def scored_step(metrics: Metrics) -> int:
    """Return the step of a trial's score, or 0 if it has none."""
    return int(metrics.get(SCORED_STEP, 0))


def last_metrics(rows: Iterable[Metrics], goal: Goal) -> dict[str, float]:
    """Return the last value of each metric.

    Until a metric `eval/x` is measured, its value is the one of the initial evaluation,
    `eval/initial_x`.

    Args:
        rows: Metrics by step. The first row may be the result of this function for earlier steps.
        goal: Objective. The last step at which its first metric was measured is added as
            SCORED_STEP.
    """
    metrics: dict[str, float] = {}
    score = goal.metrics[0]
    for row in rows:
        if score in row:
            metrics[SCORED_STEP] = row.get(SCORED_STEP, row.get(STEP, 0))
        for name, value in row.items():
            metrics.setdefault(name.replace("eval/initial_", "eval/"), value)
            metrics[name] = value
        if score in metrics:
            metrics.setdefault(SCORED_STEP, 0)
    return metrics


def as_report(metrics: Metrics, goal: Goal) -> dict[str, float]:
    """Return the metrics for a report to Tune, with the value that a sweep's scheduler compares."""
    return {**metrics, VALUE: goal.value(metrics)}
