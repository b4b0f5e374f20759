"""Schedulers: which trials go on, and what those of an earlier attempt came to."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from ray.tune.schedulers import (
    ASHAScheduler,
    FIFOScheduler,
    MedianStoppingRule,
    PopulationBasedTraining,
    TrialScheduler,
)

from raypo.config import PPOConfig
from raypo.config.space import Domain
from raypo.config.sweep_config import SweepConfig
from raypo.storage.run_files import RunFiles
from raypo.tuning.goal import STEP, VALUE, Goal, as_report, known_metrics
from raypo.tuning.population import take_along
from raypo.tuning.search import POINT, as_tune

logger = logging.getLogger(__name__)

_JUDGED_BY: dict[str, Any] = {"time_attr": STEP, "metric": VALUE, "mode": "max"}


def scheduler_of(sweep: SweepConfig, base: PPOConfig, *, storage_path: str) -> TrialScheduler:
    """The sweep's scheduler; it judges by `sweep/value`, in which infeasible is below feasible.

    Args:
        storage_path: Of the trials' runs.
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
        return Population(
            base.num_steps,
            storage_path,
            perturbation_interval=sweep.perturb_every(base),
            hyperparam_mutations={POINT: {k: _mutation(d) for k, d in sweep.domains.items()}},
            quantile_fraction=section.quantile,
            resample_probability=section.resample,
            custom_explore_fn=partial(inside, sweep.domains),
            log_config=False,
            **_JUDGED_BY,
        )
    return FIFOScheduler()


class Population(PopulationBasedTraining):
    """Ray Tune's, for trials that all run at the same time."""

    def __init__(self, num_steps: int, storage_path: str, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._num_steps, self._storage_path = num_steps, storage_path

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict) -> str:
        """A trial that has come to its end is left alone, and none makes way for another."""
        if result[STEP] >= self._num_steps:
            return self.CONTINUE
        decision = super().on_trial_result(tune_controller, trial, result)
        return self.CONTINUE if decision == self.PAUSE else decision

    def _exploit(self, tune_controller: Any, trial: Any, trial_to_clone: Any) -> None:
        """Take the checkpoint along now; where it is gone, the trial goes on as it is."""
        pointer = self._trial_state[trial_to_clone].last_checkpoint
        try:
            take_along(RunFiles(self._storage_path, str(trial)), pointer)
        except OSError as error:
            logger.warning("%s is not copied into %s: %s", trial_to_clone, trial, error)
            return
        super()._exploit(tune_controller, trial, trial_to_clone)


def inside(domains: Mapping[str, Domain], config: dict[str, Any]) -> dict[str, Any]:
    """A Tune config whose perturbed values are brought back into their domains."""
    point = {key: domains[key].nearest(value) for key, value in config[POINT].items()}
    return {**config, POINT: point}


def _mutation(domain: Domain) -> Any:
    return list(domain.values) if domain.is_list else as_tune(domain)


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


class PastTrial:
    """Stands for a trial of an earlier attempt; schedulers ask for no more than its id."""

    def __init__(self, name: str) -> None:
        self.trial_id = name


class _Controller:
    @staticmethod
    def get_live_trials() -> list[Any]:
        return []


def tell_past(scheduler: TrialScheduler, past: Mapping[str, Iterable[Mapping[str, float]]]) -> None:
    """What trials of an earlier attempt reported, so that new ones are compared with them too.

    Args:
        past: Name of each trial that has ended -> its reports in order.
    """
    controller: Any = _Controller()
    for name, reports in past.items():
        trial: Any = PastTrial(name)
        scheduler.on_trial_add(controller, trial)
        last: Mapping[str, float] = {}
        for last in reports:
            scheduler.on_trial_result(controller, trial, dict(last))
            # The median rule would refuse to hear more of one that it stops; told in another
            # order than it happened, it may stop one that went on.
            getattr(scheduler, "_stopped_trials", set()).discard(trial)
        scheduler.on_trial_complete(controller, trial, dict(last))
