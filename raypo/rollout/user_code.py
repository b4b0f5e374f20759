"""Load the user's environment or agent class, and call its objects with a quota and a time limit.

Coroutines run in the event loop of the episodes, and plain methods in threads. With
`rollout.environment_processes` all methods run in the processes of a pool. The object is pickled
after each call, so that any process can run its next call.
"""

from __future__ import annotations

import asyncio
import inspect
import pickle
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from numbers import Real
from typing import Any

import cloudpickle

from raypo.config import ConfigError, RolloutSection
from raypo.custom.loader import load_class
from raypo.custom.process_pool import CallTimeout, ProcessDied, RemoteException, UserCodePool
from raypo.rewards.scoring import LARGEST
from raypo.rollout.interface import AGENT, ENVIRONMENT, OPTIONAL
from raypo.rollout.work_time import WorkTime, too_slow
from raypo.tools.calls import on_tool_use
from raypo.types import ToolUse

_runner = asyncio.Runner()
"""Event loop of a process of the pool. All calls share it, because a client that the user's module
keeps works only in the loop of its first use."""


class WrongAnswer(Exception):
    """An environment or an agent returned an invalid value."""


class UserClass:
    """The user's class, with the quota and the processes that all its objects share."""

    def __init__(self, section: RolloutSection) -> None:
        """Load the class, and start `rollout.environment_processes` processes.

        Raises:
            ConfigError: the class is missing, or is neither an environment nor an agent.
        """
        key, interface = ("agent", AGENT) if section.agent else ("environment", ENVIRONMENT)
        spec, arguments = getattr(section, key), getattr(section, f"{key}_args")
        load = partial(
            load_class, spec, interface, arguments, optional=OPTIONAL, key=f"rollout.{key}"
        )
        if section.verifiers is not None:
            from raypo.rollout.verifiers_agent import open_verifiers  # packages of the extra

            load = partial(open_verifiers, section.verifiers, arguments)
        self.make = load()
        self.reads_ids = bool(getattr(self.make.func, "reads_token_ids", False))
        self.tools = None if section.has_agent else getattr(self.make.func, "tools", None)
        if self.tools is not None and not isinstance(self.tools, list | tuple):
            raise ConfigError(
                f"rollout.environment ({section.environment}): its attribute tools is a "
                f"{type(self.tools).__name__}, but chat templates need a list of functions or "
                "schemas. Make it such a list, or rename it."
            )
        self.quota = asyncio.Semaphore(section.max_concurrent_steps)
        self.limit_s = section.step_timeout_s
        self.pool: UserCodePool | None = None
        if section.environment_processes:
            self.pool = UserCodePool(
                load,
                module=__name__,
                processes=section.environment_processes,
                timeout_s=self.limit_s,
            )

    def close(self) -> None:
        """End the processes, if there are any."""
        if self.pool:
            self.pool.close()


class UserObject:
    """One episode's environment or agent. It is created by its first call."""

    def __init__(self, cls: UserClass) -> None:
        self._class, self._pool = cls, cls.pool
        self._object: Any = None
        self._state: bytes | None = None  # with a pool: the pickled object after its last call
        self._metrics: Any = None  # with a pool: the object's attribute `metrics`

    def metrics(self) -> dict[str, float]:
        """Return the object's attribute `metrics`, or an empty mapping if it has none.

        Raises:
            WrongAnswer: the attribute is not a mapping of names to finite numbers.
        """
        metrics = self._metrics if self._pool else getattr(self._object, "metrics", None)
        if metrics is None:
            return {}
        if not isinstance(metrics, Mapping) or not all(map(is_finite, metrics.values())):
            raise WrongAnswer(
                f"metrics is {metrics!r:.100}, not a mapping of names to finite numbers"
            )
        return {str(name): float(value) for name, value in metrics.items()}

    def work_time(self, method: str) -> WorkTime:
        """Return the quota and time limit of one call. With a pool, the pool limits the time."""
        return WorkTime(method, self._class.quota, None if self._pool else self._class.limit_s)

    async def call(self, method: str, *arguments: Any, work_time: WorkTime | None = None) -> Any:
        """Call a method and return its result.

        Args:
            method: Name of the method.
            arguments: Its arguments.
            work_time: Quota and time limit of the call. None means a new `self.work_time(method)`.

        Raises:
            TimeoutError: the call took too long. A call in a thread continues, but its result is
                ignored.
            Exception: any error of the method.
        """
        limits = work_time or self.work_time(method)
        if self._pool:
            return await limits.run(partial(self._call_in_pool, self._pool, method, *arguments))
        return await limits.run(partial(self._call, method, *arguments))

    async def close(self) -> None:
        """Call the object's `close`, if it was created and has one."""
        is_made = self._object is not None or self._state is not None
        if is_made and hasattr(self._class.make.func, "close"):
            await self.call("close")

    async def _call(self, method: str, *arguments: Any) -> Any:
        def call() -> Any:
            if self._object is None:
                self._object = self._class.make()
            return getattr(self._object, method)(*arguments)

        is_coroutine = inspect.iscoroutinefunction(getattr(self._class.make.func, method))
        answer = call() if is_coroutine else await asyncio.to_thread(call)
        return await answer if inspect.isawaitable(answer) else answer

    async def _call_in_pool(self, pool: UserCodePool, method: str, *arguments: Any) -> Any:
        try:
            self._state, answer, raised, uses = await pool.call(
                _call_pickled, self._state, method, *arguments
            )
        except CallTimeout:
            raise too_slow(method, self._class.limit_s) from None
        except ProcessDied as died:
            raise RuntimeError(f"{method}: {died}") from None
        for use in uses:
            on_tool_use.get()(use)
        if raised is not None:
            raise raised.exception()
        returned, self._metrics = pickle.loads(answer)
        return returned


def _call_pickled(
    make: Callable[[], Any], state: bytes | None, method: str, *arguments: Any
) -> tuple[bytes | None, bytes, RemoteException | None, list[ToolUse]]:
    """Call a method in a process of the pool.

    Returns:
        The pickled object after the call; the pickled pair of the result and the metrics; the error
        or None; and the tools that were called.
    """
    uses: list[ToolUse] = []
    on_tool_use.set(uses.append)
    user_object = None
    try:
        user_object = make() if state is None else pickle.loads(state)
        answer = getattr(user_object, method)(*arguments)
        if inspect.isawaitable(answer):
            answer = _runner.run(_result_of(answer), context=copy_context())
        returned = answer, getattr(user_object, "metrics", None)
        afterwards = _pickled(user_object, "an environment")
        return afterwards, _pickled(returned, "what it returns"), None, uses
    except BaseException as error:
        # `close` will still be called: return the new state, or the old one if pickling fails.
        if user_object is not None:
            with suppress(Exception):
                state = _pickled(user_object, "an environment")
        return state, b"", RemoteException.of(error), uses


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


def is_finite(value: Any) -> bool:
    """Return whether a value is a finite number that float32 can hold."""
    return isinstance(value, Real) and abs(value) <= LARGEST  # pyright: ignore[reportOperatorIssue]
