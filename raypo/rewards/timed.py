"""A reward function in the worker itself: one call at a time, with a limit on each."""

from __future__ import annotations

import threading
from concurrent.futures import Future, wait
from typing import Any

from raypo.rewards.scoring import RewardError, RewardFunction, call, function_name
from raypo.types import Rollout


class OneAtATime:
    """A reward function of this process; while one of them works, the others wait.

    Rollouts of several batches are judged beside each other, and held-out ones beside them, but
    nobody who writes a reward function thinks of threads.
    """

    _turn = threading.Lock()

    def __init__(self, function: RewardFunction) -> None:
        self.function = function

    def __str__(self) -> str:
        return function_name(self.function)

    def __call__(self, rollouts: list[Rollout]) -> list[Any]:
        """What the function answers."""
        with self._turn:
            return call(self.function, rollouts)


class TimedReward:
    """A reward function whose calls run in a thread that nobody waits for longer than a while.

    A thread cannot be ended, so a call that hangs stops the run.
    """

    def __init__(
        self, function: RewardFunction, *, timeout_s: float, key: str = "reward.timeout_s"
    ) -> None:
        """Only note them.

        Args:
            function: Judges rollouts.
            timeout_s: Seconds that one call may take.
            key: The config key that says so, for messages.
        """
        self._function, self._timeout_s, self._key = function, timeout_s, key

    def __str__(self) -> str:
        return function_name(self._function)

    def __call__(self, rollouts: list[Rollout]) -> list[Any]:
        """What the function answers.

        Raises:
            RewardError: there was no answer in time.
            Exception: whatever the function raises.
        """
        answer: Future[list[Any]] = Future()

        def ask() -> None:
            try:
                answer.set_result(call(self._function, rollouts))
            except BaseException as error:
                answer.set_exception(error)

        threading.Thread(target=ask, name="raypo-reward", daemon=True).start()
        if not wait([answer], self._timeout_s).done:
            raise RewardError(
                f"{self._key} ({self._timeout_s:g}): {self} gave no answer in time for "
                f"{len(rollouts)} rollouts. Find what it waits for, or give it more time. In "
                "training, with reward.processes, a call is ended and its samples count as failed."
            )
        return answer.result()
