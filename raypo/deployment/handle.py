"""Client side of a deployment: `handle.call(RewardModel.score, rollouts).result()`.

A request is a coroutine on the background event loop of its process, and its caller holds a future
(`raypo.concurrency`). It goes to one replica (`raypo.deployment.replica`). If this replica is lost,
the request is repeated under the same id on another replica that is up. If no other replica is up,
it is repeated on the restarted one. The restarted replica first makes the call that the handle
requires (its prerequisite, see `DeploymentHandle.require`). Control calls go to every replica, need
no prerequisite and are not repeated.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import Any, Concatenate, ParamSpec, TypeVar, overload

from ray.exceptions import RayTaskError

from raypo.cluster.actors import DeploymentError, NoReplicaLeft, ReplicaLost
from raypo.concurrency import background_future
from raypo.deployment.replica import (
    PROBE_TIMEOUT_S,
    LocalReplica,
    Method,
    OnEntry,
    ReplicaClient,
    State,
    time_limit,
)
from raypo.deployment.spec import Call, Deployment, Prerequisite, Unprepared
from raypo.ray_internals import failed_to_start

P = ParamSpec("P")
T = TypeVar("T")
E = TypeVar("E")
ListMethod = Callable[Concatenate[Any, P], list[Future[E]]]
"""A method whose futures the replica awaits."""

RETRY_S = 0.2


@dataclass(eq=False)
class _SharedPrerequisite:
    """The prerequisite of a handle and of all handles that were derived from it."""

    call: Prerequisite | None = None


@dataclass(eq=False)
class DeploymentHandle:
    """Client of a deployment's replicas. It can be pickled and used anywhere in the cluster.

    A call goes to the handle's own replica while that is up, else to the replica for which the
    fewest calls of this process wait.
    """

    limits: Deployment
    replicas: Sequence[ReplicaClient]
    own: int | None = None
    """Index of the handle's own replica. None means that it has none."""
    _prerequisite: _SharedPrerequisite = field(default_factory=_SharedPrerequisite)
    _on_entry: OnEntry | None = None

    @classmethod
    def of(cls, limits: Deployment, namespace: str, count: int) -> DeploymentHandle:
        """Return the handle of a deployment with `count` replicas."""
        return cls(limits, [ReplicaClient(limits, namespace, index) for index in range(count)])

    def __repr__(self) -> str:
        return f"DeploymentHandle({self.name})"

    @property
    def name(self) -> str:
        """Name of the deployment, raypo:<run>:<role>."""
        return self.limits.name

    @overload
    def call(
        self, method: ListMethod[P, E], /, *args: P.args, **kwargs: P.kwargs
    ) -> Future[list[E]]: ...
    @overload
    def call(self, method: Method[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]: ...
    def call(self, method: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call a method on one replica.

        Raises:
            NoReplicaLeft: raised by the future: replicas are left, but the call's prerequisite
                (such as loading the weights) failed on each of them.
            DeploymentError: raised by the future: the call timed out, all replicas are permanently
                lost, or none that could serve the call restarted in time.
        """
        call = Call(method.__name__, args, kwargs, self._prerequisite.call)
        return background_future(self._answer(call))

    def call_all(
        self, method: Method[P, Any], /, *args: P.args, **kwargs: P.kwargs
    ) -> list[Future[Any]]:
        """Send a request to every replica, ahead of queued ones. It is never retried.

        Raises:
            ReplicaLost: raised by a future: its replica is down or cannot serve the request.
        """
        name, required = method.__name__, self._prerequisite.call

        async def answer(replica: ReplicaClient) -> Any:
            async with time_limit(self.limits):
                return await replica.send(Call(name, args, kwargs, required, is_urgent=True))

        return [background_future(answer(replica)) for replica in self.replicas]

    def control(
        self, method: Method[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> list[Future[T]]:
        """Make a control call to every replica (`ReplicaClient.control`)."""
        return [replica.control(method, *args, **kwargs) for replica in self.replicas]

    def per_replica(self) -> list[DeploymentHandle]:
        """Return a handle for each replica, which calls others only while that one is down."""
        return [replace(self, own=replica.index) for replica in self.replicas]

    def reporting(self, on_entry: OnEntry | None) -> DeploymentHandle:
        """Derive a handle for calls whose value is a list.

        Args:
            on_entry: Callback for each result that is ready before the whole list is.
        """
        return replace(self, _on_entry=on_entry)

    def require(self, method: Callable[..., Any] | None, /, *args: Any) -> None:
        """Set the prerequisite, a method that every replica runs before it serves a call.

        A restarted replica thereby restores its state when it is first called. The method must be
        cheap if the state is current. None removes the prerequisite. The setting applies to all
        derived handles of this process.
        """
        self._prerequisite.call = (method.__name__, args) if method else None

    def up(self) -> list[ReplicaClient]:
        """Return the replicas that are up now. If none is up, wait for one.

        Raises:
            DeploymentError: no replica is left, or none is up within `start_timeout_s`.
        """
        limit_s = self.limits.health_check_timeout_s

        async def find() -> list[ReplicaClient]:
            while True:
                checks = (replica.is_up(limit_s, kills=True) for replica in self.replicas)
                are_up = await asyncio.gather(*checks)
                if any(are_up):
                    return list(compress(self.replicas, are_up))
                self._choose({})  # raises if none will come back
                await asyncio.sleep(RETRY_S)

        return background_future(find()).result()

    def wait(self, timeout_s: float) -> None:
        """Wait until every replica has started.

        Raises:
            DeploymentError: a replica took too long, or failed to start. The message has its error.
        """

        async def all_started() -> None:
            async with asyncio.timeout(timeout_s):
                await asyncio.gather(*map(self._started, self.replicas))

        try:
            background_future(all_started()).result()
        except TimeoutError:
            late = [replica.name for replica in self.replicas if replica.state is not State.UP]
            raise DeploymentError(
                f"{', '.join(late)}: not started in {timeout_s:g} s. Look at its log in the Ray "
                f"dashboard, or raise placement.timeout_s."
            ) from None

    def is_lost(self) -> bool:
        """Return True if all replicas are lost for good."""
        self._on_all(lambda replica: replica.is_up(PROBE_TIMEOUT_S))
        return all(replica.gone for replica in self.replicas)

    def lost_error(self) -> DeploymentError:
        """Return the error of a deployment whose replicas are all lost for good."""
        last = self.replicas[-1]
        return DeploymentError(
            f"{self.name}: no replica is left. Each replica is restarted up to max_restarts "
            f"({self.limits.max_restarts}) times, but not after it was shut down or after "
            f"the process that started it has ended. The last one, {last.name}, was lost: "
            f"{last.gone}"
        )

    def shutdown(self, grace_s: float | None = None) -> None:
        """Shut down the replicas.

        Args:
            grace_s: Seconds that ongoing calls get to finish. None means
                `graceful_shutdown_timeout_s`.
        """
        limit = self.limits.graceful_shutdown_timeout_s if grace_s is None else grace_s
        self._on_all(lambda replica: replica.end(limit))

    def _on_all(self, method: Callable[[ReplicaClient], Coroutine[Any, Any, object]]) -> None:
        async def all_of_them() -> None:
            await asyncio.gather(
                *(method(replica) for replica in self.replicas if not replica.gone)
            )

        background_future(all_of_them()).result()

    async def _answer(self, call: Call) -> Any:
        """Send a request to one replica after another until one replies."""
        unprepared: dict[int, str] = {}
        async with time_limit(self.limits):
            while True:
                replica = self._choose(unprepared)
                try:
                    return await replica.send(call, self._on_entry)
                except Unprepared as error:
                    unprepared[replica.index] = str(error)
                except ReplicaLost as error:
                    if isinstance(error, RayTaskError):  # the method itself raised it
                        raise
                    await asyncio.sleep(RETRY_S)

    def _choose(self, unprepared: Mapping[int, str]) -> ReplicaClient:
        """Return the replica to call next, if possible one that was not lost a moment ago."""
        left = [replica for replica in self.replicas if replica.gone is None]
        if not left:
            raise self.lost_error()
        able = [replica for replica in left if replica.index not in unprepared]
        if not able:
            raise NoReplicaLeft(
                f"{self.name}: no replica is left that can serve "
                f"({'; '.join(unprepared.values())}); push the weights again."
            )
        limit = self.limits.start_timeout_s
        if limit is not None and all(replica.down_s > limit for replica in able):
            raise DeploymentError(
                f"{', '.join(replica.name for replica in able)}: not started again in {limit:g} "
                "s (placement.timeout_s). The node may be gone, or its devices may be in use; "
                "look at the replica's log in the Ray dashboard."
            )
        preferred = [replica for replica in able if not replica.is_avoided] or able
        if own := [replica for replica in preferred if replica.index == self.own]:
            return own[0]
        return min(preferred, key=lambda replica: (replica.num_waiting, random.random()))

    async def _started(self, replica: ReplicaClient) -> None:
        while not await replica.is_up(None):
            if replica.gone is not None:
                if failed_to_start(replica.gone) or all(other.gone for other in self.replicas):
                    raise DeploymentError(f"{replica.name}: {replica.gone}")
                return  # another one serves
            await asyncio.sleep(RETRY_S)


def local_handle(*targets: Any) -> DeploymentHandle:
    """Return a handle whose replicas are objects of this process."""
    replicas = [LocalReplica(target, index) for index, target in enumerate(targets)]
    return DeploymentHandle(replicas[0].limits, replicas)
