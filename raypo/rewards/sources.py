"""The judges outside of models that a config names, opened and closed."""

from __future__ import annotations

from pathlib import Path

from raypo.config import RewardSection
from raypo.rewards.loader import load_function
from raypo.rewards.pool import PooledReward
from raypo.rewards.remote import RemoteReward
from raypo.rewards.scoring import RewardFunction


def open_function(
    section: RewardSection, given: RewardFunction | None, *, log: Path | None = None
) -> RewardFunction | None:
    """The reward function, in processes of its own where `reward.processes` says so.

    Args:
        section: Names the function.
        given: The one that was passed in Python; it wins.
        log: Where what it prints in processes of its own is appended; None: with what they inherit.
    """
    if section.processes and (given or section.function):
        return PooledReward(
            given or section.function or "",
            processes=section.processes,
            timeout_s=section.timeout_s,
            log=log,
        )
    if given is None and section.function:
        return load_function(section.function)
    return given


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
