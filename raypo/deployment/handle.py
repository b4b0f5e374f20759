"""Client side of a deployment: `handle.call(RewardModel.score, rollouts).result()`.

A request is a coroutine on the background event loop of the caller's process, and the caller holds
its future (`raypo.concurrency`). The request is sent to one replica (`raypo.deployment.replica`).
If this replica is lost, the request is retried under the same id on another replica that is up, or
else on the lost replica after its restart. A restarted replica first runs the handle's prerequisite
(`DeploymentHandle.require`). Control calls go to every replica, need no prerequisite and are never
retried.
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
    OnPartialResult,
    ReplicaClient,
    ReplicaState,
    call_timeout,
)
from raypo.deployment.spec import Call, Deployment, Prerequisite, PrerequisiteFailed
from raypo.ray_internals import failed_to_start

P = ParamSpec("P")
T = TypeVar("T")
E = TypeVar("E")
ListMethod = Callable[Concatenate[Any, P], list[Future[E]]]
"""A method that returns a list of futures. The replica awaits them and replies with their results.
"""

RETRY_S = 0.2
"""Seconds to wait before a retry."""


@dataclass(eq=False)
class _SharedPrerequisite:
    """The prerequisite that a handle shares with all handles derived from it."""

    call: Prerequisite | None = None


@dataclass(eq=False)
class DeploymentHandle:
    """Client of a deployment's replicas. It can be pickled and used anywhere in the cluster.

    A call is sent to the handle's preferred replica if that is up, otherwise to the replica with
    the fewest pending calls from this process.
    """

    deployment: Deployment
    replicas: Sequence[ReplicaClient]
    preferred_index: int | None = None
    """Index of the replica to call if it is up. None means no preference."""
    _prerequisite: _SharedPrerequisite = field(default_factory=_SharedPrerequisite)
    _on_partial_result: OnPartialResult | None = None

    @classmethod
    def of(cls, deployment: Deployment, namespace: str, count: int) -> DeploymentHandle:
        """Return the handle of a deployment with `count` replicas."""
        return cls(
            deployment, [ReplicaClient(deployment, namespace, index) for index in range(count)]
        )

    def __repr__(self) -> str:
        return f"DeploymentHandle({self.name})"

    @property
    def name(self) -> str:
        """Name of the deployment, raypo:<run>:<role>."""
        return self.deployment.name

    @overload
    def call(
        self, method: ListMethod[P, E], /, *args: P.args, **kwargs: P.kwargs
    ) -> Future[list[E]]: ...
    @overload
    def call(self, method: Method[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]: ...
    def call(self, method: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call a method on one replica.

        Raises:
            NoReplicaLeft: raised by the future: the call's prerequisite (such as loading the
                weights) failed on every remaining replica.
            DeploymentError: raised by the future: the call timed out, all replicas are permanently
                lost, or none that could serve the call restarted in time.
        """
        call = Call(method.__name__, args, kwargs, self._prerequisite.call)
        return background_future(self._call_any(call))

    def call_all(
        self, method: Method[P, Any], /, *args: P.args, **kwargs: P.kwargs
    ) -> list[Future[Any]]:
        """Send a request to every replica, ahead of queued requests. It is never retried.

        Raises:
            ReplicaLost: raised by a future if its replica is down or cannot serve the request.
        """
        name, required = method.__name__, self._prerequisite.call

        async def send(replica: ReplicaClient) -> Any:
            async with call_timeout(self.deployment):
                return await replica.send(Call(name, args, kwargs, required, is_urgent=True))

        return [background_future(send(replica)) for replica in self.replicas]

    def control(
        self, method: Method[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> list[Future[T]]:
        """Make a control call to every replica (`ReplicaClient.control`)."""
        return [replica.control(method, *args, **kwargs) for replica in self.replicas]

    def per_replica(self) -> list[DeploymentHandle]:
        """Return one handle per replica. It calls other replicas only while its own is down."""
        return [replace(self, preferred_index=replica.index) for replica in self.replicas]

    def reporting(self, on_partial_result: OnPartialResult | None) -> DeploymentHandle:
        """Return a handle that reports partial results of calls that return a list.

        Args:
            on_partial_result: See `OnPartialResult`. None disables the reports.
        """
        return replace(self, _on_partial_result=on_partial_result)

    def require(self, method: Callable[..., Any] | None, /, *args: Any) -> None:
        """Set the prerequisite: a method that every replica runs before it serves a call.

        With it, a restarted replica restores its state at the first call. The method must be cheap
        if the state is already current. None removes the prerequisite. The setting also applies to
        all handles of this process that share this handle's prerequisite.
        """
        self._prerequisite.call = (method.__name__, args) if method else None

    def up(self) -> list[ReplicaClient]:
        """Return the replicas that are up now. If none is up, wait for one.

        Raises:
            DeploymentError: no replica is left, or none is up within `start_timeout_s`.
        """
        limit_s = self.deployment.health_check_timeout_s

        async def find_replicas_up() -> list[ReplicaClient]:
            while True:
                checks = (
                    replica.check_health(limit_s, kill_on_timeout=True) for replica in self.replicas
                )
                are_up = await asyncio.gather(*checks)
                if any(are_up):
                    return list(compress(self.replicas, are_up))
                self._choose({})  # raises if none will come back
                await asyncio.sleep(RETRY_S)

        return background_future(find_replicas_up()).result()

    def wait(self, timeout_s: float) -> None:
        """Wait until every replica has started.

        Raises:
            DeploymentError: a replica took too long or failed to start. The message has its error.
        """

        async def all_started() -> None:
            async with asyncio.timeout(timeout_s):
                await asyncio.gather(*map(self._started, self.replicas))

        try:
            background_future(all_started()).result()
        except TimeoutError:
            unstarted = [
                replica.name for replica in self.replicas if replica.state is not ReplicaState.UP
            ]
            raise DeploymentError(
                f"{', '.join(unstarted)}: not started in {timeout_s:g} s. Look at its log in the "
                "Ray dashboard, or raise placement.timeout_s."
            ) from None

    def is_lost(self) -> bool:
        """Return True if all replicas are permanently lost."""
        self._run_on_all(lambda replica: replica.check_health(PROBE_TIMEOUT_S))
        return all(replica.permanent_error for replica in self.replicas)

    def lost_error(self) -> DeploymentError:
        """Return the error of a deployment whose replicas are all lost for good."""
        last = self.replicas[-1]
        return DeploymentError(
            f"{self.name}: no replica is left. Each replica is restarted up to max_restarts "
            f"({self.deployment.max_restarts}) times, but not after it was shut down or after "
            f"the process that started it has ended. The last one, {last.name}, was lost: "
            f"{last.permanent_error}"
        )

    def shutdown(self, grace_s: float | None = None) -> None:
        """Shut down the replicas.

        Args:
            grace_s: Seconds that ongoing calls get to finish. None means
                `graceful_shutdown_timeout_s`.
        """
        timeout_s = self.deployment.graceful_shutdown_timeout_s if grace_s is None else grace_s
        self._run_on_all(lambda replica: replica.shut_down(timeout_s))

    def _run_on_all(self, method: Callable[[ReplicaClient], Coroutine[Any, Any, object]]) -> None:
        async def run_all() -> None:
            await asyncio.gather(
                *(method(replica) for replica in self.replicas if not replica.permanent_error)
            )

        background_future(run_all()).result()

    async def _call_any(self, call: Call) -> Any:
        """Send a request to one replica after another, until one of them replies."""
        failed_prerequisites: dict[int, str] = {}
        async with call_timeout(self.deployment):
            while True:
                replica = self._choose(failed_prerequisites)
                try:
                    return await replica.send(call, self._on_partial_result)
                except PrerequisiteFailed as error:
                    failed_prerequisites[replica.index] = str(error)
                except ReplicaLost as error:
                    if isinstance(error, RayTaskError):  # the method itself raised it
                        raise
                    await asyncio.sleep(RETRY_S)

    def _choose(self, failed_prerequisites: Mapping[int, str]) -> ReplicaClient:
        """Return the replica to call next, preferably one that was not lost recently."""
        restartable = [replica for replica in self.replicas if replica.permanent_error is None]
        if not restartable:
            raise self.lost_error()
        candidates = [
            replica for replica in restartable if replica.index not in failed_prerequisites
        ]
        if not candidates:
            raise NoReplicaLeft(
                f"{self.name}: no replica is left that can serve "
                f"({'; '.join(failed_prerequisites.values())}); push the weights again."
            )
        start_timeout_s = self.deployment.start_timeout_s
        if start_timeout_s is not None and all(
            replica.unavailable_s > start_timeout_s for replica in candidates
        ):
            raise DeploymentError(
                f"{', '.join(replica.name for replica in candidates)}: not started again in "
                f"{start_timeout_s:g} s (placement.timeout_s). The node may be gone, or its "
                "devices may be in use; look at the replica's log in the Ray dashboard."
            )
        not_lost_recently = [
            replica for replica in candidates if not replica.was_lost_recently
        ] or candidates
        if preferred_replica := [
            replica for replica in not_lost_recently if replica.index == self.preferred_index
        ]:
            return preferred_replica[0]
        return min(not_lost_recently, key=lambda replica: (replica.num_waiting, random.random()))

    async def _started(self, replica: ReplicaClient) -> None:
        while not await replica.check_health(None):
            if replica.permanent_error is not None:
                if failed_to_start(replica.permanent_error) or all(
                    other.permanent_error for other in self.replicas
                ):
                    raise DeploymentError(f"{replica.name}: {replica.permanent_error}")
                return  # another replica can serve
            await asyncio.sleep(RETRY_S)


def local_handle(*targets: Any) -> DeploymentHandle:
    """Return a handle whose replicas are objects of this process."""
    replicas = [LocalReplica(target, index) for index, target in enumerate(targets)]
    return DeploymentHandle(replicas[0].deployment, replicas)
