"""Schedulers, which decide which trials continue, and reports of earlier attempts for them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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
from raypo.tuning.goal import SCORED_STEP, STEP, UNKNOWN, VALUE, Goal, as_report, last_metrics
from raypo.tuning.population import Population, inside

_COMPARED_BY: dict[str, Any] = {"time_attr": STEP, "metric": VALUE, "mode": "max"}
Reports = Sequence[Mapping[str, float]]


class _WaitsForScores(TrialScheduler):
    """Scheduler that gets a trial's reports only once they have a score from after an update.

    Without this, asha and median would stop trials by the score of the model that all trials start
    from, or by a missing one.
    """

    past: Mapping[str, Reports]
    """Reports of earlier attempts by the name of the trial. The scheduler gets them when the trial
    is added. Otherwise asha would take the trial's first new report for that of an earlier step, at
    which it compares the others."""

    def on_trial_add(self, tune_controller: Any, trial: Trial) -> None:
        """Add a trial, and replay its reports of an earlier attempt, if there are any."""
        super().on_trial_add(tune_controller, trial)
        replay(self, trial, self.past.get(str(trial), ()))

    def on_trial_result(self, tune_controller: Any, trial: Trial, result: dict) -> str:
        """Let a trial continue until it has a score."""
        is_updated = result.get(SCORED_STEP, result.get(STEP, 1)) > 0
        if not (is_updated and result.get(self.metric, math.nan) > UNKNOWN):
            return self.CONTINUE
        return super().on_trial_result(tune_controller, trial, result)


def waiting_for_scores(
    scheduler: TrialScheduler, past: Mapping[str, Reports] | None = None
) -> TrialScheduler:
    """Change the class of a scheduler to one that waits for scores from after an update.

    Args:
        scheduler: A scheduler of Ray Tune or of the user.
        past: Reports of trials of an earlier attempt that continue, by the trial's name, up to the
            step from which they continue.
    """
    kind = type(scheduler)
    if not isinstance(scheduler, _WaitsForScores):
        scheduler.__class__ = type(kind.__name__, (_WaitsForScores, kind), {})
    scheduler.past = past or {}  # pyright: ignore[reportAttributeAccessIssue]
    return scheduler


def scheduler_of(
    sweep: SweepConfig,
    base: AnyConfig,
    *,
    past: Mapping[str, Reports],
    last_comparison: int = 0,
) -> TrialScheduler:
    """Return the sweep's scheduler, which compares trials by `sweep/value`.

    Args:
        sweep: Config of the sweep.
        base: Run config of a trial.
        past: Reports for `waiting_for_scores`.
        last_comparison: Step of the last pbt comparison of an earlier attempt.
    """
    section = sweep.scheduler
    grace_steps = min(section.grace_steps or base.eval.every, base.num_steps)
    if section.kind == "asha":
        asha = ASHAScheduler(
            grace_period=grace_steps,
            max_t=base.num_steps,
            reduction_factor=section.reduction_factor,
            stop_last_trials=False,  # a trial that reaches max_t ends by itself
            **_COMPARED_BY,
        )
        return waiting_for_scores(asha, past)
    if section.kind == "median":
        median = MedianStoppingRule(
            grace_period=grace_steps,
            min_time_slice=base.num_steps,  # otherwise it pauses trials, and restarts are expensive
            **_COMPARED_BY,
        )
        return waiting_for_scores(median, past)
    if section.kind == "pbt":
        from raypo.tuning.search import as_tune  # imports Optuna, which `raypo.Tuner` does not need

        return Population(
            every=sweep.perturb_every(base),
            num_steps=base.num_steps,
            seed=sweep.seed,
            last_comparison=last_comparison,
            hyperparam_mutations={
                key: list(domain.values) if domain.is_list else as_tune(domain)
                for key, domain in sweep.space.items()
            },
            quantile_fraction=section.quantile,
            resample_probability=section.resample,
            custom_explore_fn=partial(inside, sweep.space),
            **_COMPARED_BY,
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
    last: dict[str, float] = {}
    for row in files.metrics():
        if row[STEP] > last_step:
            break
        last = last_metrics([last, row], goal)
        reports.append(as_report(last, goal))
    return reports
