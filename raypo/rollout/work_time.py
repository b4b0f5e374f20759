"""Quota and time limit of environments and agents; both pause while an agent waits for the policy.

All of it runs in the event loop of the episodes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from raypo.pending_work import at_work
from raypo.rollout.event_loop import leave

T = TypeVar("T")


class WorkTime:
    """Quota and time limit of one call of the user's code.

    A pause releases the quota and stops the clock.
    """

    def __init__(self, method: str, quota: asyncio.Semaphore, limit_s: float | None) -> None:
        """Store the limits. The clock is paused until `run` starts the work.

        Args:
            method: Name of the method, for the error.
            quota: Semaphore that limits how many calls run at the same time, over all episodes.
            limit_s: Seconds that the call may run between two pauses. None means no limit.
        """
        self._method, self._quota, self._limit_s = method, quota, limit_s
        self._num_pauses = 1
        self._num_waiting = 0
        self._timer: asyncio.TimerHandle | None = None
        self._has_quota = False
        self._is_late = asyncio.Event()

    async def run(self, work: Callable[[], Awaitable[T]]) -> T:
        """Run some work as soon as the quota admits it, and return its result.

        Raises:
            TimeoutError: the work took too long. It is cancelled, but work in a thread continues.
            Exception: any error of the work.
        """

        async def begin() -> T:
            name = f"the method {self._method} of the environment or agent"
            with at_work(name, must_move=False, in_thread=False):
                await self.resume()
                return await work()

        task, late = asyncio.create_task(begin()), asyncio.create_task(self._is_late.wait())
        try:
            await asyncio.wait({task, late}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise too_slow(self._method, self._limit_s)
            return task.result()
        finally:
            late.cancel()
            self.pause()
            await leave({task})  # the task may refuse to be cancelled

    def pause(self) -> None:
        """Release the quota and stop the clock. Pauses nest; each needs one `resume`."""
        self._num_pauses += 1
        if self._has_quota:
            self._has_quota = False
            self._quota.release()
        if self._timer is not None:
            self._timer.cancel()

    async def resume(self) -> None:
        """End one pause. After the last one, wait for the quota and restart the clock.

        An agent that cancels the wait continues without the quota until its next pause, but not
        without the time limit.
        """
        self._num_pauses -= 1
        if self._num_pauses or self._has_quota:
            return
        self._num_waiting += 1
        try:
            await self._quota.acquire()
        except asyncio.CancelledError:
            # If another call of the agent still waits, that call restarts the clock.
            if self._num_waiting == 1 and not (self._num_pauses or self._has_quota):
                self._start_clock()
            raise
        finally:
            self._num_waiting -= 1
        if self._num_pauses or self._has_quota:  # paused again during the wait
            self._quota.release()
            return
        self._has_quota = True
        self._start_clock()

    def _start_clock(self) -> None:
        if self._limit_s is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._limit_s, self._is_late.set)


def too_slow(method: str, timeout_s: float | None) -> TimeoutError:
    """Return the error of a call that exceeded its time limit."""
    return TimeoutError(f"{method} gave no answer in {timeout_s:g} s (rollout.step_timeout_s)")
