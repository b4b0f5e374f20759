"""Daemon threads for calls that may hang, and processes that are not forked from this one."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import copy_context
from multiprocessing.context import ForkServerContext
from typing import TypeVar

T = TypeVar("T")


def daemon_future(function: Callable[[], T], *, name: str) -> Future[T]:
    """Call a function in a daemon thread and return a future for its result.

    The function runs in a copy of the caller's context (`contextvars`). The threads of an executor
    would not do: Python joins them at exit, so one call that hangs would block the exit.

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


def fork_context(module: str) -> ForkServerContext:
    """Return a multiprocessing context whose processes are forked from a server process.

    The server has neither threads nor Ray, which do not survive a fork.

    Args:
        module: Module of the processes' functions. The server imports it once.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([module])
    return context
