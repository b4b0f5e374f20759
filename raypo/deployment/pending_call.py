"""Futures of calls to replicas, and the rules by which a call is retried.

No thread runs here. The caller's thread (or event loop) sends the call when the future is made, and
does everything else inside `result` (or `await`): it waits for the reply, checks the replica's
health meanwhile, and sends the call to another replica if the first one is lost.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

import ray
from ray.exceptions import ActorUnavailableError, RayError

from raypo.cluster.actors import NoReplicaLeft, ReplicaLost, is_lost_actor
from raypo.deployment.replicas import PROBE_TIMEOUT_S, RETRY_S, Deadline, Replicas
from raypo.deployment.spec import (
    Call,
    Incarnation,
    Prerequisite,
    Refused,
    Unhealthy,
    Unprepared,
)
from raypo.tracking.trace import note_call

P = ParamSpec("P")
T = TypeVar("T")


class PendingCall(Generic[T]):
    """Future of a remote call.

    It is retried on another replica if the first one dies; the id makes it idempotent.
    """

    def __init__(
        self,
        replicas: Replicas,
        call: Call,
        prefer: Sequence[int],
        *,
        is_sticky: bool = False,
        waits: bool = True,
    ) -> None:
        """Send the call, unless no replica can be chosen without waiting and `waits` is false."""
        self._replicas, self._call, self._prefer = replicas, call, prefer
        self._is_sticky = is_sticky
        self._sent_at = time.time()
        self._refused: set[int] = set()
        self._unprepared: dict[int, str] = {}
        self._value: tuple[T] | None = None
        self._num_seen = 0
        """Entries of the list that `partial` has returned."""
        self._send(replicas.choose(prefer, avoid=(), is_sticky=is_sticky, waits=waits))

    def result(self, timeout_s: float | None = None) -> T:
        """Wait for the value.

        Args:
            timeout_s: Seconds, retries included. None means the deployment's `request_timeout_s`.

        Raises:
            NoReplicaLeft: the prerequisite fails on all replicas that are up.
            DeploymentError: there is no value in time, or no replica is left.
            Exception: whatever the replica's method raised.
        """
        deadline = Deadline(timeout_s or self._replicas.limits.request_timeout_s)
        while self._value is None:
            if self._ref is None:
                self._send(self._next_replica(deadline))
            else:
                self._receive(deadline)
        return self._value[0]

    def partial(self) -> dict[int, Any]:
        """Return entries of the value, a list, that became ready since the last call.

        Waits a moment for some. An entry may come twice; none come while the replica is lost. May
        be called in another thread than `result`.
        """
        index, id, part = self._index, self._call.id, self._call.part
        if index is None:
            return {}
        try:
            asked = self._replicas.actor(index).partial.remote(id, part, self._num_seen)
            self._num_seen, entries = ray.get(asked, timeout=PROBE_TIMEOUT_S)
        except (RayError, ValueError):
            return {}
        return entries

    def __await__(self) -> Generator[Any, None, T]:
        """Wait for the value, as `result` does, without a thread that blocks."""
        return self._awaited().__await__()

    async def _awaited(self) -> T:
        replicas = self._replicas
        deadline = Deadline(replicas.limits.request_timeout_s)
        while self._value is None:
            if self._ref is None:
                # Choosing asks replicas for their load, which blocks: at most a few threads do so
                # at a time, however many coroutines wait.
                while not replicas.choosing.acquire(blocking=False):
                    await asyncio.sleep(RETRY_S)
                try:
                    self._send(await asyncio.to_thread(self._next_replica, deadline))
                finally:
                    replicas.choosing.release()
                continue
            index, ref = self._index, self._ref
            assert index is not None
            here = asyncio.wrap_future(ref.future())
            try:
                while not here.done():
                    period = deadline.left(replicas.limits.health_check_period_s)
                    if not (await asyncio.wait([here], timeout=period))[0]:
                        await asyncio.to_thread(replicas.check_health, index, ref, deadline)
            except asyncio.CancelledError:  # the caller gave up, so the replica need not go on
                here.cancel()
                ray.cancel(ref)
                raise
            here.exception()  # mark it as retrieved; `_receive` handles it
            await asyncio.to_thread(self._receive, deadline)
        return self._value[0]

    def _send(self, index: int | None) -> None:
        self._index, self._ref, self._num_seen = index, None, 0
        if index is not None:
            self._ref: Any = self._replicas.actor(index).call.remote(self._call)

    def _receive(self, deadline: Deadline) -> None:
        index, ref, replicas = self._index, self._ref, self._replicas
        assert index is not None
        self._ref = None
        try:
            reply = replicas.watch(index, ref, deadline)
        except RayError as error:
            if not is_lost_actor(error):
                raise
            # The replica may have the call although its reply was lost: send it there again, which
            # the id makes safe. A replica that has really gone does not report its load.
            is_restarting = isinstance(error, ActorUnavailableError)
            if is_restarting and replicas.ask("load", [index], PROBE_TIMEOUT_S)[0]:
                self._send(index)
        else:
            if isinstance(reply, Refused):
                self._refused.add(index)
            elif isinstance(reply, Unprepared):
                self._unprepared[index] = reply.reason
            elif not isinstance(reply, Unhealthy):
                self._value = (reply,)
                note_call(replicas.name(index), self._call.method, self._sent_at, time.time())

    def _next_replica(self, deadline: Deadline) -> int:
        """Choose a replica that has not refused; wait for room, or for one to restart."""
        replicas, start = self._replicas, Deadline(self._replicas.limits.start_timeout_s)
        while True:
            avoid = {*self._refused, *self._unprepared}
            index = replicas.choose(self._prefer, avoid, is_sticky=self._is_sticky)
            if index is not None:
                return index
            name, left = replicas.limits.name, set(replicas.left())
            if not left or left - self._refused - self._unprepared.keys():
                replicas.wait_for_a_start(start)
            elif not self._refused:
                raise NoReplicaLeft(
                    f"{name}: no replica is left that can serve "
                    f"({'; '.join(self._unprepared.values())}); push the weights again."
                )
            if not deadline.sleep():
                raise deadline.passed(name)
            self._refused.clear()


class PinnedCall(Generic[T]):
    """Future of a call to one incarnation of one replica; it is never retried."""

    def __init__(self, replicas: Replicas, index: int, method: str, ref: Any) -> None:
        """Wrap a call that was sent."""
        self.name = replicas.name(index)
        self._replicas, self._index, self._method, self._ref = replicas, index, method, ref
        self._sent_at = time.time()

    def failure(self) -> Exception | None:
        """Return the error that `result` would raise; None if there is none yet. Never waits."""
        if not ray.wait([self._ref], timeout=0)[0]:
            return None
        try:
            self.result()
        except Exception as error:
            return error
        return None

    def result(self, timeout_s: float | None = None) -> T:
        """Wait for the value.

        Raises:
            ReplicaLost: the replica ended, or reports that it cannot go on.
            DeploymentError: it did not reply in time.
            Exception: whatever the replica's method raised.
        """
        deadline = Deadline(timeout_s or self._replicas.limits.request_timeout_s)
        try:
            reply = self._replicas.watch(self._index, self._ref, deadline)
        except RayError as error:
            if not is_lost_actor(error):
                raise
            raise ReplicaLost(f"{self.name}: the replica was lost: {error}") from error
        if isinstance(reply, Unhealthy | Unprepared):
            raise ReplicaLost(f"{self.name}: {reply.reason}")
        note_call(self.name, self._method, self._sent_at, time.time())
        return reply


@dataclass(frozen=True)
class PinnedReplicas:
    """A fixed set of incarnations, for a conversation of several calls: `up.call(method, ...)`."""

    _replicas: Replicas
    _incarnations: dict[int, Incarnation]
    _prerequisite: Prerequisite | None = None

    @property
    def names(self) -> list[str]:
        """Names of the replicas."""
        return [self._replicas.name(index) for index in self._incarnations]

    def call(
        self,
        method: Callable[Concatenate[Any, P], T],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> list[PinnedCall[T]]:
        """Call a method on each of them, ahead of their queues."""
        name, pending = method.__name__, []
        for index, incarnation in self._incarnations.items():
            call = Call(name, args, kwargs, self._prerequisite, incarnation.id)
            ref = self._replicas.actor(index).call.remote(call)
            pending.append(PinnedCall(self._replicas, index, name, ref))
        return pending
