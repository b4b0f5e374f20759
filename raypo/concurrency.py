"""Futures for daemon threads and coroutines.

Concurrency. `background_future` runs coroutines on event loops that live as long as the process,
each in a daemon thread with the loop's name. raypo's own coroutines share `raypo-loop`: they must
not block, and must not wait for one another's `Future.result`. Coroutines of the user's code run on
a loop of their own.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextvars import copy_context
from functools import cache
from typing import Any, TypeVar

T = TypeVar("T")


def daemon_future(function: Callable[[], T], *, name: str) -> Future[T]:
    """Call a function in a daemon thread and return a future for its result.

    The function runs in a copy of the caller's context (`contextvars`). An executor is not used:
    Python joins an executor's threads at exit, so a call that hangs would block the exit.

    Args:
        function: The function, without arguments.
        name: Name of the thread.
    """
    answer: Future[T] = Future()
    answer.set_running_or_notify_cancel()
    run, args = copy_context().run, (settle, answer, function)
    threading.Thread(target=run, args=args, name=name, daemon=True).start()
    return answer


def settle(answer: Future[T], function: Callable[[], T]) -> None:
    """Call a function and set its result or exception on a future."""
    try:
        value = function()
    except StopIteration as error:  # asyncio's futures do not accept it
        stopped = RuntimeError("a StopIteration was raised")
        stopped.__cause__ = error
        answer.set_exception(stopped)
    except BaseException as error:
        answer.set_exception(error)
    else:
        answer.set_result(value)


def background_future(coroutine: Coroutine[Any, Any, T], *, loop: str = "raypo-loop") -> Future[T]:
    """Run a coroutine on a background event loop of this process; return a future for its result.

    Cancelling the future cancels the coroutine.

    Args:
        coroutine: The coroutine.
        loop: Name of the loop. The first call with a name starts the loop.
    """
    with _starting:  # `cache` alone would start a loop for each thread that calls it first
        running = _background_loop(loop)
    return asyncio.run_coroutine_threadsafe(coroutine, running)


_starting = threading.Lock()


@cache
def _background_loop(name: str) -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name=name, daemon=True).start()
    return loop
