"""Call the user's code in worker processes, which can be killed.

Concurrency. The processes are forked from a server process without threads and without Ray, because
neither survives a fork. A process runs one call at a time. If a call exceeds the time limit, if its
future is cancelled, or if its process dies, the pool replaces the process. Other calls continue.

The processes return only bytes and strings, because an object of a class that the calling process
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

_loaded_object: Any = None


class CallTimeout(TimeoutError):
    """A call exceeded the pool's time limit. Its process was killed."""


class ProcessDied(RuntimeError):
    """The process of a call died."""


class RemoteException(NamedTuple):
    """Picklable description of an exception that the user's code raised in a worker process."""

    name: str
    text: str
    frames: str
    full_traceback: str

    @classmethod
    def of(cls, error: BaseException) -> RemoteException:
        """Describe an exception. Must be called in the exception handler."""
        return cls(type(error).__name__, text_of(error), user_frames(error), traceback.format_exc())

    def exception(self) -> Exception:
        """Return an exception with the same name and text. Its cause has the whole traceback."""
        error = type(self.name, (Exception,), {"user_frames": self.frames})(self.text)
        error.__cause__ = RuntimeError(self.full_traceback)
        return error


class UserCodePool:
    """Pool of worker processes that each load a user's object, such as a function, and call it."""

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
            module: Module of the called functions. The server process imports it once for all
                processes.
            processes: Number of processes.
            timeout_s: Time limit of a call in seconds. None means no limit.
            log: File to which the output of the user's code is appended. None means that the output
                is printed.
        """
        if log is not None:
            log.parent.mkdir(parents=True, exist_ok=True)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([module])
        self._timeout_s = timeout_s
        self._pool = ProcessPool(
            max_workers=processes,
            initializer=_initialize_process,
            initargs=(cloudpickle.dumps(load), log),
            context=context,
        )
        # `active` starts the processes. Otherwise the first call would start them, and block its
        # event loop while the server process imports.
        if not self._pool.active:
            raise RuntimeError("the worker processes of the user's code have not started")

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """Call `function(object, *args)` in a process. Cancelling the future kills the process.

        Args:
            function: Function that is pickled by name.
            args: Further arguments of the function.

        Returns:
            A future for `result`.
        """
        return self._pool.schedule(_call_function, args=(function, *args), timeout=self._timeout_s)

    async def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Make a call and return its result: an asynchronous `submit` and `result`."""
        future = self.submit(function, *args)
        with suppress(TimeoutError, ProcessExpired):
            await asyncio.wrap_future(future)
        return self.result(future)

    def result(self, future: Future[Any]) -> Any:
        """Wait for a call and return its result.

        Raises:
            CallTimeout: the call exceeded the time limit.
            ProcessDied: the call's process died.
            Exception: the call raised an exception with the same name and text.
        """
        try:
            content, remote_exception = future.result()
        except TimeoutError:
            raise CallTimeout(f"no answer in {self._timeout_s:g} s") from None
        except ProcessExpired as expiry:
            raise ProcessDied(f"its process died with status {expiry.exitcode}") from None
        if remote_exception is not None:
            raise remote_exception.exception()
        return pickle.loads(content)

    def close(self) -> None:
        """Kill the processes and wait for them."""
        self._pool.stop()
        self._pool.join()


def _initialize_process(load: bytes, log: Path | None) -> None:
    """Load the object in a process of the pool."""
    global _loaded_object
    if log is not None:
        sys.stdout = log.open("a", buffering=1, encoding="utf-8")  # line-buffered
    try:
        _loaded_object = cloudpickle.loads(load)()
    except Exception as error:  # an error in an initializer would break the pool
        _loaded_object = RemoteException.of(error)


def _call_function(
    function: Callable[..., Any], *args: Any
) -> tuple[bytes, RemoteException | None]:
    """Return the pickled result of a call, or the exception that it raised."""
    if isinstance(_loaded_object, RemoteException):
        return b"", _loaded_object
    try:
        return cloudpickle.dumps(function(_loaded_object, *args)), None
    except BaseException as error:
        return b"", RemoteException.of(error)
