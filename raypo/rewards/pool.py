"""Run a slow reward function in a pool of worker processes, with a timeout on every call.

Only bytes and texts leave the processes: an object of a class that the calling process cannot
import would break the pool.
"""

from __future__ import annotations

import pickle
import sys
import traceback
from collections.abc import Mapping
from concurrent.futures import TimeoutError as PoolTimeoutError
from itertools import groupby
from pathlib import Path
from typing import Any

import cloudpickle
from pebble import ProcessExpired, ProcessPool

from raypo.concurrency import fork_context
from raypo.custom.errors import text_of, user_frames
from raypo.custom.loader import function_name, load_function
from raypo.rewards.by_source import RewardBySource
from raypo.rewards.scoring import RewardError, RewardFunction, call
from raypo.types import Rollout

_function: RewardFunction | None = None


class PooledReward:
    """Reward function that runs in worker processes. Each call gets the samples of a few prompts.

    If a call times out or its process dies, its samples have no score and the process is
    replaced. An exception of the function is raised in the calling process, by its name and text.
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
            answers, failure = future.result()
        except PoolTimeoutError:
            error: Exception = TimeoutError(
                f"{self._name}: no answer in {self._timeout_s:g} s for {len(piece)} rollouts"
            )
        except ProcessExpired as expired:
            error = RuntimeError(
                f"{self._name}: its process died with status {expired.exitcode} over "
                f"{len(piece)} rollouts"
            )
        else:
            if failure is None:
                return pickle.loads(answers)
            name, text, frames, trace = failure
            kind = RewardError if name == RewardError.__name__ else type(name, (Exception,), {})
            raised = kind(text)
            raised.user_frames = frames
            raise raised from RuntimeError(trace)
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


def _score(rollouts: list[Rollout]) -> tuple[bytes, tuple[str, str, str, str] | None]:
    """Call the function in a process of the pool.

    Returns:
        The pickled scores; and the name, text, user's frames and whole traceback of the function's
        exception, or None.
    """
    assert _function is not None
    try:
        return cloudpickle.dumps(list(map(_plain, call(_function, rollouts)))), None
    except Exception as error:
        frames, trace = user_frames(error), traceback.format_exc()
        return b"", (type(error).__name__, text_of(error), frames, trace)


def _plain(answer: Any) -> Any:
    """Replace exceptions in a score, whose classes the calling process may be unable to import."""
    if isinstance(answer, Exception):
        return RuntimeError(text_of(answer) or type(answer).__name__)
    if isinstance(answer, Mapping):
        return {key: _plain(part) for key, part in answer.items()}
    return answer
