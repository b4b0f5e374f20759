"""Searcher for sweep files. It chooses the name and the point of each trial."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from ray import tune
from ray.tune.experiment import Trial
from ray.tune.search import Searcher

from raypo.config.space import Domain
from raypo.config.sweep_config import SweepConfig
from raypo.tuning.capacity import grid_points, trial_name
from raypo.tuning.goal import INFEASIBLE, Goal, Metrics
from raypo.tuning.record import Point, TrialRecord
from raypo.tuning.trial import plain


def random_point(sweep: SweepConfig, index: int) -> Point:
    """Draw a trial's point for the random searcher, from the seed and the trial number only."""
    generator = np.random.RandomState(np.random.SeedSequence((sweep.seed, index)).generate_state(4))
    values = {
        key: as_tune(d).sample(random_state=generator) for key, d in sorted(sweep.space.items())
    }
    return {key: plain(value) for key, value in values.items()}


def as_tune(domain: Domain) -> Any:
    """Convert a domain to Ray Tune's class."""
    if domain.is_list:
        return tune.choice(list(domain.values))
    return getattr(tune, domain.kind)(*domain.values)


def as_optuna(domain: Domain) -> BaseDistribution:
    """Convert a domain to Optuna's class."""
    if domain.is_list:
        return CategoricalDistribution(list(domain.values))
    low, high = domain.values
    if domain.kind == "randint":
        return IntDistribution(low, high - 1)
    return FloatDistribution(low, high, log=domain.kind == "loguniform")


class SweepSearcher(Searcher):
    """Searcher for grids, random points, and Optuna's TPE with constraints.

    It first suggests the unfinished trials of an earlier attempt. TPE uses Optuna's
    ask-and-tell interface, because Ray's OptunaSearch takes no constraints.

    Paper: Watanabe 2023, arXiv:2304.11127.
    """

    def __init__(self, sweep: SweepConfig, records: Sequence[TrialRecord] = ()) -> None:
        """Plan the remaining trials.

        Args:
            sweep: Config of the sweep.
            records: Trials of earlier attempts. TPE learns from the ended trials.
        """
        super().__init__()
        self._goal = Goal.of(sweep)
        ended_records = [record for record in records if record.has_ended]
        self.num_trials = max(sweep.num_trials - len(ended_records), 0)
        """Number of remaining trials."""
        names = [trial_name(sweep.name, index) for index in range(len(records) + self.num_trials)]
        points: list[Point] = []
        if sweep.searcher == "grid":
            points = grid_points(sweep)
        elif sweep.searcher == "random":
            points = [random_point(sweep, index) for index in range(len(names))]
        unfinished = {record.name: record.point for record in records if not record.has_ended}
        self._points = dict(zip(names, points, strict=False)) | unfinished
        recorded_names = {record.name for record in records}
        self._remaining_names = [
            *unfinished,
            *(name for name in names if name not in recorded_names),
        ]
        self._names_by_id: dict[str, str] = {}
        self._optuna_trials: dict[str, optuna.Trial] = {}
        self.study: optuna.Study | None = None
        if sweep.searcher != "optuna":
            return
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._space = {key: as_optuna(domain) for key, domain in sweep.space.items()}
        self.study = optuna.create_study(
            directions=["maximize" if mode == "max" else "minimize" for mode in sweep.mode],
            sampler=optuna.samplers.TPESampler(
                # With the same seed, new trials would repeat the draws of earlier trials.
                seed=sweep.seed + len(records),
                # Number of random trials before TPE: Optuna's default of 10, but at most half of
                # the sweep.
                n_startup_trials=min(10, max(sweep.num_trials // 2, 1)),
            ),
        )
        for record in ended_records:
            if values := self._values(record.metrics):
                past_trial = optuna.trial.create_trial(
                    values=values,
                    params=record.point,
                    distributions=self._space,
                    constraints=self._excess(record.metrics) or None,
                )
                self.study.add_trial(past_trial)

    def name_of(self, trial: Trial) -> str:
        """Return the name of a suggested trial."""
        return self._names_by_id[trial.trial_id]

    def suggest(self, trial_id: str) -> Point:
        """Return the point of the next trial."""
        name = self._names_by_id[trial_id] = self._remaining_names.pop(0)
        point = self._points.get(name)
        if self.study is None:
            assert point is not None
            return point
        if point is not None:
            self.study.enqueue_trial(point)
        self._optuna_trials[trial_id] = trial = self.study.ask(self._space)
        return point or trial.params

    def on_trial_complete(
        self, trial_id: str, result: dict | None = None, error: bool = False
    ) -> None:
        """Report a trial's metrics and its violation of each constraint to Optuna."""
        if self.study is None:
            return
        trial, values = self._optuna_trials.pop(trial_id), self._values(result or {})
        if not values:
            self.study.tell(trial, state=optuna.trial.TrialState.FAIL)
            return
        for name, excess in self._excess(result or {}).items():
            trial.set_constraint(name, excess)
        self.study.tell(trial, values)

    def save(self, checkpoint_path: str) -> None:
        """Do nothing: a sweep resumes from its own records."""

    def restore(self, checkpoint_path: str) -> None:
        """Do nothing: `save` stores nothing."""

    def _values(self, metrics: Metrics) -> list[float]:
        """Return the value of each metric, or an empty list if a value is unknown."""
        values = [metrics.get(name, math.nan) for name in self._goal.metrics]
        return [] if any(map(math.isnan, values)) else values

    def _excess(self, metrics: Metrics) -> dict[str, float]:
        """Return the violation of each constraint as a finite number."""
        excess = self._goal.excess(metrics)
        return {name: min(value, -INFEASIBLE) for name, value in excess.items()}
