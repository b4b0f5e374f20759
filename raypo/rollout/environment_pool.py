"""Environments in processes: pickled between their turns, so that any process takes the next one.

A turn that takes too long, and a process that dies, cost the episode and nothing else. Only bytes
and texts go through the pool: what cannot be pickled would be the end of it.
"""

from __future__ import annotations

import asyncio
import inspect
import pickle
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import cloudpickle
from pebble import ProcessExpired, ProcessPool

from raypo.concurrency import fork_context
from raypo.custom.errors import text_of
from raypo.rollout.work_time import too_slow
from raypo.tools.calls import heard
from raypo.types import ToolUse

_make: Callable[[], Any] | None = None


@dataclass
class Pickled:
    """An environment between two calls, as the last of them has left it, also one that raised."""

    state: bytes | None = None
    """None: it is not made yet."""
    metrics: Any = None
    """Its attribute, if it has one."""


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

    async def call(self, it: Pickled, method: str, *arguments: Any) -> Any:
        """What a method of an environment returns; `it` is the environment afterwards.

        Raises:
            TimeoutError: it took too long, and its process was ended.
            RuntimeError: its process died.
            Exception: of the name and text of whatever the method raises.
        """
        scheduled = self._pool.schedule(
            _call, args=(it.state, method, *arguments), timeout=self._timeout_s
        )
        try:
            it.state, answer, raised, uses = await asyncio.wrap_future(scheduled)
        except TimeoutError:
            raise too_slow(method, self._timeout_s) from None
        except ProcessExpired as expired:
            raise RuntimeError(
                f"{method}: its process died with status {expired.exitcode}"
            ) from None
        for use in uses:
            heard.get()(use)
        if raised is not None:
            name, text = raised
            raise type(name, (Exception,), {})(text)
        returned, it.metrics = pickle.loads(answer)
        return returned

    def close(self) -> None:
        """End the processes at once."""
        self._pool.stop()
        self._pool.join()


def _open(load: Callable[[], Callable[[], Any]]) -> None:
    """Get the class ready, in a process of the pool."""
    global _make
    _make = load()


def _call(
    state: bytes | None, method: str, *arguments: Any
) -> tuple[bytes | None, bytes, tuple[str, str] | None, list[ToolUse]]:
    """The environment afterwards, the answer with its metrics, and what was raised."""
    assert _make is not None
    uses: list[ToolUse] = []
    heard.set(uses.append)
    environment = None
    try:
        environment = _make() if state is None else pickle.loads(state)
        answer = getattr(environment, method)(*arguments)
        if inspect.isawaitable(answer):
            answer = asyncio.run(_awaited(answer))
        told = answer, getattr(environment, "metrics", None)
        afterwards = _pickled(environment, "an environment")
        return afterwards, _pickled(told, "what it returns"), None, uses
    except BaseException as error:
        if environment is not None:  # to be closed; as it was before where it cannot be pickled
            with suppress(Exception):
                state = _pickled(environment, "an environment")
        return state, b"", (type(error).__name__, text_of(error)), uses


def _pickled(it: Any, what: str) -> bytes:
    try:
        return cloudpickle.dumps(it)
    except Exception as error:
        raise TypeError(
            f"with rollout.environment_processes {what} is pickled, and this cannot be: {error}. "
            f"Open in each step what cannot be, or set rollout.environment_processes to 0."
        ) from error


async def _awaited(answer: Any) -> Any:
    return await answer
