"""The quota and the time limit that environments and agents work under."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from raypo.rollout.event_loop import leave

T = TypeVar("T")


class WorkTime:
    """Some work under a quota and a time limit, neither of which counts while it rests."""

    def __init__(self, what: str, quota: asyncio.Semaphore, limit_s: float | None) -> None:
        """Only note them.

        Args:
            what: The method's name, for the error.
            quota: Of all who work at a time.
            limit_s: Seconds between two rests; None: any.
        """
        self._what, self._quota, self._limit_s = what, quota, limit_s
        self._num_rests = 1
        self._works = False
        self._timer: asyncio.TimerHandle | None = None
        self._is_late: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def over(self, work: Callable[[], Awaitable[T]]) -> T:
        """What some work gives, begun as soon as the quota admits it.

        Raises:
            TimeoutError: it took too long: it is cancelled, and left behind where it goes on.
            Exception: whatever it raises.
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
        """Others may work meanwhile; as often as is said goes on only after as many `go_on`."""
        self._num_rests += 1
        if self._works:
            self._works = False
            self._quota.release()
            if self._timer is not None:
                self._timer.cancel()

    async def go_on(self) -> None:
        """Work again, as soon as the quota admits it."""
        self._num_rests -= 1
        if self._num_rests or self._works:
            return
        await self._quota.acquire()
        if self._num_rests or self._works:  # it has begun to rest again meanwhile
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
    """The error of a call that took longer than it may."""
    return TimeoutError(f"{method} gave no answer in {timeout_s:g} s (rollout.step_timeout_s)")
