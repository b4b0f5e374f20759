"""Schedulers: which trials go on, and what those of an earlier attempt came to."""

from __future__ import annotations

from functools import partial
from typing import Any

from ray.tune.schedulers import (
    ASHAScheduler,
    FIFOScheduler,
    MedianStoppingRule,
    TrialScheduler,
)

from raypo.config import AnyConfig
from raypo.config.sweep_config import SweepConfig
from raypo.storage.run_files import RunFiles
from raypo.tuning.goal import STEP, VALUE, Goal, as_report, known_metrics
from raypo.tuning.population import Population, inside
from raypo.tuning.search import POINT, as_tune

_JUDGED_BY: dict[str, Any] = {"time_attr": STEP, "metric": VALUE, "mode": "max"}


def scheduler_of(
    sweep: SweepConfig, base: AnyConfig, *, last_comparison: int = 0
) -> TrialScheduler:
    """The sweep's scheduler; it judges by `sweep/value`, in which infeasible is below feasible.

    Args:
        last_comparison: Of pbt: step of the last one that an earlier attempt has made.
    """
    section = sweep.scheduler
    grace_steps = min(section.grace_steps or base.eval.every, base.num_steps)
    if section.kind == "asha":
        return ASHAScheduler(
            grace_period=grace_steps,
            max_t=base.num_steps,
            reduction_factor=section.reduction_factor,
            stop_last_trials=False,  # who comes to the end ends by itself
            **_JUDGED_BY,
        )
    if section.kind == "median":
        return MedianStoppingRule(
            grace_period=grace_steps,
            min_time_slice=base.num_steps,  # else it pauses trials, and each start is dear
            **_JUDGED_BY,
        )
    if section.kind == "pbt":
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
    """What a trial's run has reported to Tune, from its own files.

    Args:
        last_step: That Tune was told of; one that it stops makes one step more.
    """
    reports: list[dict[str, float]] = []
    known: dict[str, float] = {}
    for row in files.metrics():
        if row[STEP] > last_step:
            break
        known = known_metrics([known, row], goal)
        reports.append(as_report(known, goal))
    return reports
