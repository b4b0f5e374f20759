"""Futures for daemon threads and coroutines.

Concurrency. `background_future` runs coroutines on event loops that live as long as the process.
Each loop runs in a daemon thread with the loop's name. raypo's own coroutines share `raypo-loop`:
they must not block, and must not wait for each other's `Future.result`. Coroutines of the user's
code run on a separate loop.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextvars import copy_context
from functools import cache
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def daemon_future(function: Callable[[], T], *, name: str) -> Future[T]:
    """Call a function in a daemon thread and return a future for its result.

    The function runs in a copy of the caller's context (`contextvars`). This does not use an
    executor, because Python joins an executor's threads at exit, so a hanging call would block the
    exit.

    Args:
        function: Function without arguments.
        name: Name of the thread.
    """
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()
    run, args = copy_context().run, (settle, future, function)
    threading.Thread(target=run, args=args, name=name, daemon=True).start()
    return future


def in_this_context(function: Callable[P, T]) -> Callable[P, T]:
    """Return a function that any thread may call, and that runs in a copy of this context."""
    context = copy_context()

    def run(*args: P.args, **keywords: P.kwargs) -> T:
        return context.copy().run(function, *args, **keywords)

    return run


def settle(future: Future[T], function: Callable[[], T]) -> None:
    """Call a function and set its result or exception on a future."""
    try:
        result = function()
    except StopIteration as error:  # asyncio futures do not accept a StopIteration
        runtime_error = RuntimeError("a StopIteration was raised")
        runtime_error.__cause__ = error
        future.set_exception(runtime_error)
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)


def background_future(coroutine: Coroutine[Any, Any, T], *, loop: str = "raypo-loop") -> Future[T]:
    """Run a coroutine on a background event loop of this process, and return its future.

    Cancelling the future cancels the coroutine.

    Args:
        coroutine: The coroutine.
        loop: Name of the loop. The first call with a name starts the loop.
    """
    with _start_lock:  # with `cache` alone, concurrent first calls would start several loops
        event_loop = _background_loop(loop)
    return asyncio.run_coroutine_threadsafe(coroutine, event_loop)


_start_lock = threading.Lock()


@cache
def _background_loop(name: str) -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name=name, daemon=True).start()
    return loop
