"""Event loop of the episodes. User code cannot end the loop, and blocking it is detected.

Concurrency. The loop runs in one daemon thread. Other threads submit coroutines with
`EventLoop.run` and block until the coroutine is done. A blocked thread sends heartbeats to the
loop, and raises `LoopStandsStill` if the loop does not answer for too long. `asyncio.to_thread`
starts a daemon thread for each call, so no call waits for another one that hangs.
"""

from __future__ import annotations

import asyncio
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from raypo.concurrency import daemon_future

T = TypeVar("T")
LOOK_EVERY_S = 1.0
"""Longest interval between two heartbeats, in seconds."""
STANDS_STILL_S = 2.0
"""Smallest time limit for a blocked loop, in seconds. A busy machine may cause shorter delays."""
LEAVE_S = 1.0
"""Seconds to wait for cancelled tasks to end."""


class LoopStandsStill(RuntimeError):
    """User code blocks the event loop, so that no episode can go on."""


class EventLoop:
    """An event loop in a thread of its own, with a watchdog against code that blocks it."""

    def __init__(self, limit_s: float | None) -> None:
        """Start the thread and the loop.

        Args:
            limit_s: Seconds that the loop may be blocked. None means no limit.
        """
        self._limit_s = None if limit_s is None else max(limit_s, STANDS_STILL_S)
        self._loop = asyncio.new_event_loop()
        self._loop.set_default_executor(_DaemonThreads())
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="raypo-episodes", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the loop and wait for it. Any number of other threads may call this.

        Args:
            work: The coroutine. It is cancelled if this method raises an error.

        Returns:
            The coroutine's result.

        Raises:
            LoopStandsStill: user code blocked the loop for longer than the limit.
            Exception: any error of the coroutine.
        """
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            while not wait((future,), timeout=LOOK_EVERY_S).done:
                if self._limit_s is not None and not self._answers_in_time(self._limit_s):
                    self._refuse_to_wait(self._limit_s)
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def call_soon(self, function: Callable[[], object]) -> None:
        """Schedule a function in the loop; callable from any thread."""
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(function)

    def close(self) -> None:
        """Cancel all tasks and end the loop. A thread that hangs is left behind."""
        self._is_closing = True
        self.call_soon(self._loop.stop)
        self._thread.join(2 * LEAVE_S)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        while not self._is_closing:
            # asyncio raises a task's SystemExit here as well as in the task: go on with the loop.
            with suppress(BaseException):
                self._loop.run_forever()
        self._loop.run_until_complete(leave(asyncio.all_tasks(self._loop)))
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    def _answers_in_time(self, limit_s: float) -> bool:
        """Return whether the loop answers a heartbeat within the limit."""
        beat: Future[None] = Future()
        self._loop.call_soon_threadsafe(beat.set_result, None)
        # Wait in four parts: after a suspension of the whole process, the first part ends at once.
        return any(wait((beat,), timeout=limit_s / 4).done for _ in range(4))

    def _refuse_to_wait(self, seconds: float) -> None:
        frame = sys._current_frames().get(self._thread.ident or 0)
        if frame is None or (line := _users_line(traceback.extract_stack(frame))) is None:
            return  # no user code: the thread only waits for the GIL
        raise LoopStandsStill(
            f"{line.filename}, line {line.lineno}, in {line.name} ({line.line}): has blocked the "
            f"event loop of all episodes for {seconds:.0f} s (rollout.step_timeout_s), so no "
            "time-out can stop it. Await calls that can be awaited, run the others with await "
            "asyncio.to_thread(...), or make the method a plain one without async, which runs "
            "in a thread."
        )


async def leave(tasks: set[asyncio.Task[Any]]) -> None:
    """Cancel tasks, and wait up to `LEAVE_S` for them to end."""
    left = {task for task in tasks if not task.done() and task is not asyncio.current_task()}
    for task in left:
        task.cancel()
    if left:
        await asyncio.wait(left, timeout=LEAVE_S)


class _DaemonThreads(ThreadPoolExecutor):
    """Starts a daemon thread for each call.

    In a plain `ThreadPoolExecutor`, calls would wait for others that hang, and the process would
    wait for all threads at exit. This class is derived from it only because asyncio accepts no
    other executor.
    """

    def __init__(self) -> None:
        pass

    def submit(self, function: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        return daemon_future(partial(function, *args, **kwargs), name="raypo-call")

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        pass


def _users_line(stack: traceback.StackSummary) -> traceback.FrameSummary | None:
    """Return a stack's current line of user code.

    The result is None if the stack is in raypo or asyncio.
    """
    callers = (str(Path(__file__).parent), str(Path(asyncio.__file__).parent))
    libraries = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
    last = max(n for n, line in enumerate(stack) if line.filename.startswith(callers))
    called = stack[last + 1 :]
    theirs = [line for line in called if not line.filename.startswith(libraries)] or called[:1]
    return theirs[-1] if theirs else None
