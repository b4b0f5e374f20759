"""Callers' side of a deployment: `handle.call(RewardModel.score, rollouts).result()`.

A call is a coroutine on the background event loop of its process, and its caller holds a future:

    handle.call -> ReplicaClient.send -> (Ray) Replica.call -> the method, in a replica's thread

Retry rule: if the replica is lost, the call is repeated under the same id, on another replica that
is up, else on the restarted one, which first makes the call that the handle requires.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, Concatenate, ParamSpec, TypeVar, overload

from raypo.cluster.actors import DeploymentError, NoReplicaLeft, ReplicaLost
from raypo.concurrency import background_future
from raypo.deployment.replica_client import PROBE_TIMEOUT_S, OnEntry, ReplicaClient
from raypo.deployment.spec import Call, Deployment, Lost, Prerequisite, Status, Unprepared
from raypo.ray_internals import failed_to_start

P = ParamSpec("P")
T = TypeVar("T")
E = TypeVar("E")
Method = Callable[Concatenate[Any, P], T]
"""A method of the deployment's class, as `Engine.generate`; its name is what travels."""
ListMethod = Callable[Concatenate[Any, P], list[Future[E]]]
"""A method whose futures the replica awaits."""

RETRY_S = 0.2


@dataclass(eq=False)
class _SharedPrerequisite:
    """The prerequisite of a handle and of all handles that were derived from it."""

    call: Prerequisite | None = None


@dataclass(eq=False)
class DeploymentHandle:
    """Calls the replicas of a deployment; can be pickled and used anywhere in the cluster.

    A call goes to a preferred replica with room, else to the one for which the fewest calls of this
    process wait.
    """

    limits: Deployment
    replicas: Sequence[ReplicaClient]
    preferred: tuple[int, ...] = ()
    """Indices of the replicas that it tries first."""
    _prerequisite: _SharedPrerequisite = field(default_factory=_SharedPrerequisite)
    _shared_call: tuple[str, tuple[int, ...]] | None = None
    _on_entry: OnEntry | None = None
    _is_sticky: bool = False

    @classmethod
    def of(cls, limits: Deployment, namespace: str, count: int) -> DeploymentHandle:
        """Return the handle of a deployment with so many replicas."""
        return cls(limits, [ReplicaClient(limits, namespace, index) for index in range(count)])

    def __repr__(self) -> str:
        return f"DeploymentHandle({self.name})"

    @property
    def name(self) -> str:
        """raypo:<run>:<role>."""
        return self.limits.name

    @property
    def names(self) -> list[str]:
        """Name of each replica, in the order of the values of `call_all` and `control`."""
        return [replica.name for replica in self.replicas]

    @overload
    def call(
        self, method: ListMethod[P, E], /, *args: P.args, **kwargs: P.kwargs
    ) -> Future[list[E]]: ...
    @overload
    def call(self, method: Method[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]: ...
    def call(self, method: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call a method on one replica.

        Raises:
            NoReplicaLeft: in the future; the prerequisite fails on all replicas that are left.
            DeploymentError: in the future; there is no value in time, or no replica is left.
        """
        call = Call(method.__name__, args, kwargs, self._prerequisite.call)
        if self._shared_call is not None:
            id, part = self._shared_call
            call = replace(call, id=id, part=part)
        return background_future(self._in_time(self._retried(call)))

    @overload
    def call_all(
        self, method: ListMethod[P, E], /, *args: P.args, **kwargs: P.kwargs
    ) -> list[Future[list[E]]]: ...
    @overload
    def call_all(
        self, method: Method[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> list[Future[T]]: ...
    def call_all(self, method: Any, /, *args: Any, **kwargs: Any) -> list[Future[Any]]:
        """Call a method on every replica, ahead of its queue; a call is never repeated.

        Raises:
            ReplicaLost: in a future; this replica is down or cannot serve the call.
        """
        return self._call_all(method.__name__, args, kwargs, self._prerequisite.call)

    def control(
        self, method: Method[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> list[Future[T]]:
        """Call a method on every replica as `call_all` does, without the prerequisite."""
        return self._call_all(method.__name__, args, kwargs, None)

    def preferring(self, *indexes: int) -> DeploymentHandle:
        """Derive a handle that tries these replicas first, as long as one of them has room."""
        return replace(self, preferred=indexes)

    def per_replica(self) -> list[DeploymentHandle]:
        """Derive a handle for each preferred replica; return this one if there is none.

        Each handle stays with its replica while that is up, however long its queue is.
        """
        if not self.preferred:
            return [self]
        return [replace(self, preferred=(index,), _is_sticky=True) for index in self.preferred]

    def sharing_call(self, id: str, part: Sequence[int]) -> DeploymentHandle:
        """Derive a handle for one call that other processes make too, under the same id.

        The replica runs the call once. Each process gets its part of the value, which is a list.
        """
        return replace(self, _shared_call=(id, tuple(part)))

    def reporting(self, on_entry: OnEntry | None) -> DeploymentHandle:
        """Derive a handle whose calls report entries of their list that are ready early."""
        return replace(self, _on_entry=on_entry)

    def require(self, method: Callable[..., Any] | None, /, *args: Any) -> None:
        """Set the call that every replica makes to itself before each call. None means no call.

        A restarted replica thereby catches up when it is first called. The call must cost nothing
        if there is nothing to catch up with. It applies to all derived handles of this process.
        """
        self._prerequisite.call = (method.__name__, args) if method else None

    @property
    def required(self) -> tuple[Any, ...]:
        """The arguments of the required call."""
        return self._prerequisite.call[1] if self._prerequisite.call else ()

    def up(self) -> DeploymentHandle:
        """Derive a handle to the replicas that are up now. Wait for one if none is.

        Raises:
            DeploymentError: none is left, or none is up within `start_timeout_s`.
        """
        found = background_future(self._find_up()).result()
        return replace(self, replicas=[replica for replica, _ in found])

    def statuses(self) -> list[Status]:
        """Return the status of each replica that is up; wait for one if none is."""
        return [status for _, status in background_future(self._find_up()).result()]

    def wait(self, timeout_s: float) -> None:
        """Wait until every replica has started.

        Raises:
            DeploymentError: one failed to start, with its error, or took too long.
        """

        async def all_started() -> None:
            with_limit = (self._started(replica) for replica in self.replicas)
            await asyncio.wait_for(asyncio.gather(*with_limit), timeout_s)

        try:
            background_future(all_started()).result()
        except TimeoutError:
            late = [each.name for each in self.replicas if not each.has_answered]
            raise DeploymentError(
                f"{', '.join(late)}: not started in {timeout_s:g} s. Look at its log in the Ray "
                f"dashboard, or raise placement.timeout_s."
            ) from None

    def is_lost(self) -> bool:
        """Return whether no replica is left or will ever be."""
        self._on_all(lambda replica: replica.ping(PROBE_TIMEOUT_S))
        return all(replica.gone for replica in self.replicas)

    def shutdown(self, grace_s: float | None = None) -> None:
        """End the replicas.

        Args:
            grace_s: Seconds for ongoing calls. None means `graceful_shutdown_timeout_s`.
        """
        limit = self.limits.graceful_shutdown_timeout_s if grace_s is None else grace_s
        self._on_all(lambda replica: replica.end(limit))

    def _on_all(self, method: Callable[[ReplicaClient], Coroutine[Any, Any, object]]) -> None:
        async def all_of_them() -> None:
            await asyncio.gather(*(method(each) for each in self.replicas if not each.gone))

        background_future(all_of_them()).result()

    def _call_all(
        self,
        method: str,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        prerequisite: Prerequisite | None,
    ) -> list[Future[Any]]:
        calls = [
            self._once(replica, Call(method, args, kwargs, prerequisite, is_control=True))
            for replica in self.replicas
        ]
        return [background_future(self._in_time(call)) for call in calls]

    async def _in_time(self, call: Coroutine[Any, Any, T]) -> T:
        limit = asyncio.timeout(self.limits.request_timeout_s)
        try:
            async with limit:
                return await call
        except TimeoutError:
            if not limit.expired():
                raise
            raise DeploymentError(
                f"{self.name}: no answer in {self.limits.request_timeout_s:g} s. Look at its log "
                f"in the Ray dashboard, or raise placement.deployment.request_timeout_s."
            ) from None

    async def _once(self, replica: ReplicaClient, call: Call) -> Any:
        reply = await replica.send(call)
        if isinstance(reply, Lost | Unprepared):
            raise ReplicaLost(f"{replica.name}: {reply.reason}")
        return reply

    async def _retried(self, call: Call) -> Any:
        unprepared: dict[int, str] = {}
        while True:
            replica = self._choose(unprepared)
            reply = await replica.send(call, self._on_entry)
            if isinstance(reply, Unprepared):
                unprepared[replica.index] = reply.reason
            elif isinstance(reply, Lost):
                await asyncio.sleep(RETRY_S)
            else:
                return reply

    def _choose(self, unprepared: Mapping[int, str]) -> ReplicaClient:
        """Return the replica that is called next: one that is down only if no other is left."""
        left = [replica for replica in self.replicas if replica.gone is None]
        if not left:
            last = self.replicas[-1]
            raise DeploymentError(
                f"{self.name}: no replica is left. Each is restarted max_restarts "
                f"({self.limits.max_restarts}) times, and not after it was shut down or the "
                f"process that started it has ended. The last one, {last.name}, was lost: "
                f"{last.gone}"
            )
        able = [replica for replica in left if replica.index not in unprepared]
        if not able:
            raise NoReplicaLeft(
                f"{self.name}: no replica is left that can serve "
                f"({'; '.join(unprepared.values())}); push the weights again."
            )
        limit = self.limits.start_timeout_s
        if limit is not None and all(replica.down_s > limit for replica in able):
            raise DeploymentError(
                f"{', '.join(replica.name for replica in able)}: not started again in {limit:g} s "
                f"(placement.timeout_s). The node may be gone, or its devices be taken; look at "
                f"the replica's log in the Ray dashboard."
            )
        awake = [replica for replica in able if not replica.is_resting] or able
        by_index = {replica.index: replica for replica in awake}
        for index in self.preferred:
            own = by_index.get(index)
            if own and (self._is_sticky or own.num_waiting < self.limits.max_ongoing_requests):
                return own
        return min(awake, key=lambda replica: (replica.num_waiting, random.random()))

    async def _find_up(self) -> list[tuple[ReplicaClient, Status]]:
        timeout_s = self.limits.health_check_timeout_s
        while True:
            pings = (replica.ping(timeout_s, kills=True) for replica in self.replicas)
            statuses = zip(self.replicas, await asyncio.gather(*pings), strict=True)
            if up := [(replica, status) for replica, status in statuses if status is not None]:
                return up
            self._choose({})  # raises if none will come back
            await asyncio.sleep(RETRY_S)

    async def _started(self, replica: ReplicaClient) -> None:
        while await replica.ping(None) is None:
            if replica.gone is not None:
                if failed_to_start(replica.gone) or all(each.gone for each in self.replicas):
                    raise DeploymentError(f"{replica.name}: {replica.gone}")
                return  # another one serves
            await asyncio.sleep(RETRY_S)
