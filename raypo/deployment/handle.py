"""Client side of a deployment: `handle.call(RewardModel.score, rollouts).result()`.

Concurrency. A call is a coroutine on the background event loop of its process, and its caller holds
a future (`raypo.concurrency`):

    handle.call -> _answer -> ReplicaClient.send -> (Ray) Replica.call -> the method, in a thread

While calls wait for a replica, one task of the loop checks its health. A replica that does not
answer is killed. Its calls then fail, and Ray restarts it.

Retry rule: if a replica is lost, its calls are repeated under the same id on another replica that
is up. If no other replica is up, they are repeated on the restarted one. The restarted replica
first makes the call that the handle requires (its prerequisite, see `DeploymentHandle.require`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Concatenate, ParamSpec, TypeVar, overload

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorUnavailableError, RayActorError, RayError

from raypo.cluster.actors import DeploymentError, NoReplicaLeft, ReplicaLost, is_lost_actor
from raypo.concurrency import background_future, daemon_future
from raypo.deployment.spec import (
    Call,
    Deployment,
    Lost,
    Prerequisite,
    Status,
    Unprepared,
)
from raypo.ray_internals import failed_to_start
from raypo.tracking.logs import CONSOLE_KEY
from raypo.tracking.trace import note_call

P = ParamSpec("P")
T = TypeVar("T")
E = TypeVar("E")
Method = Callable[Concatenate[Any, P], T]
"""A method of the deployment's class, such as `Engine.submit`. Only its name is sent."""
ListMethod = Callable[Concatenate[Any, P], list[Future[E]]]
"""A method whose futures the replica awaits."""
OnEntry = Callable[[int, Any], object]
"""Callback `(index, result)` for results of a list of futures that are ready before the whole list
is. Called from any thread, possibly twice for one index."""

RETRY_S = 0.2
REST_S = 4.0
"""Seconds after a replica was lost during which calls prefer all other replicas. While Ray 2.60
restarts a replica, each call to it blocks for 2 s."""
PROBE_TIMEOUT_S = 3.0
"""Seconds after which a replica that does not answer counts as busy or starting."""

logger = logging.getLogger(__name__)


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

    @property
    def names(self) -> list[str]:
        """Name of each replica, in the order in which `call_all` and `control` return values."""
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
            NoReplicaLeft: raised by the future: replicas are left, but the call's prerequisite
                (such as loading the weights) failed on each of them.
            DeploymentError: raised by the future: the call timed out, all replicas are permanently
                lost, or none that could serve the call restarted in time.
        """
        call = Call(method.__name__, args, kwargs, self._prerequisite.call)
        return background_future(self._answer(call))

    @overload
    def call_all(
        self, method: ListMethod[P, E], /, *args: P.args, **kwargs: P.kwargs
    ) -> list[Future[list[E]]]: ...
    @overload
    def call_all(
        self, method: Method[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> list[Future[T]]: ...
    def call_all(self, method: Any, /, *args: Any, **kwargs: Any) -> list[Future[Any]]:
        """Call a method on every replica, ahead of queued calls. These calls are never retried.

        Raises:
            ReplicaLost: raised by a future: its replica is down or cannot serve the call.
        """
        name, required = method.__name__, self._prerequisite.call
        return [
            background_future(self._answer(Call(name, args, kwargs, required, True), each))
            for each in self.replicas
        ]

    def control(
        self, method: Method[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> list[Future[T]]:
        """Call a method on every replica like `call_all`, but do not run the prerequisite first."""
        return [
            background_future(self._answer(Call(method.__name__, args, kwargs, None, True), each))
            for each in self.replicas
        ]

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

    @property
    def required(self) -> tuple[Any, ...]:
        """Arguments of the prerequisite. Empty if there is none."""
        return self._prerequisite.call[1] if self._prerequisite.call else ()

    def up(self) -> DeploymentHandle:
        """Derive a handle to the replicas that are up now. If none is up, wait for one.

        Raises:
            DeploymentError: no replica is left, or none is up within `start_timeout_s`.
        """
        found = background_future(self._find_up()).result()
        return replace(self, replicas=[replica for replica, _ in found])

    def statuses(self) -> list[Status]:
        """Return the status of each replica that is up. If none is up, wait for one."""
        return [status for _, status in background_future(self._find_up()).result()]

    def wait(self, timeout_s: float) -> None:
        """Wait until every replica has started.

        Raises:
            DeploymentError: a replica took too long, or failed to start. The message has its error.
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
        """Return True if all replicas are lost for good."""
        self._on_all(lambda replica: replica.ping(PROBE_TIMEOUT_S))
        return all(replica.gone for replica in self.replicas)

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
            await asyncio.gather(*(method(each) for each in self.replicas if not each.gone))

        background_future(all_of_them()).result()

    async def _answer(self, call: Call, only: ReplicaClient | None = None) -> Any:
        """Send a call to one replica after another until one replies.

        If `only` is given, the call is sent to this replica and not retried.
        """
        unprepared: dict[int, str] = {}
        limit = asyncio.timeout(self.limits.request_timeout_s)
        try:
            async with limit:
                while True:
                    replica = only or self._choose(unprepared)
                    reply = await replica.send(call, self._on_entry)
                    if not isinstance(reply, Lost | Unprepared):
                        return reply
                    if only is not None:
                        raise ReplicaLost(f"{replica.name}: {reply.reason}")
                    if isinstance(reply, Unprepared):
                        unprepared[replica.index] = reply.reason
                    else:
                        await asyncio.sleep(RETRY_S)
        except TimeoutError:
            if not limit.expired():
                raise
            raise DeploymentError(
                f"{self.name}: no answer in {self.limits.request_timeout_s:g} s. Look at its log "
                f"in the Ray dashboard, or raise placement.deployment.request_timeout_s."
            ) from None

    def _choose(self, unprepared: Mapping[int, str]) -> ReplicaClient:
        """Return the replica to call next, if possible one that was not lost a moment ago."""
        left = [replica for replica in self.replicas if replica.gone is None]
        if not left:
            last = self.replicas[-1]
            raise DeploymentError(
                f"{self.name}: no replica is left. Each replica is restarted up to max_restarts "
                f"({self.limits.max_restarts}) times, but not after it was shut down or after "
                f"the process that started it has ended. The last one, {last.name}, was lost: "
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
                f"{', '.join(replica.name for replica in able)}: not started again in {limit:g} "
                "s (placement.timeout_s). The node may be gone, or its devices may be in use; "
                "look at the replica's log in the Ray dashboard."
            )
        awake = [replica for replica in able if not replica.is_resting] or able
        if own := [replica for replica in awake if replica.index == self.own]:
            return own[0]
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


class ReplicaClient:
    """One process's view of one replica: a named actor, looked up at its first use.

    All methods that are coroutines run on the background event loop of this process.
    """

    def __init__(self, limits: Deployment, namespace: str, index: int) -> None:
        self.limits, self.namespace, self.index = limits, namespace, index
        self.num_waiting = 0
        """Calls of this process that wait for the replica."""
        self.gone: Exception | None = None
        """Error of a replica that Ray does not restart."""
        self.has_answered = False
        """False while the replica is starting. It may then take long to answer a health check, and
        is killed only after `start_timeout_s`."""
        self._actor: ActorHandle | None = None
        self._lost_at: float | None = None
        self._down_since: float | None = None
        self._told_loss = False
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
        """Seconds that the replica has been lost or unresponsive, or 0 if it is neither."""
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
            except asyncio.CancelledError:  # the caller gave up, so the replica need not continue
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
        """Return the status of the replica, or None if it is not up or reports a problem.

        Args:
            timeout_s: Seconds to wait for the status. None means no limit.
            kills: Whether to kill a replica that does not answer in time. A replica that is
                starting is killed only after `start_timeout_s`.
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
        """End the replica for good, after ongoing calls have ended or `grace_s` has passed."""
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
                entries = await self._remote().entries.remote(call.id, num_seen)
                num_seen += len(entries)
                for index, entry in entries.items():
                    await asyncio.to_thread(on_entry, index, entry)

    def _note_answer(self, problem: str | None) -> None:
        if problem is not None:
            self._tell_loss(problem)
            self._note_down()
            return
        if self._told_loss:
            self._told_loss = False
            self._tell("is back", f"is back after {self.down_s:.0f} s")
        self.has_answered, self._lost_at, self._down_since = True, None, None

    def _note_lost(self, error: Exception) -> str:
        """Record that the replica is restarting or gone for good. Raise any other error."""
        if not is_lost_actor(error):
            raise error
        if not isinstance(error, ActorUnavailableError):
            self.gone = error
        self._tell_loss(str(error).partition("\n")[0])
        self._note_down()
        return f"the replica was lost: {error}"

    def _tell_loss(self, reason: str) -> None:
        """Tell the user once that a replica which had answered is lost."""
        if self.has_answered:
            self._told_loss = True
            self._tell("was lost", f"was lost and is restarted: {reason}")

    def _tell(self, event: str, text: str) -> None:
        replica = f"{self.limits.role} {self.index}"
        logger.warning("%s %s", replica, text, extra={CONSOLE_KEY: f"{self.name} {event}"})

    def _note_down(self) -> None:
        self.has_answered, self._lost_at = False, time.monotonic()
        self._down_since = self._down_since or self._lost_at

    def _kill(self, why: str) -> None:
        self._tell_loss(f"{why} (health_check_timeout_s), so it is killed")
        self.has_answered = False  # its next process counts as starting, not as hung
        ray.kill(self._remote(), no_restart=False)


class LocalReplica(ReplicaClient):
    """A replica that is an object of this process, for handles without a deployment."""

    def __init__(self, target: Any, index: int = 0) -> None:
        super().__init__(Deployment("local", type(target), {}), "", index)
        self._target = target

    async def send(self, call: Call, on_entry: OnEntry | None = None) -> Any:
        """Run the call in a thread. If its value is a list of futures, await them together."""

        def run() -> Any:
            if call.prerequisite is not None:
                method, arguments = call.prerequisite
                getattr(self._target, method)(*arguments)
            return getattr(self._target, call.method)(*call.args, **call.kwargs)

        value = await asyncio.wrap_future(daemon_future(run, name="local-replica"))
        if isinstance(value, list) and all(isinstance(each, Future) for each in value):
            value = await asyncio.gather(*map(asyncio.wrap_future, value))
        return value

    async def ping(self, timeout_s: float | None, *, kills: bool = False) -> Status:
        """Return a status: the object is always up."""
        return Status("", os.getpid(), 0, 0)


def local_handle(*targets: Any) -> DeploymentHandle:
    """Return a handle whose replicas are objects of this process."""
    replicas = [LocalReplica(target, index) for index, target in enumerate(targets)]
    return DeploymentHandle(replicas[0].limits, replicas)
