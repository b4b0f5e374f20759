import math
from types import SimpleNamespace
from typing import Any

import pytest

from raypo.config.sweep_config import SweepConfig
from raypo.tuning.record import TrialRecord
from raypo.tuning.search import SweepSearcher

SCORE = "eval/score_mean"
SPACE = {
    "ppo.kl.coef": {"loguniform": [1e-3, 1.0]},
    "ppo.num_epochs": {"randint": [1, 5]},
    "ppo.gamma": {"uniform": [0.9, 1.0]},
    "ppo.preset": {"choice": ["grpo", "rloo"]},
}


def sweep_of(**changes: Any) -> SweepConfig:
    return SweepConfig.parse({"name": "s", "base": "base.yaml", "space": SPACE} | changes)


def trial(number: int, point: dict[str, Any], status: Any, **metrics: float) -> TrialRecord:
    return TrialRecord(f"s-{number:05d}", point, status, metrics=metrics)


def trials_of(sweep: SweepConfig, *records: TrialRecord) -> dict[int, dict[str, Any]]:
    """Return the points of the remaining trials by number, in their order."""
    searcher = SweepSearcher(sweep, records)
    points: dict[int, dict[str, Any]] = {}
    for row in range(searcher.num_trials):
        suggested: Any = SimpleNamespace(trial_id=f"trial {row}")
        point = searcher.suggest(suggested.trial_id)
        points[int(searcher.name_of(suggested).removeprefix("s-"))] = point
    return points


@pytest.mark.parametrize("searcher", ["random", "optuna"])
def test_points_lie_in_the_space_and_are_plain_values(searcher: str):
    points = list(trials_of(sweep_of(searcher=searcher, num_samples=30)).values())
    assert {point["ppo.num_epochs"] for point in points} == {1, 2, 3, 4}
    assert {point["ppo.preset"] for point in points} == {"grpo", "rloo"}
    assert all(0.9 <= point["ppo.gamma"] <= 1.0 for point in points)
    coefs = [point["ppo.kl.coef"] for point in points]
    assert min(coefs) >= 1e-3
    assert max(coefs) <= 1.0
    assert -2.2 < sum(map(math.log10, coefs)) / 30 < -0.8, "uniform in the logarithm"
    assert {type(value) for point in points for value in point.values()} <= {float, int, str}


def test_a_grid_is_handed_out_in_its_order():
    grid = {"seed": {"grid": [0, 1]}, "ppo.gamma": {"grid": [0.9, 1.0]}}
    points = trials_of(sweep_of(searcher="grid", space=grid))
    assert list(points) == [0, 1, 2, 3]
    assert points[1] == {"seed": 0, "ppo.gamma": 1.0}
    assert points[2] == {"seed": 1, "ppo.gamma": 0.9}


@pytest.mark.parametrize("searcher", ["random", "optuna"])
def test_the_same_seed_gives_the_same_trials(searcher: str):
    first = trials_of(sweep_of(searcher=searcher, num_samples=3))
    assert trials_of(sweep_of(searcher=searcher, num_samples=3)) == first
    assert trials_of(sweep_of(searcher=searcher, num_samples=3, seed=1)) != first


@pytest.mark.parametrize("searcher", ["random", "optuna"])
def test_a_resumed_sweep_first_goes_on_with_what_was_begun(searcher: str):
    sweep = sweep_of(searcher=searcher, num_samples=4)
    first = trials_of(sweep)
    ended = trial(0, first[0], "finished", **{SCORE: 0.5})
    resumed = trials_of(sweep, ended, trial(2, first[2], "interrupted"))
    assert list(resumed) == [2, 1, 3]
    assert resumed[2] == first[2]
    if searcher == "random":  # the others are those of a sweep that was never stopped
        assert resumed == {number: first[number] for number in (2, 1, 3)}


@pytest.mark.parametrize("searcher", ["random", "optuna"])
def test_a_sweep_resumed_before_any_trial_has_ended_repeats_no_point(searcher: str):
    sweep = sweep_of(searcher=searcher, num_samples=6)
    first = trials_of(sweep)
    begun = [trial(number, first[number], "interrupted") for number in (0, 1)]
    resumed = trials_of(sweep, *begun)
    assert list(resumed) == [0, 1, 2, 3, 4, 5]
    assert len({point["ppo.kl.coef"] for point in resumed.values()}) == 6


@pytest.mark.parametrize("searcher", ["random", "optuna"])
def test_more_trials_for_a_finished_sweep_are_new_ones(searcher: str):
    first = trials_of(sweep_of(searcher=searcher, num_samples=2))
    ended = [trial(number, first[number], "finished", **{SCORE: 0.5}) for number in first]
    more = trials_of(sweep_of(searcher=searcher, num_samples=4), *ended)
    assert list(more) == [2, 3]
    assert len({point["ppo.kl.coef"] for point in (first | more).values()}) == 4


def tell(searcher: SweepSearcher, score: Any, count: int) -> list[float]:
    """Return the coefficients in the order in which they were tried."""
    tried = []
    for row in range(count):
        coefficient = searcher.suggest(f"t{row}")["ppo.kl.coef"]
        searcher.on_trial_complete(f"t{row}", {"step": 1, **score(coefficient)})
        tried.append(coefficient)
    return tried


def test_optuna_comes_to_where_the_score_is_best_and_the_constraint_kept():
    def mean_of_last(**changes: Any) -> float:
        sweep = sweep_of(space={"ppo.kl.coef": {"uniform": [0.0, 1.0]}}, num_samples=40, **changes)
        last = tell(SweepSearcher(sweep), lambda c: {SCORE: c, "kl/ref_response_mean": c}, 40)[-20:]
        return sum(last) / len(last)

    assert mean_of_last() > 0.8  # the larger, the better
    assert 0.4 < mean_of_last(constraint="kl/ref_response_mean <= 0.5") < 0.6


def test_optuna_learns_from_the_trials_of_an_earlier_attempt():
    space = {"ppo.kl.coef": {"uniform": [0.0, 1.0]}}
    sweep = sweep_of(space=space, num_samples=40)
    ended = [
        trial(i, {"ppo.kl.coef": i / 30}, "finished", **{SCORE: -abs(i / 30 - 0.2)})
        for i in range(30)
    ]
    tried = tell(SweepSearcher(sweep, ended), lambda c: {SCORE: -abs(c - 0.2)}, 8)
    assert sum(abs(coefficient - 0.2) < 0.15 for coefficient in tried) >= 6


def test_optuna_is_not_told_of_trials_without_a_score():
    searcher = SweepSearcher(sweep_of())
    assert searcher.study is not None
    for name, result in (("a", None), ("b", {"step": 1}), ("c", {SCORE: float("nan")})):
        searcher.suggest(name)
        searcher.on_trial_complete(name, result, error=result is None)
    assert [asked.state.name for asked in searcher.study.trials] == ["FAIL"] * 3


def test_optuna_takes_several_metrics():
    sweep = sweep_of(metric=[SCORE, "kl/ref_response_mean"], mode=["max", "min"])
    searcher = SweepSearcher(sweep)
    assert searcher.study is not None
    tell(searcher, lambda c: {SCORE: c, "kl/ref_response_mean": c}, 6)
    assert len(searcher.study.trials) == 6
    assert {len(asked.values) for asked in searcher.study.trials} == {2}
