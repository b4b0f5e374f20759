"""The functions and servers that judge by a config: opened, with their limits, and closed."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import wait
from pathlib import Path
from typing import Any

from raypo.concurrency import daemon_future
from raypo.config import EvalSection, RewardSection, functions_of
from raypo.custom.loader import function_name, load_function
from raypo.rewards.by_source import RewardBySource
from raypo.rewards.pool import PooledReward
from raypo.rewards.remote import RemoteReward
from raypo.rewards.scoring import RewardError, RewardFunction, call
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
    """A reward function with a limit on every call, which runs in a thread.

    A thread cannot be ended, so a call that hangs stops the run.
    """

    def __init__(
        self, function: RewardFunction, *, timeout_s: float, key: str = "reward.timeout_s"
    ) -> None:
        """Calls may take `timeout_s` seconds, which the config key `key` says."""
        self._function, self._timeout_s, self._key = function, timeout_s, key

    def __str__(self) -> str:
        return function_name(self._function)

    def __call__(self, rollouts: list[Rollout]) -> list[Any]:
        """The function's answer.

        Raises:
            RewardError: there was none in time.
            Exception: whatever the function raises.
        """
        answer = daemon_future(lambda: call(self._function, rollouts), name="raypo-reward")
        if not wait([answer], self._timeout_s).done:
            raise RewardError(
                f"{self._key} ({self._timeout_s:g}): {self} gave no answer in time for "
                f"{len(rollouts)} rollouts. Find what it waits for, or give it more time. In "
                "training, with reward.processes, a call is ended and its samples count as failed."
            )
        return answer.result()


def open_function(
    section: RewardSection,
    given: RewardFunction | None,
    by_source: Mapping[str, str],
    *,
    log: Path | None = None,
) -> RewardFunction | None:
    """The reward function with a limit on its calls, in processes of its own where that is set.

    Args:
        section: Names the function.
        given: The one that was passed in Python; it wins.
        by_source: Name of a source -> the import path of its own function, which wins over both.
        log: A file that what it prints in its processes is appended to.
    """
    function = given or section.function
    if by_source:
        function = RewardBySource(by_source, function)
        if not section.processes:
            function.load()
    if section.processes and function:
        return PooledReward(
            function,
            processes=section.processes,
            timeout_s=section.timeout_s,
            log=log,
        )
    function = load_function(function) if isinstance(function, str) else function
    return function and _in_this_process(function, section.timeout_s, "reward.timeout_s")


def evaluation_function(
    section: EvalSection, otherwise: RewardFunction | None
) -> RewardFunction | None:
    """What judges held-out answers: functions of sources, `eval.function`, or `otherwise`."""
    own = load_function(section.function, key="eval.function") if section.function else None
    by_source = functions_of(section.prompts)
    if by_source:
        common = own or otherwise
        common = common.function if isinstance(common, OneAtATime) else common  # all have one turn
        own = RewardBySource(by_source, common, key="eval.prompts.function")
        own.load()
    if own is None:
        return otherwise
    return _in_this_process(own, section.timeout_s, "eval.timeout_s")


def _in_this_process(function: RewardFunction, timeout_s: float | None, key: str) -> RewardFunction:
    """The time that it waits for its turn does not count."""
    if timeout_s is not None:
        function = TimedReward(function, timeout_s=timeout_s, key=key)
    return OneAtATime(function)


def open_remote(section: RewardSection) -> RemoteReward | None:
    """A function that asks the servers of `reward.url`; None without any."""
    if section.url is None:
        return None
    request = section.request
    return RemoteReward(
        section.url,
        batch_size=request.batch_size,
        max_concurrent=request.max_concurrent,
        timeout_s=request.timeout_s,
        max_attempts=request.max_attempts,
    )


def close_function(function: RewardFunction | None) -> None:
    """End a function's processes, if it has any."""
    if isinstance(function, PooledReward):
        function.close()
