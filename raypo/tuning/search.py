"""Searchers: which point of the space the next trial tries."""

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
from raypo.tuning.record import TrialRecord

Point = dict[str, Any]
"""Dotted key of the run config -> the value that a trial tries."""
NUMBER, POINT = "number", "point"
"""Keys of a trial's Tune config."""


def listed_space(
    sweep: SweepConfig, ended: Sequence[TrialRecord] = (), begun: Sequence[TrialRecord] = ()
) -> dict[str, Any]:
    """All trials that are left as a grid of Tune's own: they do not depend on results.

    Args:
        ended: Trials of an earlier attempt that are done.
        begun: Those that are not: they come first.
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
    """Numbers of the trials to run: first of those that were begun, then the lowest unused ones."""
    num_left = sweep.num_trials - len(ended)
    used = {record.number for record in (*ended, *begun)}
    unused = [number for number in range(len(used) + num_left) if number not in used]
    return [*(record.number for record in begun), *unused][:num_left]


def random_point(sweep: SweepConfig, number: int) -> Point:
    """The point of a trial of the random searcher; it depends on seed and number alone."""
    draw = np.random.RandomState(np.random.SeedSequence((sweep.seed, number)).generate_state(4))
    domains = sorted(sweep.space.items())
    return {key: _plain(as_tune(each).sample(random_state=draw)) for key, each in domains}


def as_tune(domain: Domain) -> Any:
    """A domain as Tune's, which knows a step of a range only where it divides both ends."""
    if domain.is_list:
        return tune.choice(list(domain.values))
    if domain.kind == "quniform":
        return tune.choice(list(domain.steps))
    return getattr(tune, domain.kind)(*domain.values)


def as_optuna(domain: Domain) -> BaseDistribution:
    """A domain as Optuna's."""
    if domain.is_list:
        return CategoricalDistribution(list(domain.values))
    low, high = domain.values[:2]
    if domain.kind == "randint":
        return IntDistribution(low, high - 1)
    if domain.kind == "quniform":
        return FloatDistribution(low, domain.steps[-1], step=domain.values[2])
    return FloatDistribution(low, high, log=domain.kind == "loguniform")


class OptunaSearcher(Searcher):
    """TPE over the space, which learns also from which trials break a constraint.

    It asks and tells an Optuna study itself: Ray's OptunaSearch takes no constraints.

    Paper: Watanabe 2023, arXiv:2304.11127; constraints as in Optuna's TPESampler.
    """

    def __init__(
        self,
        sweep: SweepConfig,
        ended: Sequence[TrialRecord] = (),
        begun: Sequence[TrialRecord] = (),
    ) -> None:
        """A study that knows the trials of an earlier attempt.

        Args:
            ended: Those that are done: it learns from them.
            begun: Those that are not: they come first.
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
                # Or new trials would repeat the draws of earlier ones.
                seed=sweep.seed + len(ended) + len(begun),
                # Trials before TPE begins: Optuna's usual 10, but at most half of a small sweep.
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
        """Number and point of the next trial."""
        self._asked[trial_id] = trial = self.study.ask(self._space)
        point = {key: _plain(value) for key, value in trial.params.items()}
        return {NUMBER: self._numbers.pop(0), POINT: point}

    def on_trial_complete(
        self, trial_id: str, result: dict | None = None, error: bool = False
    ) -> None:
        """Tell Optuna what a trial came to, and by how much it broke each constraint."""
        trial, values = self._asked.pop(trial_id), self._values(result or {})
        if not values:
            self.study.tell(trial, state=optuna.trial.TrialState.FAIL)
            return
        for name, excess in self._excess(result or {}).items():
            trial.set_constraint(name, excess)
        self.study.tell(trial, values)

    def save(self, checkpoint_path: str) -> None:
        """Nothing to keep: the sweep's own record is all that a resumed sweep reads."""

    def restore(self, checkpoint_path: str) -> None:
        """Nothing was kept."""

    def _values(self, known: Metrics) -> list[float]:
        """The value of each metric; none where one is not known."""
        values = [known.get(name, math.nan) for name in self._goal.metrics]
        return [] if any(map(math.isnan, values)) else values

    def _excess(self, known: Metrics) -> dict[str, float]:
        return {
            str(each): min(excess, -INFEASIBLE)
            for each, excess in zip(self._goal.constraints, self._goal.excess(known), strict=True)
        }


def _plain(value: Any) -> Any:
    """NumPy's numbers as Python's, which go into YAML."""
    return value.item() if isinstance(value, np.generic) else value
