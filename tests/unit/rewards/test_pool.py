"""A pooled reward function moves with each piece, whichever is scored first."""

import time
from concurrent.futures import Future
from typing import Any

import pytest

from raypo import pending_work
from raypo.concurrency import daemon_future
from raypo.pending_work import at_work
from raypo.rewards import pool
from raypo.rewards.pool import PooledReward
from tests.rollouts import plain_rollout


class Pool:
    def __init__(self, *_: Any, **__: Any) -> None:
        self.futures: list[Future[Any]] = []

    def submit(self, *_: Any) -> Future[Any]:
        self.futures.append(Future())
        return self.futures[-1]

    def result(self, future: Future[Any]) -> Any:
        return future.result()


def test_the_work_moves_with_a_piece_that_is_not_the_first(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pool, "UserCodePool", Pool)
    reward = PooledReward("reward.py:score", processes=1, timeout_s=None)
    rollouts = [plain_rollout(group_index=index) for index in range(2)]

    def score() -> list[Any]:
        with at_work("the rewards"):
            return reward(rollouts)

    answer = daemon_future(score, name="test")
    futures = reward._pool.futures  # pyright: ignore
    while len(futures) < 2:
        time.sleep(0.01)
    time.sleep(0.3)
    daemon_future(lambda: futures[1].set_result([2.0]), name="test").result()
    (work,) = [work for work in pending_work.pending() if work.name == "the rewards"]
    assert work.idle_s < 0.3
    futures[0].set_result([1.0])
    assert answer.result() == [1.0, 2.0]
