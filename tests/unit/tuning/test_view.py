import io
from typing import Any

import pytest

from raypo.config.sweep_config import Constraint
from raypo.tuning.goal import SCORED_STEP, Goal
from raypo.tuning.record import TrialRecord
from raypo.tuning.view import SweepView

SCORE, JUDGE, KL = "eval/score_mean", "eval/reward_model_mean", "kl/ref_response_mean"
GOAL = Goal((SCORE,), (1.0,))


def record(number: int, score: float, step: int, status: Any, **point: Any) -> TrialRecord:
    metrics = {SCORE: score, JUDGE: 5.123, KL: 1.234, SCORED_STEP: step}
    values = {key.replace("__", "."): value for key, value in point.items()}
    name = f"a-sweep-of-a-long-name-{number:05d}"
    return TrialRecord(number, name, values, status, step, metrics, 30.0, 60.4)


def printed(records: list[TrialRecord], goal: Goal = GOAL, *, columns: int = 80) -> str:
    stream = io.StringIO()
    view = SweepView(goal, num_trials=3, num_steps=25, device="CPU", stream=stream)
    view._console.width = columns
    view.close(records)
    lines = stream.getvalue().splitlines()
    assert max(map(len, lines)) <= columns
    assert "…" not in stream.getvalue()
    return "\n".join(line.rstrip() for line in lines)


THREE = [
    record(0, 0.722, 25, "finished", ppo__kl__coef=0.3),
    record(1, 0.81, 10, "stopped", ppo__kl__coef=0.001),
    record(2, 0.6, 25, "finished", ppo__kl__coef=0.03),
]


def test_the_table_at_80_columns_has_values_first_and_cuts_nothing():
    table = printed(THREE)
    lines = [" ".join(line.split()) for line in table.splitlines()]
    assert lines[1:3] == [
        "held-out reward",
        "rank kl.coef score at step steps status trial model KL CPU-s",
    ]
    assert lines[4:7] == [
        "1* 0.3 0.722 25 25/25 finished 00000 5.123 1.234 60",
        "2 0.03 0.6 25 25/25 finished 00002 5.123 1.234 60",
        "3 0.001 0.81 10 10/25 stopped 00001 5.123 1.234 60",
    ]


def test_it_says_that_scores_of_different_steps_are_not_compared():
    words = "scores of different steps are not compared"
    assert words in " ".join(printed(THREE).split())
    assert words not in " ".join(printed([THREE[0], THREE[2]]).split())


def test_what_matters_least_is_left_out_where_it_is_too_narrow():
    assert "CPU-s" in printed(THREE, columns=80)
    narrow = printed(THREE, columns=64)
    assert "CPU-s" not in narrow
    for word in ("kl.coef", "0.001", "0.722", "stopped", "00001"):
        assert word in narrow


def test_many_values_share_a_column():
    many = {"learner__policy_lr": 1e-5, "learner__critic_lr": 1.5e-5, "rollout__temperature": 0.7}
    many |= {"ppo__num_epochs": 2, "ppo__clip_low": 0.2, "rollout__samples_per_prompt": 16}
    table = printed([record(0, 0.7, 25, "finished", ppo__kl__coef=0.3, **many)])
    for text in ("kl.coef=0.3", "policy_lr=1e-05", "samples_per_prompt=16", "held-out score"):
        assert text in table


@pytest.mark.parametrize("kl", [0.5, 50.0])
def test_a_trial_that_breaks_a_constraint_is_called_infeasible(kl: float):
    done = record(0, 0.7, 25, "finished", ppo__kl__coef=0.3)
    done.metrics[KL] = kl
    table = printed([done], Goal((SCORE,), (1.0,), (Constraint(KL, "<=", 10.0),)))
    assert ("infeasible" in table) == (kl > 10)


def test_keys_of_the_same_name_keep_their_section():
    both = record(0, 0.7, 25, "finished", rollout__temperature=0.7, eval__temperature=0.0)
    assert "rollout.temperature" in printed([both])
