from typing import Any

import pytest

from raypo.config.sweep_config import SweepConfig
from raypo.tuning.record import TrialRecord
from raypo.tuning.search import OptunaSearcher, listed_space, random_point

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


def trials_of(
    sweep: SweepConfig, ended: list[TrialRecord] | None = None, begun: Any = ()
) -> list[dict[str, Any]]:
    """Number and point of each trial, in their order."""
    if sweep.searcher == "optuna":
        searcher = OptunaSearcher(sweep, ended or [], begun)
        return [searcher.suggest(f"trial {i}") for i in range(sweep.num_trials - len(ended or []))]
    space = listed_space(sweep, ended or [], begun)
    numbers = space["number"]["grid_search"]
    return [
        {"number": each, "point": space["point"].sample(config={"number": each})}
        for each in numbers
    ]


@pytest.mark.parametrize("searcher", ["random", "optuna"])
def test_points_lie_in_the_space_and_are_plain_values(searcher: str):
    for config in trials_of(sweep_of(searcher=searcher, num_samples=20)):
        point = config["point"]
        assert 1e-3 <= point["ppo.kl.coef"] <= 1.0
        assert point["ppo.num_epochs"] in (1, 2, 3, 4)
        assert round(point["ppo.clip_low"] / 0.05) * 0.05 == pytest.approx(point["ppo.clip_low"])
        assert 0.0999 <= point["ppo.clip_low"] <= 0.3001
        assert point["ppo.preset"] in ("grpo", "rloo")
        assert {type(value) for value in point.values()} <= {float, int, str}


def test_a_step_that_divides_no_end_means_the_same_to_all_searchers():
    sweep = sweep_of(space={"ppo.clip_low": {"quniform": [0.1, 0.5, 0.15]}}, num_samples=30)
    for searcher in ("random", "optuna"):
        trials = trials_of(sweep.model_copy(update={"searcher": searcher}))
        drawn = {round(each["point"]["ppo.clip_low"], 6) for each in trials}
        assert drawn == {0.1, 0.25, 0.4}


def test_random_points_depend_on_seed_and_number_alone():
    assert random_point(sweep_of(), 3) == random_point(sweep_of(), 3)
    assert random_point(sweep_of(), 3) != random_point(sweep_of(), 4)
    assert random_point(sweep_of(), 3) != random_point(sweep_of(seed=1), 3)


def test_a_grid_is_handed_out_in_its_order():
    grid = {"seed": {"grid": [0, 1]}, "ppo.gamma": {"grid": [0.9, 1.0]}}
    trials = trials_of(sweep_of(searcher="grid", space=grid))
    assert [config["number"] for config in trials] == [0, 1, 2, 3]
    assert trials[1]["point"] == {"seed": 0, "ppo.gamma": 1.0}
    assert trials[2]["point"] == {"seed": 1, "ppo.gamma": 0.9}


@pytest.mark.parametrize("searcher", ["random", "optuna"])
def test_the_same_seed_gives_the_same_trials(searcher: str):
    first = trials_of(sweep_of(searcher=searcher, num_samples=3))
    assert trials_of(sweep_of(searcher=searcher, num_samples=3)) == first
    assert trials_of(sweep_of(searcher=searcher, num_samples=3, seed=1)) != first


@pytest.mark.parametrize("searcher", ["random", "optuna"])
def test_a_resumed_sweep_first_goes_on_with_what_was_begun(searcher: str):
    sweep = sweep_of(searcher=searcher, num_samples=4)
    first = trials_of(sweep)
    ended = [trial(0, first[0]["point"], "finished", **{SCORE: 0.5})]
    begun = [trial(2, first[2]["point"], "interrupted")]
    resumed = trials_of(sweep, ended, begun)
    assert [config["number"] for config in resumed] == [2, 1, 3]
    assert resumed[0]["point"] == pytest.approx(first[2]["point"])


@pytest.mark.parametrize("searcher", ["random", "optuna"])
def test_a_sweep_resumed_before_any_trial_has_ended_repeats_no_point(searcher: str):
    sweep = sweep_of(searcher=searcher, num_samples=6)
    first = trials_of(sweep)
    begun = [trial(number, first[number]["point"], "interrupted") for number in (0, 1)]
    resumed = trials_of(sweep, [], begun)
    assert [config["number"] for config in resumed] == [0, 1, 2, 3, 4, 5]
    assert len({config["point"]["ppo.kl.coef"] for config in resumed}) == 6


@pytest.mark.parametrize("searcher", ["random", "optuna"])
def test_more_trials_for_a_finished_sweep_are_new_ones(searcher: str):
    first = trials_of(sweep_of(searcher=searcher, num_samples=2))
    ended = [trial(t["number"], t["point"], "finished", **{SCORE: 0.5}) for t in first]
    more = trials_of(sweep_of(searcher=searcher, num_samples=4), ended)
    assert [config["number"] for config in more] == [2, 3]
    coefs = {config["point"]["ppo.kl.coef"] for config in (*first, *more)}
    assert len(coefs) == 4


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
        last = tell(OptunaSearcher(sweep), lambda c: {SCORE: c, "kl/ref_response_mean": c}, 40)[
            -20:
        ]
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
    tried = tell(OptunaSearcher(sweep, ended), lambda c: {SCORE: -abs(c - 0.2)}, 8)
    assert sum(abs(coefficient - 0.2) < 0.15 for coefficient in tried) >= 6


def test_optuna_is_not_told_of_trials_without_a_score():
    searcher = OptunaSearcher(sweep_of())
    for name, result in (("a", None), ("b", {"step": 1}), ("c", {SCORE: float("nan")})):
        searcher.suggest(name)
        searcher.on_trial_complete(name, result, error=result is None)
    assert [each.state.name for each in searcher.study.trials] == ["FAIL"] * 3


def test_optuna_takes_several_metrics():
    sweep = sweep_of(metric=[SCORE, "kl/ref_response_mean"], mode=["max", "min"])
    searcher = OptunaSearcher(sweep)
    tell(searcher, lambda c: {SCORE: c, "kl/ref_response_mean": c}, 6)
    assert len(searcher.study.trials) == 6
    assert {len(each.values) for each in searcher.study.trials} == {2}
