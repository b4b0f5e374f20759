"""One process's view of one replica: it sends calls, and checks the replica's health meanwhile.

All methods that are coroutines run on the background event loop of this process
(`raypo.concurrency`). While calls wait for a replica, one task checks its health; a replica that
does not answer is killed, which fails its calls, and Ray restarts it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorUnavailableError, RayActorError, RayError

from raypo.cluster.actors import is_lost_actor
from raypo.deployment.spec import Call, Deployment, Lost, Status, Unprepared
from raypo.tracking.trace import note_call

REST_S = 4.0
"""Seconds for which a replica that was lost is tried last. Ray 2.60 takes 2 s to say that an actor
is restarting, each time."""

PROBE_TIMEOUT_S = 3.0
"""Seconds after which a replica that does not answer counts as busy or starting."""

OnEntry = Callable[[int, Any], object]
"""Callback `(index, entry)` for entries of a list that are ready before the others. Called from any
thread, possibly twice for one index."""

logger = logging.getLogger(__name__)


class ReplicaClient:
    """A named actor, looked up at its first use, so that its client can be pickled."""

    def __init__(self, limits: Deployment, namespace: str, index: int) -> None:
        self.limits, self.namespace, self.index = limits, namespace, index
        self.num_waiting = 0
        """Calls of this process that wait for the replica."""
        self.gone: Exception | None = None
        """Error of a replica that Ray does not restart."""
        self.has_answered = False
        """False for a replica that is still starting. It may take long to answer, and must not be
        killed for that."""
        self._actor: ActorHandle | None = None
        self._lost_at: float | None = None
        self._down_since: float | None = None
        self._health_checks: asyncio.Task[None] | None = None

    def __reduce__(self) -> Any:
        return ReplicaClient, (self.limits, self.namespace, self.index)

    @property
    def name(self) -> str:
        """Name of the replica's actor."""
        return f"{self.limits.name}:{self.index}"

    @property
    def is_resting(self) -> bool:
        """True if the replica was lost a moment ago."""
        return self._lost_at is not None and time.monotonic() < self._lost_at + REST_S

    @property
    def down_s(self) -> float:
        """Seconds since the replica was lost or silent; 0 if it has answered since."""
        return 0.0 if self._down_since is None else time.monotonic() - self._down_since

    async def send(self, call: Call, on_entry: OnEntry | None = None) -> Any:
        """Send a call and wait for the reply.

        Returns:
            The value, `Unprepared`, or `Lost` if the replica ended before it replied.

        Raises:
            Exception: whatever the replica's method raised.
        """
        sent_at, reporting = time.time(), None
        self.num_waiting += 1
        if self._health_checks is None:
            self._health_checks = asyncio.create_task(self._check_health())
        try:
            ref = self._remote().call.remote(call)
            if on_entry is not None:
                reporting = asyncio.create_task(self._report_entries(call, on_entry))
            try:
                reply = await ref
            except asyncio.CancelledError:  # the caller gave up, so the replica need not go on
                ray.cancel(ref)
                raise
        except RayError as error:
            return Lost(self._note_lost(error))
        finally:
            self.num_waiting -= 1
            if not self.num_waiting:
                self._health_checks.cancel()
                self._health_checks = None
            if reporting is not None:
                reporting.cancel()
        self._note_answer(reply.reason if isinstance(reply, Lost) else None)
        if not isinstance(reply, Lost | Unprepared):
            note_call(self.name, call.method, sent_at, time.time())
        return reply

    async def ping(self, timeout_s: float | None, *, kills: bool = False) -> Status | None:
        """Return the status of a replica that is up and well; None for any other.

        Args:
            timeout_s: Seconds to wait for its answer. None means no limit.
            kills: Whether to kill a replica that does not answer in time: one that was up, or one
                that had `start_timeout_s` to start.
        """
        try:
            status = await asyncio.wait_for(self._remote().status.remote(), timeout_s)
        except TimeoutError:
            if kills:
                self._down_since = self._down_since or time.monotonic()
                limit = self.limits.start_timeout_s
                if self.has_answered or (limit is not None and self.down_s > limit):
                    self._kill(f"no answer to a health check in {timeout_s:g} s")
            return None
        except RayError as error:
            self._note_lost(error)
            return None
        self._note_answer(status.problem)
        return None if status.problem else status

    async def end(self, grace_s: float) -> None:
        """End the replica for good, after ongoing calls have ended or the time is over."""
        if await self.ping(PROBE_TIMEOUT_S):
            with suppress(RayError, TimeoutError):
                await asyncio.wait_for(self._remote().drain.remote(), grace_s)
        with suppress(RayError):
            ray.kill(self._remote())

    def _remote(self) -> Any:
        if self._actor is None:
            try:
                self._actor = ray.get_actor(self.name, self.namespace)
            except ValueError as error:
                raise RayActorError(error_msg=str(error)) from None
        return self._actor

    async def _check_health(self) -> None:
        while True:
            await asyncio.sleep(self.limits.health_check_period_s)
            await self.ping(self.limits.health_check_timeout_s, kills=True)

    async def _report_entries(self, call: Call, on_entry: OnEntry) -> None:
        num_seen = 0
        with suppress(RayError):  # `send` finds out why
            while True:
                ref = self._remote().entries.remote(call.id, call.part, num_seen)
                num_seen, entries = await ref
                for index, entry in entries.items():
                    await asyncio.to_thread(on_entry, index, entry)

    def _note_answer(self, problem: str | None) -> None:
        if problem is not None:
            logger.warning("%s: %s; Ray restarts it", self.name, problem)
            self._note_down()
            return
        self.has_answered, self._lost_at, self._down_since = True, None, None

    def _note_lost(self, error: Exception) -> str:
        """Note that the replica is restarting, or gone for good; raise any other error."""
        if not is_lost_actor(error):
            raise error
        if not isinstance(error, ActorUnavailableError):
            self.gone = error
        self._note_down()
        return f"the replica was lost: {error}"

    def _note_down(self) -> None:
        self.has_answered, self._lost_at = False, time.monotonic()
        self._down_since = self._down_since or self._lost_at

    def _kill(self, why: str) -> None:
        logger.warning(
            "%s: %s (health_check_timeout_s); it is killed, and Ray restarts it", self.name, why
        )
        self.has_answered = False  # its next process has to be up before it can hang
        ray.kill(self._remote(), no_restart=False)
