"""The judges outside of models that a config names, opened and closed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from raypo.config import EvalSection, RewardSection, functions_of
from raypo.rewards.by_source import RewardBySource
from raypo.rewards.loader import load_function
from raypo.rewards.pool import PooledReward
from raypo.rewards.remote import RemoteReward
from raypo.rewards.scoring import RewardFunction
from raypo.rewards.timed import OneAtATime, TimedReward


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
        by_source: Names of sources with functions of their own, which win over both.
        log: Where what it prints in processes of its own is appended; None: with what they inherit.
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
    """What judges answers to held-out prompts; None: nobody, or the other judges.

    Args:
        section: Names the function, and those of its sources.
        otherwise: What judges where `eval.function` is null.
    """
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
    """A function that asks the servers of `reward.url`; None without one."""
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
