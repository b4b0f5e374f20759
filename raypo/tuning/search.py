"""Searchers, which choose the point of the space for each trial."""

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
from ray.tune.search import Searcher

from raypo.config.space import Domain
from raypo.config.sweep_config import SweepConfig
from raypo.tuning.capacity import grid_points
from raypo.tuning.goal import INFEASIBLE, Goal, Metrics
from raypo.tuning.record import NUMBER, POINT, Point, TrialRecord


def listed_space(
    sweep: SweepConfig, ended: Sequence[TrialRecord] = (), begun: Sequence[TrialRecord] = ()
) -> dict[str, Any]:
    """Return the remaining trials as a Tune grid, for searchers that do not depend on results.

    Args:
        sweep: Config of the sweep.
        ended: Trials that an earlier attempt has completed.
        begun: Trials that an earlier attempt has begun but not completed. They come first.
    """
    known = {record.number: record.point for record in begun}
    grid = grid_points(sweep) if sweep.searcher == "grid" else None
    points = {
        number: known.get(number) or (grid[number] if grid else random_point(sweep, number))
        for number in numbers_left(sweep, ended, begun)
    }
    return {
        NUMBER: tune.grid_search(list(points)),
        POINT: tune.sample_from(lambda config: points[config[NUMBER]]),
    }


def numbers_left(
    sweep: SweepConfig, ended: Sequence[TrialRecord], begun: Sequence[TrialRecord]
) -> list[int]:
    """Return the numbers of the trials to run: first the begun trials, then unused numbers."""
    num_left = sweep.num_trials - len(ended)
    used = {record.number for record in (*ended, *begun)}
    unused = [number for number in range(len(used) + num_left) if number not in used]
    return [*(record.number for record in begun), *unused][:num_left]


def random_point(sweep: SweepConfig, number: int) -> Point:
    """Draw a trial's point for the random searcher, from the seed and the trial number only."""
    draw = np.random.RandomState(np.random.SeedSequence((sweep.seed, number)).generate_state(4))
    domains = sorted(sweep.space.items())
    return {key: _plain(as_tune(each).sample(random_state=draw)) for key, each in domains}


def as_tune(domain: Domain) -> Any:
    """Convert a domain to Ray Tune's class."""
    if domain.is_list:
        return tune.choice(list(domain.values))
    if domain.kind == "quniform":  # Tune's quniform requires that the step divides both ends
        return tune.choice(list(domain.steps))
    return getattr(tune, domain.kind)(*domain.values)


def as_optuna(domain: Domain) -> BaseDistribution:
    """Convert a domain to Optuna's class."""
    if domain.is_list:
        return CategoricalDistribution(list(domain.values))
    low, high = domain.values[:2]
    if domain.kind == "randint":
        return IntDistribution(low, high - 1)
    if domain.kind == "quniform":
        return FloatDistribution(low, domain.steps[-1], step=domain.values[2])
    return FloatDistribution(low, high, log=domain.kind == "loguniform")


class OptunaSearcher(Searcher):
    """TPE over the space, with constraints as in Optuna's TPESampler.

    It uses Optuna's ask-and-tell interface, because Ray's OptunaSearch takes no constraints.

    Paper: Watanabe 2023, arXiv:2304.11127.
    """

    def __init__(
        self,
        sweep: SweepConfig,
        ended: Sequence[TrialRecord] = (),
        begun: Sequence[TrialRecord] = (),
    ) -> None:
        """Create a study with the trials of an earlier attempt.

        Args:
            sweep: Config of the sweep.
            ended: Completed trials, from which the study learns.
            begun: Trials that an earlier attempt has begun but not completed. They are suggested
                first.
        """
        super().__init__()
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._goal = Goal.of(sweep)
        self._numbers = numbers_left(sweep, ended, begun)
        self._space = {key: as_optuna(domain) for key, domain in sweep.space.items()}
        self._asked: dict[str, optuna.Trial] = {}
        self.study = optuna.create_study(
            directions=["maximize" if mode == "max" else "minimize" for mode in sweep.mode],
            sampler=optuna.samplers.TPESampler(
                # With the same seed, new trials would repeat the draws of earlier trials.
                seed=sweep.seed + len(ended) + len(begun),
                # Number of random trials before TPE: Optuna's default of 10, but at most half of
                # the sweep.
                n_startup_trials=min(10, max(sweep.num_trials // 2, 1)),
            ),
        )
        for record in ended:
            if values := self._values(record.metrics):
                past = optuna.trial.create_trial(
                    values=values,
                    params=record.point,
                    distributions=self._space,
                    constraints=self._excess(record.metrics) or None,
                )
                self.study.add_trial(past)
        for record in begun:
            self.study.enqueue_trial(record.point)

    def suggest(self, trial_id: str) -> dict[str, Any]:
        """Return number and point of the next trial."""
        self._asked[trial_id] = trial = self.study.ask(self._space)
        point = {key: _plain(value) for key, value in trial.params.items()}
        return {NUMBER: self._numbers.pop(0), POINT: point}

    def on_trial_complete(
        self, trial_id: str, result: dict | None = None, error: bool = False
    ) -> None:
        """Report a trial's metrics and its violation of each constraint to Optuna."""
        trial, values = self._asked.pop(trial_id), self._values(result or {})
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

    def _values(self, known: Metrics) -> list[float]:
        """Return the value of each metric. If one is unknown, the list is empty."""
        values = [known.get(name, math.nan) for name in self._goal.metrics]
        return [] if any(map(math.isnan, values)) else values

    def _excess(self, known: Metrics) -> dict[str, float]:
        return {
            str(each): min(excess, -INFEASIBLE)
            for each, excess in zip(self._goal.constraints, self._goal.excess(known), strict=True)
        }


def _plain(value: Any) -> Any:
    """Convert a NumPy scalar to a Python one, for YAML."""
    return value.item() if isinstance(value, np.generic) else value
