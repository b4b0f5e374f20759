"""Run a slow reward function in a pool of worker processes, with a timeout on every call."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from raypo.concurrency import in_this_context
from raypo.custom.errors import text_of
from raypo.custom.loader import function_name, load_function
from raypo.custom.process_pool import CallTimeout, ProcessDied, UserCodePool
from raypo.pending_work import moved
from raypo.rewards.by_source import RewardBySource
from raypo.rewards.scoring import RewardError, RewardFunction, call
from raypo.types import Rollout


class PooledReward:
    """Reward function that runs in worker processes. Each call gets the samples of a few prompts.

    If a call times out or its process dies, its samples have no score. An exception of the function
    is raised in the calling process, by its name and text.
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
        self._processes, self._name = processes, function_name(function)
        self._pool = UserCodePool(
            partial(_load, function),
            module=__name__,
            processes=processes,
            timeout_s=timeout_s,
            log=log,
        )

    def __str__(self) -> str:
        return self._name

    def __call__(self, rollouts: list[Rollout]) -> list[Any]:
        """Return one score per rollout, in order.

        A rollout has an exception in place of a score if its call timed out or its process died.
        """
        pieces = list(_pieces(rollouts, self._processes))
        futures = [self._pool.submit(_scores, piece) for piece in pieces]
        note_moved = in_this_context(_note_moved)  # the pool's thread calls it
        for future in futures:
            future.add_done_callback(note_moved)
        scores: list[Any] = []
        try:
            for piece, future in zip(pieces, futures, strict=True):
                try:
                    answer = self._pool.result(future)
                except (CallTimeout, ProcessDied) as error:
                    message = f"{self._name}: {error} for {len(piece)} rollouts"
                    answer = [type(error)(message)] * len(piece)
                if isinstance(answer, RewardError):
                    raise answer
                scores += answer
        except BaseException:
            for future in futures:
                future.cancel()
            raise
        return scores

    def close(self) -> None:
        """Kill the processes and wait for them."""
        self._pool.close()


def _note_moved(_: Future[Any]) -> None:
    moved()


def _pieces(rollouts: list[Rollout], processes: int) -> list[list[Rollout]]:
    """Cut rollouts into about four calls per process, keeping the samples of a prompt together."""
    groups = [list(group) for _, group in groupby(rollouts, key=lambda r: r.group_index)]
    size = -(-len(groups) // (4 * processes))
    return [
        [rollout for group in groups[first : first + size] for rollout in group]
        for first in range(0, len(groups), size)
    ]


def _load(function: str | RewardFunction) -> RewardFunction:
    if isinstance(function, RewardBySource):
        function.load()  # import before the first call's timeout starts
    return load_function(function) if isinstance(function, str) else function


def _scores(function: RewardFunction, rollouts: list[Rollout]) -> list[Any] | RewardError:
    """Call the function. An error of raypo's own class is returned, so that it keeps its class."""
    try:
        return list(map(_plain, call(function, rollouts)))
    except RewardError as error:
        return error


def _plain(answer: Any) -> Any:
    """Replace exceptions in a score, whose classes the calling process may be unable to import."""
    if isinstance(answer, Exception):
        return RuntimeError(text_of(answer) or type(answer).__name__)
    if isinstance(answer, Mapping):
        return {key: _plain(part) for key, part in answer.items()}
    return answer
