"""The event loop of a worker's episodes, which code of the user's can neither end nor stop."""

from __future__ import annotations

import asyncio
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar
from weakref import WeakSet

from raypo.concurrency import settle

T = TypeVar("T")
LOOK_EVERY_S = 1.0
STANDS_STILL_S = 2.0
"""Shorter than this a busy machine may hold up a loop."""
LEAVE_S = 1.0
"""How long what is cancelled may take to leave."""
tasks_of: ContextVar[WeakSet[asyncio.Task[Any]] | None] = ContextVar("tasks_of", default=None)
"""Is told of every task that is made in its context, also by the user's code."""


class LoopStandsStill(RuntimeError):
    """Code of the user's that blocks runs in the event loop, so nothing else does."""


class EventLoop:
    """An event loop in a thread of its own.

    `asyncio.to_thread` has as many threads in it as calls, so that one that hangs keeps no other
    waiting, and the process does not wait for any of them at its end.
    """

    def __init__(self, limit_s: float | None) -> None:
        """Start it.

        Args:
            limit_s: Seconds that it may stand still; None: any.
        """
        self._limit_s = None if limit_s is None else max(limit_s, STANDS_STILL_S)
        self._loop = asyncio.new_event_loop()
        self._loop.set_default_executor(_Threads())
        self._loop.set_task_factory(_task)
        self._num_beats = 0
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="raypo-episodes", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for some work in the loop; from any other thread, of any number at a time.

        Raises:
            LoopStandsStill: the loop did, for longer than it may.
            Exception: whatever the work raises.
        """
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        period = LOOK_EVERY_S if self._limit_s is None else min(LOOK_EVERY_S, self._limit_s / 4)
        stood_s = 0.0  # as far as it was seen: this process may have stood still itself
        try:
            while True:
                beats = self._num_beats
                self._loop.call_soon_threadsafe(self._beat)
                if wait((future,), timeout=period).done:
                    return future.result()
                stood_s = stood_s + period if self._num_beats == beats else 0.0
                if self._limit_s is not None and stood_s > self._limit_s:
                    self._refuse_to_wait(stood_s)
        except BaseException:
            future.cancel()
            raise

    def call_soon(self, function: Callable[[], object]) -> None:
        """Have something done in the loop; from any thread."""
        with suppress(RuntimeError):  # it was closed
            self._loop.call_soon_threadsafe(function)

    def close(self) -> None:
        """End it, with all that is still in it; what hangs is left behind."""
        self._is_closing = True
        self.call_soon(self._loop.stop)
        self._thread.join(2 * LEAVE_S)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        while not self._is_closing:
            with suppress(BaseException):  # a SystemExit in a task, which has it too
                self._loop.run_forever()
        self._loop.run_until_complete(leave(asyncio.all_tasks(self._loop)))
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    def _beat(self) -> None:
        self._num_beats += 1

    def _refuse_to_wait(self, seconds: float) -> None:
        frame = sys._current_frames().get(self._thread.ident or 0)
        if frame is None or (line := _users_line(traceback.extract_stack(frame))) is None:
            return  # it waits for its turn among other threads
        raise LoopStandsStill(
            f"{line.filename}, line {line.lineno}, in {line.name} ({line.line}): has blocked the "
            f"event loop of all episodes for {seconds:.0f} s (rollout.step_timeout_s), so that no "
            f"time-out can end it. Write await before what can be awaited, call what cannot by "
            f"await asyncio.to_thread(...), or make the method a plain one, which runs in a thread."
        )


async def leave(tasks: set[asyncio.Task[Any]]) -> None:
    """Cancel tasks, and give them a moment to leave."""
    left = {each for each in tasks if not each.done() and each is not asyncio.current_task()}
    for each in left:
        each.cancel()
    if left:
        await asyncio.wait(left, timeout=LEAVE_S)


class _Threads(ThreadPoolExecutor):
    """A pool that starts a thread for each call that finds none at rest."""

    def __init__(self) -> None:
        self._at_rest: list[SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]] = []
        """Where threads wait for their next call; None: for their end."""
        self._is_shut = False

    def submit(self, function: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        answer: Future[T] = Future()
        answer.set_running_or_notify_cancel()
        try:
            calls = self._at_rest.pop()
        except IndexError:
            calls = SimpleQueue()
            threading.Thread(target=self._work, args=(calls,), daemon=True).start()
        calls.put((answer, partial(function, *args, **kwargs)))
        return answer

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._is_shut = True
        with suppress(IndexError):
            while True:
                self._at_rest.pop().put(None)

    def _work(self, calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]) -> None:
        while call := calls.get():
            settle(*call)
            del call
            self._at_rest.append(calls)
            if self._is_shut:
                self.shutdown()


def _task(loop: asyncio.AbstractEventLoop, work: Any, **kwargs: Any) -> asyncio.Task[Any]:
    task = asyncio.Task(work, loop=loop, **kwargs)
    if (tasks := tasks_of.get()) is not None:
        tasks.add(task)
    return task


def _users_line(stack: traceback.StackSummary) -> traceback.FrameSummary | None:
    """The line of the user's code that a stack is in; None where it is in raypo or asyncio."""
    callers = (str(Path(__file__).parent), str(Path(asyncio.__file__).parent))
    libraries = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
    last = max(n for n, each in enumerate(stack) if each.filename.startswith(callers))
    called = stack[last + 1 :]
    theirs = [each for each in called if not each.filename.startswith(libraries)] or called[:1]
    return theirs[-1] if theirs else None
