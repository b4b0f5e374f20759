"""Threads and processes for code that may hang, or must not be forked with ours."""

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
    """What a function returns, called in a thread that no exit of the process waits for.

    It runs in a copy of the caller's context (`contextvars`).
    The threads of a pool are waited for, so that one call that hangs would hold the process back.
    """
    answer: Future[T] = Future()
    answer.set_running_or_notify_cancel()
    run, args = copy_context().run, (settle, answer, function)
    threading.Thread(target=run, args=args, name=name, daemon=True).start()
    return answer


def settle(answer: Future[T], function: Callable[[], T]) -> None:
    """Call a function, and make what it returns or raises the result of a future."""
    try:
        value = function()
    except StopIteration as error:  # asyncio's futures take none
        stopped = RuntimeError("a StopIteration was raised")
        stopped.__cause__ = error
        answer.set_exception(stopped)
    except BaseException as error:
        answer.set_exception(error)
    else:
        answer.set_result(value)


def fork_context(module: str) -> ForkServerContext:
    """Processes are forked from one without threads and Ray, which do not survive a fork.

    Args:
        module: What their functions are of; it is imported once.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([module])
    return context
