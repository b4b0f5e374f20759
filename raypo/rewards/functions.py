"""Open and close the reward functions and reward servers of a config, with their limits."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from concurrent.futures import wait
from pathlib import Path
from typing import Any

from raypo.concurrency import daemon_future
from raypo.config import EvalSection, RewardSection, functions_of
from raypo.custom.loader import function_name, load_function
from raypo.rewards.by_source import RewardBySource
from raypo.rewards.judge import Judge
from raypo.rewards.pool import PooledReward
from raypo.rewards.scoring import RewardError, RewardFunction, call
from raypo.rewards.wire import TOKEN_VARIABLE
from raypo.types import Rollout


class OneAtATime:
    """Reward function that runs in this process, one call at a time.

    All instances share a lock. Batches of training and of evaluation may be scored concurrently,
    and thanks to the lock, reward functions need not be thread-safe.
    """

    _turn = threading.Lock()

    def __init__(self, function: RewardFunction) -> None:
        self.function = function

    def __str__(self) -> str:
        return function_name(self.function)

    def __call__(self, rollouts: list[Rollout]) -> list[Any]:
        """Call the function with the lock held and return its scores."""
        with self._turn:
            return call(self.function, rollouts)


class TimedReward:
    """Reward function with a timeout on each call, which runs in a daemon thread.

    A thread cannot be killed, so a call that times out ends the run.
    """

    def __init__(
        self, function: RewardFunction, *, timeout_s: float, key: str = "reward.timeout_s"
    ) -> None:
        """Limit each call to `timeout_s` seconds; `key` is the config key of this limit."""
        self._function, self._timeout_s, self._key = function, timeout_s, key

    def __str__(self) -> str:
        return function_name(self._function)

    def __call__(self, rollouts: list[Rollout]) -> list[Any]:
        """Call the function in a thread and return its scores.

        Raises:
            RewardError: the call timed out.
            Exception: any error of the function.
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
    reward_fn: RewardFunction | None,
    by_source: Mapping[str, str],
    *,
    log: Path | None = None,
) -> RewardFunction | None:
    """Return the reward function with its timeout, in worker processes if `processes` is set.

    Args:
        section: Section of the config that names the function and its limits.
        reward_fn: A function passed in Python. It takes precedence over `section.function`.
        by_source: Import paths of the functions of single sources, by the source's name. For its
            source, such a function takes precedence over both.
        log: File to which the worker processes append what the function prints.

    Returns:
        The function, or None if none is configured.
    """
    function = reward_fn or section.function
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
    """Return the function that scores evaluations.

    A response is scored by the function of its source, else by `eval.function`, else by
    `otherwise`.
    """
    function = load_function(section.function, key="eval.function") if section.function else None
    by_source = functions_of(section.prompts)
    if by_source:
        common = function or otherwise
        common = common.function if isinstance(common, OneAtATime) else common  # one lock is enough
        function = RewardBySource(by_source, common, key="eval.prompts.function")
        function.load()
    if function is None:
        return otherwise
    return _in_this_process(function, section.timeout_s, "eval.timeout_s")


def _in_this_process(function: RewardFunction, timeout_s: float | None, key: str) -> RewardFunction:
    """Apply the timeout inside the lock, so that the wait for the lock does not count."""
    if timeout_s is not None:
        function = TimedReward(function, timeout_s=timeout_s, key=key)
    return OneAtATime(function)


def open_servers(section: RewardSection) -> dict[str, RewardFunction]:
    """Return the reward functions of `reward.url` and `reward.judge.url`, as `url` and `judge`."""
    judge = section.judge if section.judge and section.judge.url else None
    if section.url is None and judge is None:
        return {}
    # These modules need packages of the extra serve.
    from raypo.rewards.judge_servers import JudgeServers
    from raypo.rewards.remote import JsonServers, RemoteReward

    request, opened = section.request, dict[str, RewardFunction]()
    limits = request.model_dump(exclude={"batch_size"})
    if section.url is not None:
        servers = JsonServers(section.url, token=os.environ.get(TOKEN_VARIABLE), **limits)
        opened["url"] = RemoteReward(servers, batch_size=request.batch_size)
    if judge is not None:
        path = "chat/completions" if judge.chat else "completions"
        servers = JsonServers(
            [f"{url.rstrip('/')}/{path}" for url in judge.url or ()],
            token=os.environ.get(judge.api_key_variable),
            **limits,
        )
        ask = JudgeServers(judge, servers)
        opened["judge"] = Judge(judge, ask, max_attempts=request.max_attempts)
    return opened


def close_function(function: RewardFunction | None) -> None:
    """Stop the function's worker processes, if it has any."""
    if isinstance(function, PooledReward):
        function.close()
