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
from raypo.tuning.population import Population, clamp_to_domains

_COMPARISON_ARGUMENTS: dict[str, Any] = {"time_attr": STEP, "metric": VALUE, "mode": "max"}
Reports = Sequence[Mapping[str, float]]


class _ScoreGate(TrialScheduler):
    """Scheduler that ignores a trial's reports until it has a score measured after an update.

    Otherwise asha and median would stop trials by a missing score, or by the score of the initial
    model, which is the same for all trials.
    """

    past: Mapping[str, Reports]
    """Reports of earlier attempts, by trial name. They are replayed when the trial is added.
    Otherwise asha would compare the trial's first new report with reports of an earlier step."""

    def on_trial_add(self, tune_controller: Any, trial: Trial) -> None:
        """Add a trial, and replay its reports of an earlier attempt, if there are any."""
        super().on_trial_add(tune_controller, trial)
        replay(self, trial, self.past.get(str(trial), ()))

    def on_trial_result(self, tune_controller: Any, trial: Trial, result: dict) -> str:
        """Let a trial continue until it has a score measured after an update."""
        is_updated = result.get(SCORED_STEP, result.get(STEP, 1)) > 0
        if not (is_updated and result.get(self.metric, math.nan) > UNKNOWN):
            return self.CONTINUE
        return super().on_trial_result(tune_controller, trial, result)


def with_score_gate(
    scheduler: TrialScheduler, past: Mapping[str, Reports] | None = None
) -> TrialScheduler:
    """Make a scheduler ignore a trial's reports until it has a score measured after an update.

    Args:
        scheduler: A scheduler of Ray Tune or of the user.
        past: Reports of an earlier attempt for the trials that continue, by trial name, up to the
            step at which each trial resumes.
    """
    kind = type(scheduler)
    if not isinstance(scheduler, _ScoreGate):
        scheduler.__class__ = type(kind.__name__, (_ScoreGate, kind), {})
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
        past: Reports for `with_score_gate`.
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
            **_COMPARISON_ARGUMENTS,
        )
        return with_score_gate(asha, past)
    if section.kind == "median":
        median = MedianStoppingRule(
            grace_period=grace_steps,
            min_time_slice=base.num_steps,  # otherwise it pauses trials, and restarts are expensive
            **_COMPARISON_ARGUMENTS,
        )
        return with_score_gate(median, past)
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
            custom_explore_fn=partial(clamp_to_domains, sweep.space),
            **_COMPARISON_ARGUMENTS,
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
    metrics: dict[str, float] = {}
    for row in files.metrics():
        if row[STEP] > last_step:
            break
        metrics = last_metrics([metrics, row], goal)
        reports.append(as_report(metrics, goal))
    return reports
