"""Searchers: which point of the space the next trial tries."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
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
from ray.tune.search.optuna import OptunaSearch

from raypo.config.space import Domain
from raypo.config.sweep_config import SweepConfig
from raypo.tuning.capacity import grid_points
from raypo.tuning.goal import INFEASIBLE, Goal
from raypo.tuning.record import TrialRecord

Point = dict[str, Any]
"""Dotted key of the run config -> the value that a trial tries."""
NUMBER, POINT = "number", "point"
"""Keys of a trial's Tune config."""


def searcher_of(
    sweep: SweepConfig, ended: Sequence[TrialRecord] = (), begun: Sequence[TrialRecord] = ()
) -> Searcher:
    """The sweep's searcher.

    Args:
        ended: Trials of an earlier attempt that are done: the searcher learns from them.
        begun: Those that are not: they come first.
    """
    if sweep.searcher == "optuna":
        return _Optuna(sweep, ended, begun)
    return _Listed(sweep, ended, begun)


def listed_space(
    sweep: SweepConfig, ended: Sequence[TrialRecord] = (), begun: Sequence[TrialRecord] = ()
) -> dict[str, Any]:
    """All trials that are left as Tune's own grid: pbt allows no searcher beside it."""
    searcher = _Listed(sweep, ended, begun)
    points = {}
    for _ in range(sweep.num_trials - len(ended)):
        suggested = searcher.suggest("")
        points[suggested[NUMBER]] = suggested[POINT]
    return {
        NUMBER: tune.grid_search(list(points)),
        POINT: tune.sample_from(lambda config: points[config[NUMBER]]),
    }


def random_point(sweep: SweepConfig, number: int) -> Point:
    """The point of a trial of the random searcher; it depends on seed and number alone."""
    draw = np.random.RandomState(np.random.SeedSequence((sweep.seed, number)).generate_state(4))
    return {key: _plain(as_tune(each).sample(random_state=draw)) for key, each in _items(sweep)}


def as_tune(domain: Domain) -> Any:
    """A domain as Tune's."""
    if domain.is_list:
        return tune.choice(list(domain.values))
    return getattr(tune, domain.kind)(*domain.values)


def as_optuna(domain: Domain) -> BaseDistribution:
    """A domain as Optuna's."""
    if domain.is_list:
        return CategoricalDistribution(list(domain.values))
    low, high = domain.values[:2]
    if domain.kind == "randint":
        return IntDistribution(low, high - 1)
    if domain.kind == "quniform":
        return FloatDistribution(low, high, step=domain.values[2])
    return FloatDistribution(low, high, log=domain.kind == "loguniform")


class _Numbers:
    """Trial numbers: first of what was begun, then those that were never used."""

    def __init__(self, ended: Sequence[TrialRecord], begun: Sequence[TrialRecord]) -> None:
        self._begun = [record.number for record in begun]
        self._next = 1 + max((record.number for record in (*ended, *begun)), default=-1)

    def take(self) -> int:
        """The next number."""
        if self._begun:
            return self._begun.pop(0)
        self._next += 1
        return self._next - 1


class _Listed(Searcher):
    """Points that do not depend on results: a grid, or random ones."""

    def __init__(
        self, sweep: SweepConfig, ended: Sequence[TrialRecord], begun: Sequence[TrialRecord]
    ) -> None:
        super().__init__()
        self._sweep, self._numbers = sweep, _Numbers(ended, begun)
        self._points = {record.number: record.point for record in begun}

    def suggest(self, trial_id: str) -> dict[str, Any]:
        """Number and point of the next trial."""
        number = self._numbers.take()
        return {NUMBER: number, POINT: self._points.get(number) or self._point(number)}

    def on_trial_complete(
        self, trial_id: str, result: dict | None = None, error: bool = False
    ) -> None:
        """Nothing to learn."""

    def save(self, checkpoint_path: str) -> None:
        """Nothing to keep: the sweep's own record is all that a resumed sweep reads."""

    def restore(self, checkpoint_path: str) -> None:
        """Nothing was kept."""

    def _point(self, number: int) -> Point:
        if self._sweep.searcher == "grid":
            return grid_points(self._sweep)[number]
        return random_point(self._sweep, number)


class _Optuna(OptunaSearch):
    """TPE over the space, which learns also from which trials break a constraint.

    Paper: Watanabe 2023, arXiv:2304.11127; constraints as in Optuna's TPESampler.
    """

    def __init__(
        self, sweep: SweepConfig, ended: Sequence[TrialRecord], begun: Sequence[TrialRecord]
    ) -> None:
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        logging.getLogger("ray.tune.search.optuna").setLevel(logging.ERROR)
        self._goal, self._numbers = Goal.of(sweep), _Numbers(ended, begun)
        space = {key: as_optuna(domain) for key, domain in sweep.domains.items()}
        many = len(sweep.metric) > 1
        super().__init__(
            space=space,
            metric=list(sweep.metric) if many else sweep.metric[0],
            mode=list(sweep.mode) if many else sweep.mode[0],
            points_to_evaluate=[record.point for record in begun],
            sampler=optuna.samplers.TPESampler(
                seed=sweep.seed + len(ended),  # or new trials would repeat the first ones' draws
                n_startup_trials=_num_random(sweep),
            ),
        )
        for record in ended:
            self._tell_past(record, space)

    def suggest(self, trial_id: str) -> dict[str, Any] | None:
        """Number and point of the next trial."""
        point = super().suggest(trial_id)
        if point is None:
            return None
        plain = {key: _plain(value) for key, value in point.items()}
        return {NUMBER: self._numbers.take(), POINT: plain}

    def on_trial_result(self, trial_id: str, result: dict) -> None:
        """Only a trial's last result counts."""

    def on_trial_complete(
        self, trial_id: str, result: dict | None = None, error: bool = False
    ) -> None:
        """Tell Optuna what a trial came to, and by how much it broke each constraint."""
        for name, excess in self._excess(result or {}).items():
            self._ot_trials[trial_id].set_constraint(name, excess)
        super().on_trial_complete(trial_id, result, error)

    def _tell_past(self, record: TrialRecord, space: dict[str, BaseDistribution]) -> None:
        metrics = [self.metric] if isinstance(self.metric, str) else list(self.metric or ())
        if not all(name in record.metrics for name in metrics):
            return
        past = optuna.trial.create_trial(
            values=[record.metrics[name] for name in metrics],
            params=record.point,
            distributions=space,
            constraints=self._excess(record.metrics) or None,
        )
        assert self._ot_study is not None
        self._ot_study.add_trial(past)

    def _excess(self, known: Mapping[str, float]) -> dict[str, float]:
        return {
            name: min(excess, -INFEASIBLE)
            for name, excess in zip(self._goal.constraints, self._goal.excess(known), strict=True)
        }


def _num_random(sweep: SweepConfig) -> int:
    """Trials before TPE begins: Optuna's usual 10, but at most half of a small sweep."""
    return min(10, max(sweep.num_trials // 2, 1))


def _items(sweep: SweepConfig) -> list[tuple[str, Domain]]:
    return sorted(sweep.domains.items())


def _plain(value: Any) -> Any:
    """NumPy's numbers as Python's, which go into YAML."""
    return value.item() if isinstance(value, np.generic) else value
