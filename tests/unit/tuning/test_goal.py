import math

import pytest

from raypo.config import ConfigError, PPOConfig
from raypo.config.sweep_config import SweepConfig
from raypo.tuning.goal import (
    INFEASIBLE,
    SCORED_STEP,
    UNKNOWN,
    Goal,
    check_metrics,
    last_metrics,
    scored_step,
)

SCORE, KL = "eval/score_mean", "kl/ref_response_mean"


def goal(**changes: object) -> Goal:
    space = {"ppo.gamma": {"choice": [0.9, 1.0]}}
    return Goal.of(SweepConfig.parse({"name": "s", "base": "b", "space": space} | changes))


def test_infeasible_trials_rank_below_all_feasible_ones_and_unknown_ones_last():
    bounded = goal(constraint="kl/ref_response_mean <= 10")
    trials = [
        {SCORE: 0.9, KL: 30.0},
        {SCORE: 0.1, KL: 1.0},
        {},
        {SCORE: 0.8, KL: 11.0},
        {SCORE: 0.2, KL: 10.0},
    ]
    assert bounded.ranks(trials) == [4, 2, 5, 3, 1]
    values = [bounded.value(trial) for trial in trials]
    assert values == [INFEASIBLE - 20.0, 0.1, UNKNOWN, INFEASIBLE - 1.0, 0.2]


def test_a_metric_that_was_never_measured_breaks_its_constraint():
    bounded = goal(constraint="kl/ref_response_mean <= 10")
    assert bounded.broken({SCORE: 1.0})
    assert bounded.value({SCORE: 1.0}) == UNKNOWN
    assert goal().value({SCORE: math.nan}) == UNKNOWN


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"metric": "eval/score_men"},
            r"metric \(eval/score_men\): .* Did you mean eval/score_mean",
        ),
        (
            {"constraint": "kl/ref_respons_mean <= 10"},
            r"constraint \(kl/ref_respons_mean\): .* Did you mean kl/ref_response_mean\?",
        ),
    ],
)
def test_names_that_no_trial_can_log_are_refused(changes: dict[str, str], told: str):
    space = {"ppo.gamma": {"choice": [0.9, 1.0]}}
    sweep = SweepConfig.parse({"name": "s", "base": "b", "space": space} | changes)
    run = {"name": "b", "model": {"policy": "p"}, "data": {"prompts": "d"}}
    with pytest.raises(ConfigError, match=told):
        check_metrics(sweep, PPOConfig.parse(run))
    check_metrics(sweep, PPOConfig.parse(run | {"callbacks": ["mine.py:adds_a_metric"]}))


def test_several_metrics_have_a_pareto_front():
    both = goal(metric=[SCORE, KL], mode=["max", "min"])
    trials = [
        {SCORE: 0.9, KL: 9.0},  # best score
        {SCORE: 0.5, KL: 1.0},  # least KL
        {SCORE: 0.5, KL: 2.0},  # beaten by the second
        {SCORE: 0.4, KL: 3.0},  # beaten by the third
    ]
    assert both.front(trials) == {0, 1}
    assert both.ranks(trials) == [1, 2, 3, 4]
    bounded = goal(metric=[SCORE, KL], mode=["max", "min"], constraint=f"{KL} <= 5")
    assert bounded.front(trials) == {1}
    assert goal().front(trials) == {0}


def test_the_last_known_value_of_each_metric_counts():
    rows = [
        {"step": 1, "eval/initial_score_mean": 0.2, KL: 0.1},
        {"step": 2, "eval/score_mean": 0.6, KL: 0.2},
        {"step": 3, KL: 0.3},
    ]
    assert last_metrics(rows[:1], goal())[SCORE] == 0.2
    last = last_metrics(rows, goal())
    assert (last["step"], last[SCORE], last[KL]) == (3, 0.6, 0.3)
    assert last_metrics([last_metrics(rows[:2], goal()), rows[2]], goal()) == last


def test_the_step_that_a_score_is_of_is_known():
    rows = [{"step": 1, "eval/initial_score_mean": 0.2, KL: 0.1}, {"step": 2, SCORE: 0.6, KL: 0.2}]
    last = [last_metrics([*rows, {"step": 3}][:count], goal()) for count in (1, 2, 3)]
    assert [scored_step(metrics) for metrics in last] == [0, 2, 2]
    assert scored_step(last_metrics(rows, goal(metric=KL, mode="min"))) == 2


def test_scores_of_different_steps_are_not_compared():
    """Asha stopped the second one at step 2 of 4, where its score was the highest of all."""
    trials = [
        {SCORE: 0.5, SCORED_STEP: 4},
        {SCORE: 0.9, SCORED_STEP: 2},
        {SCORE: 0.6, SCORED_STEP: 4},
        {SCORE: 0.7, SCORED_STEP: 2},
    ]
    assert goal().ranks(trials) == [2, 3, 1, 4]
    assert goal().front(trials) == {2}


def test_a_pareto_front_is_of_trials_that_came_as_far():
    """KL grows with the steps: one that was stopped at once has little of it."""
    both = goal(metric=[SCORE, KL], mode=["max", "min"])
    trials = [
        {SCORE: 0.5, KL: 1.0, SCORED_STEP: 4},
        {SCORE: 0.4, KL: 0.1, SCORED_STEP: 2},
        {SCORE: 0.6, KL: 2.0, SCORED_STEP: 4},
        {SCORE: 0.4, KL: 3.0, SCORED_STEP: 4},
    ]
    assert both.front(trials) == {0, 2}
    assert both.ranks(trials) == [2, 4, 1, 3]


def test_one_that_was_stopped_but_keeps_the_constraint_is_before_one_that_breaks_it():
    bounded = goal(constraint=f"{KL} <= 10")
    trials = [{SCORE: 0.9, KL: 30.0, SCORED_STEP: 4}, {SCORE: 0.1, KL: 1.0, SCORED_STEP: 2}]
    assert bounded.ranks(trials) == [2, 1]
