"""Run a slow reward function in a pool of worker processes, with a timeout on every call."""

from __future__ import annotations

import sys
from concurrent.futures import TimeoutError as PoolTimeoutError
from itertools import groupby
from pathlib import Path
from typing import Any

import cloudpickle
from pebble import ProcessExpired, ProcessPool

from raypo.concurrency import fork_context
from raypo.custom.loader import function_name, load_function
from raypo.rewards.by_source import RewardBySource
from raypo.rewards.scoring import RewardFunction, call
from raypo.types import Rollout

_function: RewardFunction | None = None


class PooledReward:
    """Reward function that runs in worker processes. Each call gets the samples of a few prompts.

    If a call times out or its process dies, its samples have no score and the process is
    replaced. An exception of the function is raised again in the calling process.
    """

    def __init__(
        self,
        function: str | RewardFunction,
        *,
        processes: int,
        timeout_s: float | None,
        log: Path | None = None,
    ) -> None:
        """Start the processes; each one imports the function itself.

        Args:
            function: An import path, or a function to be pickled.
            processes: Number of worker processes.
            timeout_s: Time limit of one call, in seconds. None means no limit.
            log: File to which the function's prints are appended.
        """
        self._processes, self._timeout_s = processes, timeout_s
        self._name = function_name(function)
        if log is not None:
            log.parent.mkdir(parents=True, exist_ok=True)
        spec = function if isinstance(function, str) else cloudpickle.dumps(function)
        self._pool = ProcessPool(
            max_workers=processes,
            initializer=_open,
            initargs=(spec, log),
            context=fork_context(__name__),
        )

    def __str__(self) -> str:
        return self._name

    def __call__(self, rollouts: list[Rollout]) -> list[Any]:
        """Return one score per rollout, in order.

        A rollout has an exception in place of a score if its call timed out or its process died.
        """
        cut = list(_pieces(rollouts, self._processes))
        pending = [
            self._pool.schedule(_score, args=(piece,), timeout=self._timeout_s) for piece in cut
        ]
        answers: list[Any] = []
        try:
            for piece, future in zip(cut, pending, strict=True):
                answers += self._answer(piece, future)
        except BaseException:
            for future in pending:
                future.cancel()
            raise
        return answers

    def close(self) -> None:
        """Kill the processes and wait for them."""
        self._pool.stop()
        self._pool.join()

    def _answer(self, piece: list[Rollout], future: Any) -> list[Any]:
        try:
            return future.result()
        except PoolTimeoutError:
            error: Exception = TimeoutError(
                f"{self._name}: no answer in {self._timeout_s:g} s for {len(piece)} rollouts"
            )
        except ProcessExpired as expired:
            error = RuntimeError(
                f"{self._name}: its process died with status {expired.exitcode} over "
                f"{len(piece)} rollouts"
            )
        return [error] * len(piece)


def _pieces(rollouts: list[Rollout], processes: int) -> list[list[Rollout]]:
    """Cut rollouts into about four calls per process, keeping the samples of a prompt together."""
    groups = [list(group) for _, group in groupby(rollouts, key=lambda r: r.group_index)]
    size = -(-len(groups) // (4 * processes))
    return [
        [rollout for group in groups[first : first + size] for rollout in group]
        for first in range(0, len(groups), size)
    ]


def _open(spec: str | bytes, log: Path | None) -> None:
    """Load the function in a process of the pool."""
    global _function
    if log is not None:
        sys.stdout = log.open("a", buffering=1, encoding="utf-8")  # line by line
    _function = load_function(spec) if isinstance(spec, str) else cloudpickle.loads(spec)
    if isinstance(_function, RewardBySource):
        _function.load()  # import before the first call's timeout starts


def _score(rollouts: list[Rollout]) -> list[Any]:
    assert _function is not None
    try:
        return call(_function, rollouts)
    except TimeoutError as error:  # pebble would take it for a timeout of the call
        raise RuntimeError(f"TimeoutError: {error}") from error
