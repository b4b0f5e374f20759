"""Run environments in worker processes.

An environment is pickled after each call, so that any process can run its next call.

Concurrency. Each learner worker has its own pool of processes, forked from a fork server. The event
loop of the episodes submits calls and awaits their futures; a process runs one call at a time. If a
call exceeds the time limit or its process dies, the pool replaces the process, and only that
episode fails.

Only bytes and texts are sent to and from the processes, because an object that cannot be pickled
would break the pool.
"""

from __future__ import annotations

import asyncio
import inspect
import pickle
from collections.abc import Awaitable, Callable
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any

import cloudpickle
from pebble import ProcessExpired, ProcessPool

from raypo.concurrency import fork_context
from raypo.custom.errors import text_of, user_frames
from raypo.rollout.work_time import too_slow
from raypo.tools.calls import heard
from raypo.types import ToolUse

_make: Callable[[], Any] | None = None
_runner = asyncio.Runner()
"""Event loop of this process. All calls share it, because a client that the user's module keeps
works only in the loop of its first use."""


@dataclass
class Pickled:
    """A pickled environment between two calls. Calls that raise an error update it too."""

    state: bytes | None = None
    """Pickled environment. None means that it is not created yet."""
    metrics: Any = None
    """The environment's attribute `metrics`, or None if the environment has no such attribute."""


class EnvironmentPool:
    """A process pool that runs the methods of environments."""

    def __init__(
        self, load: Callable[[], Callable[[], Any]], *, processes: int, timeout_s: float | None
    ) -> None:
        """Start the processes.

        Args:
            load: Function that returns the factory of environments, called once in each process.
            processes: Number of processes.
            timeout_s: Seconds that one call may take. None means no limit.
        """
        self._timeout_s = timeout_s
        self._pool = ProcessPool(
            max_workers=processes,
            initializer=_open,
            initargs=(load,),
            context=fork_context(__name__),
        )

    async def call(self, environment: Pickled, method: str, *arguments: Any) -> Any:
        """Call a method of an environment in a process, and return its result.

        The environment is updated to the state after the call.

        Raises:
            TimeoutError: the call took too long, and its process was ended.
            RuntimeError: the process died.
            Exception: the method raised an error; this one has its name and text.
        """
        scheduled = self._pool.schedule(
            _call, args=(environment.state, method, *arguments), timeout=self._timeout_s
        )
        try:
            environment.state, answer, raised, uses = await asyncio.wrap_future(scheduled)
        except TimeoutError:
            raise too_slow(method, self._timeout_s) from None
        except ProcessExpired as expired:
            raise RuntimeError(
                f"{method}: its process died with status {expired.exitcode}"
            ) from None
        for use in uses:
            heard.get()(use)
        if raised is not None:
            name, text, frames = raised
            raise type(name, (Exception,), {"user_frames": frames})(text)
        returned, environment.metrics = pickle.loads(answer)
        return returned

    def close(self) -> None:
        """Kill the processes."""
        self._pool.stop()
        self._pool.join()


def _open(load: Callable[[], Callable[[], Any]]) -> None:
    """Load the environment's factory. This runs once in each process of the pool."""
    global _make
    _make = load()


def _call(
    state: bytes | None, method: str, *arguments: Any
) -> tuple[bytes | None, bytes, tuple[str, str, str] | None, list[ToolUse]]:
    """Call a method in a process of the pool.

    Returns:
        The pickled environment after the call; the pickled pair of the result and the metrics; the
        name, text and user's frames of the error, or None; and the tools that were called.
    """
    assert _make is not None
    uses: list[ToolUse] = []
    heard.set(uses.append)
    environment = None
    try:
        environment = _make() if state is None else pickle.loads(state)
        answer = getattr(environment, method)(*arguments)
        if inspect.isawaitable(answer):
            answer = _runner.run(_result_of(answer), context=copy_context())
        returned = answer, getattr(environment, "metrics", None)
        afterwards = _pickled(environment, "an environment")
        return afterwards, _pickled(returned, "what it returns"), None, uses
    except BaseException as error:
        # `close` will still be called: return the new state, or the old one if pickling fails.
        if environment is not None:
            with suppress(Exception):
                state = _pickled(environment, "an environment")
        return state, b"", (type(error).__name__, text_of(error), user_frames(error)), uses


def _pickled(value: Any, what: str) -> bytes:
    try:
        return cloudpickle.dumps(value)
    except Exception as error:
        raise TypeError(
            f"with rollout.environment_processes {what} is pickled, but this failed: {error}. "
            "Create objects that cannot be pickled anew in each step, or set "
            "rollout.environment_processes to 0."
        ) from error


async def _result_of(awaitable: Awaitable[Any]) -> Any:
    return await awaitable
