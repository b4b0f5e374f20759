"""Schedulers, which decide which trials continue, and reports of earlier attempts for them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from ray.tune.experiment import Trial
from ray.tune.schedulers import (
    ASHAScheduler,
    FIFOScheduler,
    MedianStoppingRule,
    TrialScheduler,
)

from raypo.config import AnyConfig
from raypo.config.sweep_config import SweepConfig
from raypo.ray_internals import replay
from raypo.storage.run_files import RunFiles
from raypo.tuning.goal import (
    SCORED_STEP,
    STEP,
    UNKNOWN,
    VALUE,
    Goal,
    as_report,
    known_metrics,
)
from raypo.tuning.population import Population, inside
from raypo.tuning.record import NUMBER, POINT

_JUDGED_BY: dict[str, Any] = {"time_attr": STEP, "metric": VALUE, "mode": "max"}
Reports = Sequence[Mapping[str, float]]


class WaitsForScores(TrialScheduler):
    """Scheduler that gets a trial's reports only once they have a score from after an update.

    Without this, asha and median would stop trials by the score of the model that all trials start
    from, or by a missing one.
    """

    is_scored: Callable[[Mapping[str, Any]], bool]
    """Function of a report that returns True if its score is from after the first update."""

    def on_trial_result(self, tune_controller: Any, trial: Trial, result: dict) -> str:
        """Let a trial continue until it has a score."""
        if not self.is_scored(result):
            return self.CONTINUE
        return super().on_trial_result(tune_controller, trial, result)


def waiting_for_scores(scheduler: TrialScheduler, metric: str, every: int) -> TrialScheduler:
    """Make a scheduler of the user's wait for the first evaluation after an update.

    Args:
        scheduler: The scheduler. Its class is changed to one with `WaitsForScores`.
        metric: Metric that it compares.
        every: First step at which held-out metrics are measured after an update.
    """

    def is_scored(result: Mapping[str, Any]) -> bool:
        is_measured = not metric.startswith("eval/") or result.get(STEP, every) >= every
        return is_measured and not math.isnan(result.get(metric, math.nan))

    kind = type(scheduler)
    if not isinstance(scheduler, WaitsForScores):
        scheduler.__class__ = type(kind.__name__, (WaitsForScores, kind), {})
    scheduler.is_scored = is_scored  # pyright: ignore[reportAttributeAccessIssue]
    return scheduler


def _is_scored(report: Mapping[str, Any]) -> bool:
    return report.get(SCORED_STEP, report[STEP]) > 0 and report[VALUE] > UNKNOWN


class _Resuming(WaitsForScores):
    """Scheduler that gets the earlier reports of a resumed trial when the trial is added.

    Without them, asha would take the trial's first new report for that of an earlier step, at which
    it compares the others.
    """

    def __init__(self, past: Mapping[int, Reports], **arguments: Any) -> None:
        super().__init__(**arguments)
        self._past, self.is_scored = past, _is_scored

    def on_trial_add(self, tune_controller: Any, trial: Trial) -> None:
        """Add a trial, and replay its reports of an earlier attempt, if there are any."""
        super().on_trial_add(tune_controller, trial)
        replay(self, trial, self._past.get(trial.config.get(NUMBER, -1), ()))


class _ASHA(_Resuming, ASHAScheduler): ...


class _Median(_Resuming, MedianStoppingRule): ...


def scheduler_of(
    sweep: SweepConfig,
    base: AnyConfig,
    *,
    past: Mapping[int, Reports],
    last_comparison: int = 0,
) -> TrialScheduler:
    """Return the sweep's scheduler, which compares trials by `sweep/value`.

    Args:
        sweep: Config of the sweep.
        base: Run config of a trial.
        past: Reports of an earlier attempt's trials that continue, by number, up to the step from
            which they continue.
        last_comparison: Step of the last pbt comparison of an earlier attempt.
    """
    section = sweep.scheduler
    grace_steps = min(section.grace_steps or base.eval.every, base.num_steps)
    if section.kind == "asha":
        return _ASHA(
            past,
            grace_period=grace_steps,
            max_t=base.num_steps,
            reduction_factor=section.reduction_factor,
            stop_last_trials=False,  # a trial that reaches max_t ends by itself
            **_JUDGED_BY,
        )
    if section.kind == "median":
        return _Median(
            past,
            grace_period=grace_steps,
            min_time_slice=base.num_steps,  # otherwise it pauses trials, and restarts are expensive
            **_JUDGED_BY,
        )
    if section.kind == "pbt":
        from raypo.tuning.search import as_tune  # imports Optuna, which `raypo.Tuner` does not need

        mutations = {
            key: list(domain.values) if domain.is_list else as_tune(domain)
            for key, domain in sweep.space.items()
        }
        return Population(
            every=sweep.perturb_every(base),
            num_steps=base.num_steps,
            seed=sweep.seed,
            last_comparison=last_comparison,
            hyperparam_mutations={POINT: mutations},
            quantile_fraction=section.quantile,
            resample_probability=section.resample,
            custom_explore_fn=partial(inside, sweep.space),
            **_JUDGED_BY,
        )
    return FIFOScheduler()


def reports_of(files: RunFiles, goal: Goal, *, last_step: int) -> list[dict[str, float]]:
    """Reconstruct a trial's reports to Tune from its run's files.

    Args:
        files: The trial's folder.
        goal: Objective of the sweep.
        last_step: Last step reported to Tune. A stopped trial runs one more step.
    """
    reports: list[dict[str, float]] = []
    known: dict[str, float] = {}
    for row in files.metrics():
        if row[STEP] > last_step:
            break
        known = known_metrics([known, row], goal)
        reports.append(as_report(known, goal))
    return reports
