"""Answers of replicas that are on their way, and what becomes of them when a replica is lost."""

from __future__ import annotations

import time
import uuid
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError

from raypo.cluster.actors import Backpressure, DeploymentError, NoReplicaLeft, ReplicaLost
from raypo.cluster.spec import Member, Refused, Request, Unhealthy
from raypo.metrics.timeline import note_call

if TYPE_CHECKING:
    from raypo.cluster.handle import DeploymentHandle

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
            Backpressure: the queues of all replicas are full (`DeploymentHandle.waiting_for_room`
                says to wait instead).
            DeploymentError: there is no answer in time, or the deployment has ended.
            Exception: whatever the replica's method raised.
        """
        deadline = Deadline(timeout_s, self._handle)
        while self._answer is None:
            if self._ref is None:
                self._send(self._member or self._next(deadline))
            else:
                self._take(deadline)
        return self._answer[0]

    def _take(self, deadline: Deadline) -> None:
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
            self._ref = None  # who asks once more, asks the same replica, by the same id
            raise deadline.passed(name) from None
        else:
            if isinstance(answer, Unhealthy):
                self._lose(name)
            elif isinstance(answer, Refused):
                self._refused.add(name)
                self._send(None)
            else:
                self._answer = (answer,)
                note_call(name, self._request.method, self._asked, time.time())

    def _lose(self, name: str) -> None:
        self._avoid.add(name)
        self._send(None)
        self._handle._report(name)

    def _next(self, deadline: Deadline) -> Member:
        """A replica that has not refused; waits for one to come up."""
        while True:
            membership = self._handle._membership(fresh=True)
            member = self._handle._choose(self._avoid | self._refused)
            if member is not None:
                return member
            serving = [each for each in membership.serving if each.name not in self._avoid]
            if membership.failure:
                raise DeploymentError(membership.failure)
            if serving and self._handle._waits_for_room:
                deadline.sleep(RETRY_S, self._handle.name)
                self._refused.clear()
            elif serving:
                raise Backpressure(
                    f"{self._handle.name}: the queues of all {len(serving)} replicas are full "
                    f"(max_queued_requests). Send less at a time, or start more replicas."
                )
            elif not membership.recovers:
                raise NoReplicaLeft(
                    f"{self._handle.name}: no replica is left that serves. Those that start wait "
                    f"to be told what all were told; push the weights again."
                )
            else:
                self._handle._wait_changed(membership, deadline)

    def _send(self, member: Member | None) -> None:
        self._member, self._ref = member, None
        if member is not None:
            self._ref = member.actor.call.remote(self._request, *self._args, **self._kwargs)


class OneResponse:
    """The answer of one certain replica."""

    def __init__(self, handle: DeploymentHandle, member: Member, request: Request, ref: Any):
        self.name = member.name
        self._handle, self._request, self._ref = handle, request, ref
        self._asked = time.time()

    def failure(self) -> Exception | None:
        """What `result` raises; None where it does not, or the answer is not here. Never waits."""
        if not ray.wait([self._ref], timeout=0)[0]:
            return None
        try:
            self.result()
        except Exception as error:
            return error
        return None

    def result(self, timeout_s: float | None = None) -> Any:
        """Wait for the answer.

        Raises:
            ReplicaLost: the replica ended, or says that it cannot go on.
            DeploymentError: it did not answer in time.
            Exception: whatever the replica's method raised.
        """
        deadline, name = Deadline(timeout_s, self._handle), self.name
        try:
            answer = ray.get(self._ref, timeout=deadline.left())
        except RayActorError as error:
            self._handle._report(name, is_lost=not isinstance(error, ActorUnavailableError))
            raise ReplicaLost(f"{name}: the replica was lost: {error}") from error
        except GetTimeoutError:
            raise deadline.passed(name) from None
        if isinstance(answer, Unhealthy):
            self._handle._report(name, is_lost=True)
            raise ReplicaLost(f"{name}: {answer.reason}")
        note_call(name, self._request.method, self._asked, time.time())
        return answer


class Deadline:
    """When a caller stops waiting."""

    def __init__(self, timeout_s: float | None, handle: DeploymentHandle) -> None:
        self._limit = timeout_s
        if timeout_s is None:
            self._limit = handle._membership().request_timeout_s
        self._end = None if self._limit is None else time.monotonic() + self._limit

    def left(self) -> float | None:
        """Seconds; None: for ever."""
        return None if self._end is None else max(0.0, self._end - time.monotonic())

    def sleep(self, seconds: float, name: str) -> None:
        """Wait a moment.

        Raises:
            DeploymentError: the time is over.
        """
        left = self.left()
        if left is not None and left <= seconds:
            raise self.passed(name)
        time.sleep(seconds)

    def passed(self, name: str) -> DeploymentError:
        """The error to raise then."""
        return DeploymentError(
            f"{name}: no answer in {self._limit:g} s. Look at its log in the Ray dashboard; raise "
            f"placement.timeout_s if it is still starting, request_timeout_s if it works."
        )
