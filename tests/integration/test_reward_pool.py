"""Reward functions in processes of their own: slow, hanging, dying and raising ones."""

import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from raypo.rewards.pool import PooledReward
from raypo.rewards.scoring import RewardError, first_reason, score
from raypo.types import Rollout
from tests.rollouts import plain_rollout

SOURCE = """
import os, time

def number(rollouts):
    return [float(r.response) for r in rollouts]

def process(rollouts):
    time.sleep(0.05)
    return [float(os.getpid())] * len(rollouts)

def mixed(rollouts):
    for r in rollouts:
        if r.response == "2":
            time.sleep(60)
        if r.response == "4":
            os._exit(7)
    return number(rollouts)

def broken(rollouts):
    raise KeyError("no such label")

def short(rollouts):
    return [1.0]

def refused(rollouts):
    raise TimeoutError("the socket timed out")

class ApiDown(Exception):
    def __init__(self, *, status):
        super().__init__(f"status {status}")

def raises_own(rollouts):
    raise ApiDown(status=503)

def returns_own(rollouts):
    return [ApiDown(status=503), {"score": ApiDown(status=504)}]
"""


def rollout(number: int, group: int) -> Rollout:
    return plain_rollout(
        response=str(number),
        prompt_index=group,
        sample_index=number % 2,
        group_index=group,
    )


ROLLOUTS = [rollout(number, number // 2) for number in range(12)]


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "reward.py").write_text(SOURCE)
    return f"{tmp_path}/reward.py"


@contextmanager
def pool(function: Any, **settings: Any) -> Iterator[PooledReward]:
    made = PooledReward(function, **({"processes": 2, "timeout_s": None} | settings))
    try:
        yield made
    finally:
        made.close()


def test_scores_are_in_order_and_come_from_other_processes(file: str):
    with pool(f"{file}:number") as reward:
        expected = [float(number) for number in range(12)]
        assert score(reward, ROLLOUTS) == expected
    with pool(f"{file}:process") as reward:
        pids = score(reward, ROLLOUTS)
    assert os.getpid() not in pids
    assert pids[::2] == pids[1::2]  # the samples of a prompt are judged together


def test_a_function_of_python_may_be_passed():
    offset = 3.0
    with pool(lambda rollouts: [offset] * len(rollouts), processes=1) as reward:
        assert score(reward, ROLLOUTS) == [3.0] * 12


def test_calls_that_hang_or_die_cost_their_own_samples_alone(file: str):
    with pool(f"{file}:mixed", timeout_s=1.0) as reward:
        started = time.monotonic()
        scores = score(reward, ROLLOUTS)
        assert time.monotonic() - started < 50  # the sleep is 60 s
        failed = [place for place, value in enumerate(scores) if math.isnan(value)]
        assert failed == [2, 3, 4, 5]
    assert "reward.py:mixed: no answer in 1 s for 2 rollouts" in (first_reason(scores) or "")


def test_a_time_out_of_the_function_itself_is_an_error_of_its_own(file: str):
    told = "raised TimeoutError: the socket timed out"
    with (
        pool(f"{file}:refused", processes=1, timeout_s=60.0) as reward,
        pytest.raises(RewardError, match=told),
    ):
        score(reward, ROLLOUTS)


def test_what_the_function_raises_is_told_whole(file: str):
    with pool(f"{file}:broken", processes=1) as reward, pytest.raises(RewardError) as caught:
        score(reward, ROLLOUTS)
    assert "reward.py:broken raised KeyError: 'no such label'" in str(caught.value)
    cause = caught.value.__cause__
    assert cause is not None
    assert "in broken" in str(cause.__cause__)  # the traceback over there


def test_an_exception_of_a_class_of_the_file_does_not_break_the_pool(file: str):
    with (
        pool(f"{file}:raises_own", processes=1, timeout_s=60.0) as reward,
        pytest.raises(RewardError, match="raised ApiDown: status 503"),
    ):
        score(reward, ROLLOUTS)
    with pool(f"{file}:returns_own", processes=1, timeout_s=60.0) as reward:
        assert [first_reason([each]) for each in score(reward, ROLLOUTS[:2])] == [
            "status 503",
            "status 504",
        ]


def test_a_file_that_cannot_be_imported_is_an_error_of_each_call(file: str):
    with pool(f"{file}:gone") as reward:
        for _ in range(2):
            with pytest.raises(RewardError, match=r"reward\.py defines no gone"):
                score(reward, ROLLOUTS[:4])


def test_a_wrong_number_of_scores_is_told(file: str):
    with pool(f"{file}:short", processes=1) as reward, pytest.raises(RewardError) as caught:
        score(reward, ROLLOUTS[:4])
    assert "returned 1 scores for 2 rollouts" in str(caught.value)
