"""Environments in processes: pickled between their turns, so that any process takes the next one.

A turn that takes too long, and a process that dies, cost the episode and nothing else.
"""

from __future__ import annotations

import asyncio
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import cloudpickle
from pebble import ProcessExpired, ProcessPool

from raypo.concurrency import fork_context
from raypo.tools.calls import heard
from raypo.types import ToolUse

_TIMEOUT = "Task timeout"
"""What pebble says of a call that took too long."""
_make: Callable[[], Any] | None = None


class EnvironmentPool:
    """Processes that environments' methods run in."""

    def __init__(
        self, load: Callable[[], Callable[[], Any]], *, processes: int, timeout_s: float | None
    ) -> None:
        """Start the processes.

        Args:
            load: Called in each of them; gives what makes an environment.
            processes: How many.
            timeout_s: Seconds that one call may take; None: any.
        """
        self._timeout_s = timeout_s
        self._pool = ProcessPool(
            max_workers=processes,
            initializer=_open,
            initargs=(load,),
            context=fork_context(__name__),
        )

    async def call(
        self, state: bytes | None, method: str, *arguments: Any
    ) -> tuple[bytes, Any, Any]:
        """Call a method of an environment.

        Args:
            state: The environment; None: a new one.

        Returns:
            state: The environment afterwards.
            answer: What the method returned.
            metrics: The environment's, if it has any.

        Raises:
            TimeoutError: it took too long, and its process was ended.
            RuntimeError: its process died.
            Exception: whatever the method raises.
        """
        scheduled = self._pool.schedule(
            _call, args=(state, method, *arguments), timeout=self._timeout_s
        )
        try:
            state, answer, metrics, uses = await asyncio.wrap_future(scheduled)
        except TimeoutError as error:
            if error.args != (_TIMEOUT, self._timeout_s):
                raise  # one of its own
            raise too_slow(method, self._timeout_s) from None
        except ProcessExpired as expired:
            raise RuntimeError(
                f"{method}: its process died with status {expired.exitcode}"
            ) from None
        for use in uses:
            heard.get()(use)
        return state, answer, metrics

    def close(self) -> None:
        """End the processes at once."""
        self._pool.stop()
        self._pool.join()


def too_slow(method: str, timeout_s: float | None) -> TimeoutError:
    """The error of a call that took longer than it may."""
    return TimeoutError(f"{method} gave no answer in {timeout_s:g} s (rollout.step_timeout_s)")


def _open(load: Callable[[], Callable[[], Any]]) -> None:
    """Get the class ready, in a process of the pool."""
    global _make
    _make = load()


def _call(
    state: bytes | None, method: str, *arguments: Any
) -> tuple[bytes, Any, Any, list[ToolUse]]:
    assert _make is not None
    uses: list[ToolUse] = []
    heard.set(uses.append)
    environment = _make() if state is None else pickle.loads(state)
    answer = getattr(environment, method)(*arguments)
    if inspect.isawaitable(answer):
        answer = asyncio.run(_awaited(answer))
    metrics = getattr(environment, "metrics", None)
    return cloudpickle.dumps(environment), answer, metrics, uses


async def _awaited(answer: Any) -> Any:
    return await answer
