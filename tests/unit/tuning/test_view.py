from typing import Any

import pytest

from raypo.config.sweep_config import Constraint
from raypo.tuning.goal import SCORED_STEP, Goal
from raypo.tuning.record import TrialRecord
from raypo.tuning.view import trial_table

SCORE, JUDGE, KL = "eval/score_mean", "eval/reward_model_mean", "kl/ref_response_mean"
GOAL = Goal((SCORE,), (1.0,))


def record(number: int, score: float, step: int, status: Any, **point: Any) -> TrialRecord:
    metrics = {SCORE: score, JUDGE: 5.123, KL: 1.234, SCORED_STEP: step}
    values = {key.replace("__", "."): value for key, value in point.items()}
    name = f"a-sweep-of-a-long-name-{number:05d}"
    return TrialRecord(name, values, status, step, metrics, 30.0, 60.4)


def table_of(records: list[TrialRecord], goal: Goal = GOAL, *, width: int = 200) -> list[str]:
    table = trial_table(records, goal, num_steps=25, device="CPU", width=width)
    return [" ".join(line.split()) for line in table.splitlines()]


THREE = [
    record(0, 0.722, 25, "finished", ppo__kl__coef=0.3),
    record(1, 0.81, 10, "stopped", ppo__kl__coef=0.001),
    record(2, 0.6, 25, "finished", ppo__kl__coef=0.03),
]


def test_the_table_ranks_trials_and_has_values_first():
    lines = table_of(THREE)
    assert lines[:4] == [
        "rank kl.coef held-out score at step steps status trial reward model KL CPU-s",
        "1* 0.3 0.722 25 25/25 finished 00000 5.123 1.234 60",
        "2 0.03 0.6 25 25/25 finished 00002 5.123 1.234 60",
        "3 0.001 0.81 10 10/25 stopped 00001 5.123 1.234 60",
    ]
    assert lines[4].endswith("scores of different steps are not compared.")
    assert len(table_of([THREE[0], THREE[2]])) == 3, "of the same step"


def test_a_table_that_is_too_wide_is_cut_into_blocks_of_columns():
    many = {f"ppo__key_{number}": number * 1e-5 for number in range(9)}
    table = trial_table(
        [record(0, 0.7, 25, "finished", **many)], GOAL, num_steps=25, device="CPU", width=80
    )
    assert max(map(len, table.splitlines())) <= 80
    for text in ("key_8", "8e-05", "held-out score", "0.7", "CPU-s"):
        assert text in table


@pytest.mark.parametrize("kl", [0.5, 50.0])
def test_a_trial_that_breaks_a_constraint_is_called_infeasible(kl: float):
    done = record(0, 0.7, 25, "finished", ppo__kl__coef=0.3)
    done.metrics[KL] = kl
    table = table_of([done], Goal((SCORE,), (1.0,), (Constraint(KL, "<=", 10.0),)))
    assert ("infeasible" in table[1]) == (kl > 10)


def test_keys_of_the_same_name_keep_their_section():
    both = record(0, 0.7, 25, "finished", rollout__temperature=0.7, eval__temperature=0.0)
    assert "rollout.temperature" in table_of([both])[0]
