from typing import Any

import pytest

from raypo.config.sweep_config import SweepConfig
from raypo.tuning.record import TrialRecord
from raypo.tuning.search import random_point, searcher_of

SCORE = "eval/score_mean"
SPACE = {
    "ppo.kl.coef": {"loguniform": [1e-3, 1.0]},
    "ppo.num_epochs": {"randint": [1, 5]},
    "ppo.clip_low": {"quniform": [0.1, 0.3, 0.05]},
    "ppo.preset": {"choice": ["grpo", "rloo"]},
}


def sweep_of(**changes: Any) -> SweepConfig:
    return SweepConfig.parse({"name": "s", "base": "base.yaml", "space": SPACE} | changes)


def trial(number: int, point: dict[str, Any], status: Any, **metrics: float) -> TrialRecord:
    return TrialRecord(number, f"s-{number:05d}", point, status, metrics=metrics)


def suggestions(searcher: Any, count: int) -> list[dict[str, Any]]:
    return [searcher.suggest(f"trial {i}") for i in range(count)]


@pytest.mark.parametrize("searcher", ["random", "optuna"])
def test_points_lie_in_the_space_and_are_plain_values(searcher: str):
    for config in suggestions(searcher_of(sweep_of(searcher=searcher)), 20):
        point = config["point"]
        assert 1e-3 <= point["ppo.kl.coef"] <= 1.0
        assert point["ppo.num_epochs"] in (1, 2, 3, 4)
        assert round(point["ppo.clip_low"] / 0.05) * 0.05 == pytest.approx(point["ppo.clip_low"])
        assert 0.0999 <= point["ppo.clip_low"] <= 0.3001
        assert point["ppo.preset"] in ("grpo", "rloo")
        assert {type(value) for value in point.values()} <= {float, int, str}


def test_random_points_depend_on_seed_and_number_alone():
    assert random_point(sweep_of(), 3) == random_point(sweep_of(), 3)
    assert random_point(sweep_of(), 3) != random_point(sweep_of(), 4)
    assert random_point(sweep_of(), 3) != random_point(sweep_of(seed=1), 3)


def test_a_grid_is_handed_out_in_its_order():
    grid = {"seed": {"grid": [0, 1]}, "ppo.gamma": {"grid": [0.9, 1.0]}}
    searcher = searcher_of(sweep_of(searcher="grid", space=grid))
    assert [config["number"] for config in suggestions(searcher, 4)] == [0, 1, 2, 3]
    again = searcher_of(sweep_of(searcher="grid", space=grid))
    points = [config["point"] for config in suggestions(again, 4)]
    assert points[1] == {"seed": 0, "ppo.gamma": 1.0}
    assert points[2] == {"seed": 1, "ppo.gamma": 0.9}


@pytest.mark.parametrize("searcher", ["random", "optuna"])
def test_a_resumed_sweep_first_goes_on_with_what_was_begun(searcher: str):
    sweep = sweep_of(searcher=searcher)
    first = suggestions(searcher_of(sweep), 3)
    ended = [trial(0, first[0]["point"], "finished", **{SCORE: 0.5})]
    begun = [trial(2, first[2]["point"], "interrupted")]
    resumed = suggestions(searcher_of(sweep, ended, begun), 3)
    assert [config["number"] for config in resumed] == [2, 3, 4]
    assert resumed[0]["point"] == pytest.approx(first[2]["point"])


def tell(searcher: Any, score: Any, count: int) -> list[float]:
    """Coefficients in the order in which they were tried."""
    tried = []
    for i in range(count):
        coefficient = searcher.suggest(f"t{i}")["point"]["ppo.kl.coef"]
        searcher.on_trial_complete(f"t{i}", {"step": 1, **score(coefficient)})
        tried.append(coefficient)
    return tried


def test_optuna_comes_to_where_the_score_is_best_and_the_constraint_kept():
    def mean_of_last(**changes: Any) -> float:
        sweep = sweep_of(space={"ppo.kl.coef": {"uniform": [0.0, 1.0]}}, num_samples=40, **changes)
        last = tell(searcher_of(sweep), lambda c: {SCORE: c, "kl/ref_response_mean": c}, 40)[-20:]
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
    tried = tell(searcher_of(sweep, ended), lambda c: {SCORE: -abs(c - 0.2)}, 8)
    assert sum(abs(coefficient - 0.2) < 0.15 for coefficient in tried) >= 6


def test_optuna_takes_several_metrics():
    sweep = sweep_of(metric=[SCORE, "kl/ref_response_mean"], mode=["max", "min"])
    searcher: Any = searcher_of(sweep)
    tell(searcher, lambda c: {SCORE: c, "kl/ref_response_mean": c}, 6)
    assert len(searcher._ot_study.trials) == 6
    assert {len(each.values) for each in searcher._ot_study.trials} == {2}
