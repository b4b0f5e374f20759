"""Quota and time limit of environments and agents; both pause while an agent waits for the policy.

All of it runs in the event loop of the episodes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from raypo.rollout.event_loop import leave

T = TypeVar("T")


class WorkTime:
    """Quota and time limit of one call. Neither counts while the call is paused."""

    def __init__(self, what: str, quota: asyncio.Semaphore, limit_s: float | None) -> None:
        """Begin paused; `over` starts the work.

        Args:
            what: Name of the method, for the error.
            quota: Limits the calls of all episodes that run at the same time.
            limit_s: Seconds that the call may run between two pauses. None means no limit.
        """
        self._what, self._quota, self._limit_s = what, quota, limit_s
        self._num_rests = 1
        self._works = False
        self._timer: asyncio.TimerHandle | None = None
        self._is_late: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def over(self, work: Callable[[], Awaitable[T]]) -> T:
        """Run some work as soon as the quota admits it, and return its result.

        Raises:
            TimeoutError: the work took too long. It is cancelled, but a thread goes on.
            Exception: any error of the work.
        """

        async def begun() -> T:
            await self.go_on()
            return await work()

        task = asyncio.create_task(begun())
        try:
            await asyncio.wait({task, self._is_late}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise too_slow(self._what, self._limit_s)
            return task.result()
        finally:
            self.rest()
            await leave({task})

    def rest(self) -> None:
        """Pause: release the quota and stop the clock. Pauses nest; each needs one `go_on`."""
        self._num_rests += 1
        if self._works:
            self._works = False
            self._quota.release()
            if self._timer is not None:
                self._timer.cancel()

    async def go_on(self) -> None:
        """End one pause. After the last one, wait for the quota and restart the clock."""
        self._num_rests -= 1
        if self._num_rests or self._works:
            return
        await self._quota.acquire()
        if self._num_rests or self._works:  # paused again while it waited
            self._quota.release()
            return
        self._works = True
        if self._limit_s is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._limit_s, self._pass)

    def _pass(self) -> None:
        if not self._is_late.done():
            self._is_late.set_result(None)


def too_slow(method: str, timeout_s: float | None) -> TimeoutError:
    """Return the error of a call that exceeded its time limit."""
    return TimeoutError(f"{method} gave no answer in {timeout_s:g} s (rollout.step_timeout_s)")
