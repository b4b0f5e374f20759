"""How replicas are called: `handle.score.remote(rollouts).result()`."""

from __future__ import annotations

import math
import random
import threading
import time
import uuid
from collections.abc import Sequence
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError

from raypo.cluster.actors import Backpressure, DeploymentError, NoReplicaLeft, ReplicaLost
from raypo.cluster.spec import (
    DeploymentStatus,
    Member,
    Membership,
    Refused,
    Request,
    Unhealthy,
)
from raypo.metrics.timeline import note_call

MEMBERSHIP_AGE_S = 5.0
"""How old a cached membership may be: so long a replacement may wait for its first request."""
PROBE_TIMEOUT_S = 1.0
"""A replica that does not tell its load in this time counts as the fullest."""
RETRY_S = 0.2


class Response:
    """An answer that is on its way; a lost replica's request goes to another under the same id."""

    def __init__(self, handle: DeploymentHandle, method: str, args: tuple, kwargs: dict) -> None:
        self._handle, self._args, self._kwargs = handle, args, kwargs
        self._request = Request(uuid.uuid4().hex, method)
        self._asked = time.time()
        self._member: Member | None = None
        self._ref: Any = None
        self._avoid: set[str] = set()
        self._refused: set[str] = set()
        self._answer: tuple[Any] | None = None
        self._send(handle._choose(self._avoid))

    def result(self, timeout_s: float | None = None) -> Any:
        """Wait for the answer.

        Args:
            timeout_s: Seconds, re-sends included; None: the deployment's `request_timeout_s`.

        Raises:
            NoReplicaLeft: nobody serves, and nobody will by himself.
            Backpressure: the queues of all replicas are full.
            DeploymentError: there is no answer in time, or the deployment has ended.
            Exception: whatever the replica's method raised.
        """
        deadline = _Deadline(timeout_s, self._handle)
        while self._answer is None:
            if self._ref is None:
                self._send(self._next(deadline))
            else:
                self._take(deadline)
        return self._answer[0]

    def _take(self, deadline: _Deadline) -> None:
        assert self._member is not None
        name = self._member.name
        try:
            answer = ray.get(self._ref, timeout=deadline.left())
        except ActorUnavailableError:  # it may have the request: it is asked again, by the same id
            self._handle._report(name)
            time.sleep(RETRY_S)
            is_there = self._member in self._handle._membership(fresh=True).serving
            self._send(self._member if is_there else None)
        except RayActorError:
            self._lose(name)
        except GetTimeoutError:
            ray.cancel(self._ref)  # where it still waits for its turn
            raise deadline.passed(name) from None
        else:
            if isinstance(answer, Unhealthy):
                self._lose(name)
            elif isinstance(answer, Refused):
                self._refused.add(name)
                self._ref = None
            else:
                self._answer = (answer,)
                note_call(name, self._request.method, self._asked, time.time())

    def _lose(self, name: str) -> None:
        self._avoid.add(name)
        self._ref = None
        self._handle._report(name)

    def _next(self, deadline: _Deadline) -> Member:
        """A replica that has not refused; waits for one to come up."""
        while True:
            membership = self._handle._membership(fresh=True)
            member = self._handle._choose(self._avoid | self._refused)
            if member is not None:
                return member
            serving = [each for each in membership.serving if each.name not in self._avoid]
            if membership.failure:
                raise DeploymentError(membership.failure)
            if serving:
                raise Backpressure(
                    f"{self._handle.name}: the queues of all {len(serving)} replicas are full "
                    f"(max_queued_requests). Send less at a time, or start more replicas."
                )
            if not membership.recovers:
                raise NoReplicaLeft(
                    f"{self._handle.name}: no replica is left that serves. Those that start wait "
                    f"to be told what all were told; push the weights again."
                )
            self._handle._wait_changed(membership, deadline)

    def _send(self, member: Member | None) -> None:
        self._member, self._ref = member, None
        if member is not None:
            self._ref = member.actor.call.remote(self._request, *self._args, **self._kwargs)


class OneResponse:
    """The answer of one certain replica."""

    def __init__(self, handle: DeploymentHandle, member: Member, request: Request, ref: Any):
        self._handle, self._member, self._request, self._ref = handle, member, request, ref
        self._asked = time.time()

    def result(self, timeout_s: float | None = None) -> Any:
        """Wait for the answer.

        Raises:
            ReplicaLost: the replica ended, or says that it cannot go on.
            DeploymentError: it did not answer in time.
            Exception: whatever the replica's method raised.
        """
        deadline, name = _Deadline(timeout_s, self._handle), self._member.name
        try:
            answer = ray.get(self._ref, timeout=deadline.left())
        except RayActorError as error:
            self._handle._report(name)
            raise ReplicaLost(f"{name}: the replica was lost: {error}") from error
        except GetTimeoutError:
            raise deadline.passed(name) from None
        if isinstance(answer, Unhealthy):
            self._handle._report(name)
            raise ReplicaLost(f"{name}: {answer.reason}")
        note_call(name, self._request.method, self._asked, time.time())
        return answer


class _Method:
    def __init__(self, handle: DeploymentHandle, name: str) -> None:
        self._handle, self._name = handle, name

    def remote(self, *args: Any, **kwargs: Any) -> Response:
        """Call the method on one replica."""
        return Response(self._handle, self._name, args, kwargs)

    def on_all(self, *args: Any, **kwargs: Any) -> list[OneResponse]:
        """Call the method on every replica that serves, however full its queue is."""
        request = Request(uuid.uuid4().hex, self._name, waits_in_line=False)
        return [
            OneResponse(
                self._handle, member, request, member.actor.call.remote(request, *args, **kwargs)
            )
            for member in self._handle._membership(fresh=True).serving
        ]


class DeploymentHandle:
    """Calls the replicas of a deployment; can be pickled and used anywhere in the cluster.

    A request goes to the preferred replica, where there is one and it has room; else two replicas
    are drawn and the one with fewer requests gets it (power of two choices).
    """

    def __init__(self, name: str, namespace: str, *, prefer: int | None = None) -> None:
        self.name = name
        self._namespace, self._prefer = namespace, prefer
        self._found: ActorHandle | None = None
        self._cached: Membership | None = None
        self._cached_at = -math.inf
        self._lock = threading.Lock()

    def __reduce__(self) -> Any:
        return _rebuild, (self.name, self._namespace, self._prefer)

    def __repr__(self) -> str:
        return f"DeploymentHandle({self.name})"

    def __getattr__(self, name: str) -> _Method:
        if name.startswith("_"):
            raise AttributeError(name)
        return _Method(self, name)

    def preferring(self, index: int) -> DeploymentHandle:
        """A handle that asks this replica first, as long as it has room."""
        return DeploymentHandle(self.name, self._namespace, prefer=index)

    def wait(self, timeout_s: float) -> None:
        """Wait until every replica has started.

        Raises:
            DeploymentError: one failed to start, with its error, or took too long.
        """
        failure = self._ask("wait_started", timeout_s=timeout_s)
        if failure:
            raise DeploymentError(failure)

    def status(self) -> DeploymentStatus:
        """State of the deployment and of each replica, for people."""
        return self._ask("status")

    def establish(self, method: str, *args: Any, kept: bool = True) -> dict[str, Any]:
        """Have every replica make a call, and every later one before it serves.

        Args:
            method: Of the replicas' class.
            args: Of the method.
            kept: Whether the arguments are good for replicas that start later. If not, these
                serve only after the next call of this kind.

        Returns:
            The answers by replica's name; those lost meanwhile are left out.

        Raises:
            DeploymentError: no replica is left, and none will be.
            Exception: whatever a replica's method raised.
        """
        begin = time.time()
        answers = self._ask("establish", method, args, kept)
        for name in answers:
            note_call(name, method, begin, time.time())
        return answers

    def forget(self) -> None:
        """Let go of the arguments of the last established call, before the next ones are made."""
        self._ask("forget")

    def shutdown(self) -> None:
        """Let requests under way end, end the replicas and the controller."""
        try:
            self._ask("shut_down")
            ray.kill(self._controller())
        except DeploymentError:
            return  # it is gone already

    def _controller(self) -> ActorHandle:
        if self._found is None:
            try:
                self._found = ray.get_actor(self.name, self._namespace)
            except ValueError:
                raise self._gone() from None
        return self._found

    def _gone(self) -> DeploymentError:
        return DeploymentError(
            f"{self.name}: the deployment is gone: it was shut down, or the process that started "
            f"it has ended. Start it again."
        )

    def _ask(self, method: str, *args: Any, timeout_s: float | None = None) -> Any:
        try:
            return ray.get(getattr(self._controller(), method).remote(*args), timeout=timeout_s)
        except RayActorError:
            raise self._gone() from None
        except GetTimeoutError:
            replicas = ", ".join(
                f"{replica.name} is {replica.state} in bundle {replica.bundle}"
                for replica in self.status().replicas
                if replica.state != "serving"
            )
            raise DeploymentError(
                f"{self.name}: not started in {timeout_s:g} s ({replicas}). Look at its log in "
                f"the Ray dashboard, or raise placement.timeout_s."
            ) from None

    def _membership(self, *, fresh: bool = False) -> Membership:
        with self._lock:
            is_old = time.monotonic() - self._cached_at > MEMBERSHIP_AGE_S
            membership = self._cached
            if fresh or is_old or membership is None:
                membership = self._cached = self._ask("membership")
                self._cached_at = time.monotonic()
            return membership

    def _wait_changed(self, membership: Membership, deadline: _Deadline) -> None:
        """Wait for another membership, for as long as the deadline allows."""
        ref = self._controller().wait_changed.remote(membership.epoch)
        try:
            ray.get(ref, timeout=deadline.left())
        except RayActorError:
            raise self._gone() from None
        except GetTimeoutError:
            raise deadline.passed(self.name) from None

    def _report(self, name: str) -> None:
        self._controller().report.remote(name)
        with self._lock:
            self._cached = None

    def _choose(self, avoid: set[str]) -> Member | None:
        """The replica to ask; None if all that serve are to be avoided."""
        membership = self._membership()
        members = [member for member in membership.serving if member.name not in avoid]
        if len(members) < 2:
            return members[0] if members else None
        own = [member for member in members if member.index == self._prefer]
        if own and _loads(own)[0] < membership.max_ongoing_requests:
            return own[0]
        pair = random.sample(members, 2)
        first, second = _loads(pair)
        return pair[0] if first <= second else pair[1]


class _Deadline:
    def __init__(self, timeout_s: float | None, handle: DeploymentHandle) -> None:
        self._limit = timeout_s
        if timeout_s is None:
            self._limit = handle._membership().request_timeout_s
        self._end = None if self._limit is None else time.monotonic() + self._limit

    def left(self) -> float | None:
        """Seconds; None: for ever."""
        return None if self._end is None else max(0.0, self._end - time.monotonic())

    def passed(self, name: str) -> DeploymentError:
        return DeploymentError(
            f"{name}: no answer in {self._limit:g} s. Look at its log in the Ray dashboard; raise "
            f"placement.timeout_s if it is still starting, request_timeout_s if it works."
        )


def _loads(members: Sequence[Member]) -> list[float]:
    """Requests at each replica; infinite where it does not say."""
    refs: list[Any] = [member.actor.load.remote() for member in members]
    told, _ = ray.wait(refs, num_returns=len(refs), timeout=PROBE_TIMEOUT_S)
    return [_load(ref) if ref in told else math.inf for ref in refs]


def _load(ref: Any) -> float:
    try:
        return ray.get(ref)
    except RayActorError:
        return math.inf


def _rebuild(name: str, namespace: str, prefer: int | None) -> DeploymentHandle:
    return DeploymentHandle(name, namespace, prefer=prefer)
