"""Call the user's code in worker processes, which can be killed.

Concurrency. The processes are forked from a server process, which has neither threads nor Ray: they
do not survive a fork. A process runs one call at a time. If a call exceeds the time limit, if its
future is cancelled, or if its process dies, the pool replaces the process. Other calls go on.

Only bytes and texts leave the processes, because an object of a class that the calling process
cannot import would break the pool.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import pickle
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import cloudpickle
from pebble import ProcessExpired, ProcessPool

from raypo.custom.errors import text_of, user_frames

_loaded: Any = None


class CallTimeout(TimeoutError):
    """A call took longer than the pool allows. Its process was killed."""


class ProcessDied(RuntimeError):
    """The process of a call died."""


class Raised(NamedTuple):
    """An exception of the user's code, as it leaves the process."""

    name: str
    text: str
    frames: str
    trace: str

    @classmethod
    def of(cls, error: BaseException) -> Raised:
        """Describe an exception. Call it where the exception is handled."""
        return cls(type(error).__name__, text_of(error), user_frames(error), traceback.format_exc())

    def exception(self) -> Exception:
        """Return an exception of the same name and text. Its cause has the whole traceback."""
        error = type(self.name, (Exception,), {"user_frames": self.frames})(self.text)
        error.__cause__ = RuntimeError(self.trace)
        return error


class UserCodePool:
    """Worker processes that hold an object of the user's, such as a function, and use it."""

    def __init__(
        self,
        load: Callable[[], Any],
        *,
        module: str,
        processes: int,
        timeout_s: float | None,
        log: Path | None = None,
    ) -> None:
        """Start the processes.

        Args:
            load: Function that returns the object. Each process calls it once, before the time
                limit of its first call starts.
            module: Module of the calls. The server process imports it once for all processes.
            processes: Number of processes.
            timeout_s: Seconds that a call may take. None means no limit.
            log: File to which the processes append what the user's code prints. None prints it.
        """
        if log is not None:
            log.parent.mkdir(parents=True, exist_ok=True)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([module])
        self._timeout_s = timeout_s
        self._pool = ProcessPool(
            max_workers=processes,
            initializer=_open,
            initargs=(cloudpickle.dumps(load), log),
            context=context,
        )
        # `active` starts the processes. Otherwise the first call would do so, and block the event
        # loop that makes it for as long as the server process imports.
        if not self._pool.active:
            raise RuntimeError("the worker processes of the user's code have not started")

    def submit(self, work: Callable[..., Any], *args: Any) -> Future[Any]:
        """Call `work(loaded, *args)` in a process. Cancelling the future kills the process.

        Args:
            work: Function that is pickled by its name.
            args: Its further arguments.

        Returns:
            A future to be passed to `result` when it is done.
        """
        return self._pool.schedule(_call, args=(work, *args), timeout=self._timeout_s)

    async def call(self, work: Callable[..., Any], *args: Any) -> Any:
        """Return the result of a call, as `submit` and `result` do for threads."""
        future = self.submit(work, *args)
        with suppress(TimeoutError, ProcessExpired):
            await asyncio.wrap_future(future)
        return self.result(future)

    def result(self, future: Future[Any]) -> Any:
        """Wait for a call and return its result.

        Raises:
            CallTimeout: the call took too long.
            ProcessDied: its process died.
            Exception: the call raised an error; this one has its name and text.
        """
        try:
            content, raised = future.result()
        except TimeoutError:
            raise CallTimeout(f"no answer in {self._timeout_s:g} s") from None
        except ProcessExpired as expired:
            raise ProcessDied(f"its process died with status {expired.exitcode}") from None
        if raised is not None:
            raise raised.exception()
        return pickle.loads(content)

    def close(self) -> None:
        """Kill the processes and wait for them."""
        self._pool.stop()
        self._pool.join()


def _open(load: bytes, log: Path | None) -> None:
    """Load the object in a process of the pool."""
    global _loaded
    if log is not None:
        sys.stdout = log.open("a", buffering=1, encoding="utf-8")  # line by line
    try:
        _loaded = cloudpickle.loads(load)()
    except Exception as error:  # an error in an initializer would break the pool
        _loaded = Raised.of(error)


def _call(work: Callable[..., Any], *args: Any) -> tuple[bytes, Raised | None]:
    """Return the pickled result of a call, or the exception that it raised."""
    if isinstance(_loaded, Raised):
        return b"", _loaded
    try:
        return cloudpickle.dumps(work(_loaded, *args)), None
    except BaseException as error:
        return b"", Raised.of(error)
