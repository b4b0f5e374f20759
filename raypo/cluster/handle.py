"""How replicas are called: `handle.score.remote(rollouts).result()`."""

from __future__ import annotations

import math
import random
import threading
import time
import uuid
from collections.abc import Iterable, Sequence
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayActorError

from raypo.cluster.actors import DeploymentError
from raypo.cluster.response import Deadline, OneResponse, Response
from raypo.cluster.spec import DeploymentStatus, Member, Membership, Request
from raypo.metrics.timeline import note_call

MEMBERSHIP_AGE_S = 5.0
"""How old a cached membership may be: so long a replacement may wait for its first request."""
PROBE_TIMEOUT_S = 1.0
"""A replica that does not tell its load in this time counts as the fullest."""


class _Method:
    def __init__(self, handle: DeploymentHandle, name: str) -> None:
        self._handle, self._name = handle, name

    def remote(self, *args: Any, **kwargs: Any) -> Response:
        """Call the method on one replica."""
        return Response(self._handle, self._name, args, kwargs)

    def on_all(self, *args: Any, **kwargs: Any) -> list[OneResponse]:
        """Call the method on every replica that serves, however full its queue is."""
        members = self._handle._membership(fresh=True).serving
        return _ask_each(self._handle, members, self._name, args, kwargs)


class PinnedReplicas:
    """A fixed set of replicas that are asked one thing after the other: `load.on_all(bucket)`."""

    def __init__(self, handle: DeploymentHandle, members: Sequence[Member]) -> None:
        self._handle = handle
        self.members = tuple(members)

    def __getattr__(self, name: str) -> _MethodOfAll:
        if name.startswith("_"):
            raise AttributeError(name)
        return _MethodOfAll(self, name)

    @property
    def names(self) -> list[str]:
        """Of the replicas."""
        return [member.name for member in self.members]


class _MethodOfAll:
    def __init__(self, pinned: PinnedReplicas, name: str) -> None:
        self._pinned, self._name = pinned, name

    def on_all(self, *args: Any, **kwargs: Any) -> list[OneResponse]:
        """Call the method on each of them."""
        pinned = self._pinned
        return _ask_each(pinned._handle, pinned.members, self._name, args, kwargs)


class DeploymentHandle:
    """Calls the replicas of a deployment; can be pickled and used anywhere in the cluster.

    A request goes to the preferred replica, where there is one and it has room; else two replicas
    are drawn and the one with fewer requests gets it (power of two choices).
    """

    def __init__(
        self,
        name: str,
        namespace: str,
        *,
        prefer: tuple[int, ...] = (),
        owner: str = "",
        waits_for_room: bool = False,
    ) -> None:
        self.name = name
        self._namespace, self._prefer, self._owner = namespace, prefer, owner
        self._waits_for_room = waits_for_room
        self._found: ActorHandle | None = None
        self._cached: Membership | None = None
        self._cached_at = -math.inf
        self._lost: set[str] = set()
        """Names of replicas that ended a conversation; the controller may not know of it yet."""
        self._is_shut_down = False
        self._lock = threading.Lock()

    def __reduce__(self) -> Any:
        return _rebuild, (self.name, self._namespace, self._options())

    def __repr__(self) -> str:
        return f"DeploymentHandle({self.name})"

    def __getattr__(self, name: str) -> _Method:
        if name.startswith("_"):
            raise AttributeError(name)
        return _Method(self, name)

    def preferring(self, *indexes: int) -> DeploymentHandle:
        """A handle that asks these replicas first, as long as one of them has room."""
        return self._with(prefer=indexes)

    def each_preferred(self) -> list[DeploymentHandle]:
        """A handle for each replica that this one prefers: itself where it is one or none."""
        if len(self._prefer) < 2:
            return [self]
        return [self.preferring(index) for index in self._prefer]

    def waiting_for_room(self) -> DeploymentHandle:
        """A handle whose callers wait where all queues are full, and meet no `Backpressure`."""
        return self._with(waits_for_room=True)

    def owned_by(self, owner: str) -> DeploymentHandle:
        """A handle that establishes calls for one of several owners; they do not replace others'.

        A replica that starts later makes the calls of all owners before it serves.
        """
        return self._with(owner=owner)

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

    def pinned(self) -> PinnedReplicas:
        """The replicas that are up now, for a conversation of several calls with all of them.

        Waits for one where there is none.

        Raises:
            DeploymentError: none is left, and none will be.
        """
        while True:  # a replacement has `placement.timeout_s`, and they are counted
            membership = self._membership(fresh=True)
            members = (*membership.serving, *membership.waiting)
            left = [member for member in members if member.name not in self._lost]
            if left:
                return PinnedReplicas(self, left)
            if membership.failure:
                raise DeploymentError(membership.failure)
            self._wait_changed(membership, None)

    def establish(
        self, method: str, *args: Any, kept: bool = True, made_by: Iterable[str] | None = None
    ) -> dict[str, Any]:
        """Have every replica make a call, and every later one before it serves.

        Args:
            method: Of the replicas' class.
            args: Of the method.
            kept: Whether the arguments are good for replicas that start later. If not, these
                serve only after the next call of this kind.
            made_by: Names of replicas that have come to the same in another way, and serve.

        Returns:
            The answers by replica's name; those lost meanwhile are left out.

        Raises:
            ReplicaLost: those that have come to it in another way are lost, and the arguments are
                not kept.
            DeploymentError: no replica is left, and none will be.
            Exception: whatever a replica's method raised.
        """
        begin = time.time()
        names = None if made_by is None else tuple(made_by)
        refs = tuple(map(ray.put, args))  # for the controller to pass on unread
        answers = self._ask("establish", self._owner, method, refs, kept=kept, made_by=names)
        for name in answers:
            note_call(name, method, begin, time.time())
        return answers

    def forget(self) -> None:
        """Let go of the arguments of the last established call, before the next ones are made."""
        self._ask("forget", self._owner)

    def withdraw(self) -> None:
        """Replicas serve without the last established call, as if it had never been made."""
        self._ask("withdraw", self._owner)

    def shutdown(self, grace_s: float | None = None) -> None:
        """End the replicas and the controller.

        Args:
            grace_s: Seconds for requests under way; None: `graceful_shutdown_timeout_s`.
        """
        try:
            self._ask("shut_down", grace_s)
            self._is_shut_down = True
            ray.kill(self._controller())
        except DeploymentError:
            return  # it is gone already

    def _options(self) -> dict[str, Any]:
        return {
            "prefer": self._prefer,
            "owner": self._owner,
            "waits_for_room": self._waits_for_room,
        }

    def _with(self, **changes: Any) -> DeploymentHandle:
        return DeploymentHandle(self.name, self._namespace, **(self._options() | changes))

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

    def _ask(self, method: str, *args: Any, timeout_s: float | None = None, **kwargs: Any) -> Any:
        ask = getattr(self._controller(), method)
        try:
            return ray.get(ask.remote(*args, **kwargs), timeout=timeout_s)
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

    def _wait_changed(self, membership: Membership, deadline: Deadline | None) -> None:
        """Wait for another membership, for as long as the deadline allows; None: for ever."""
        ref = self._controller().wait_changed.remote(membership.epoch)
        try:
            ray.get(ref, timeout=deadline and deadline.left())
        except RayActorError:
            raise self._gone() from None
        except GetTimeoutError:
            assert deadline is not None
            raise deadline.passed(self.name) from None

    def _report(self, name: str, *, is_lost: bool = False) -> None:
        if is_lost:
            self._lost.add(name)
        self._controller().report.remote(name)
        with self._lock:
            self._cached = None

    def _choose(self, avoid: set[str]) -> Member | None:
        """The replica to ask; None if all that serve are to be avoided."""
        if self._is_shut_down:  # the replicas that it remembers are gone
            raise self._gone()
        membership = self._membership()
        members = [member for member in membership.serving if member.name not in avoid]
        if len(members) < 2:
            return members[0] if members else None
        own = [member for member in members if member.index in self._prefer]
        for member, load in zip(own, _loads(own), strict=True) if own else ():
            if load < membership.max_ongoing_requests:
                return member
        pair = random.sample(members, 2)
        first, second = _loads(pair)
        return pair[0] if first <= second else pair[1]


def _ask_each(
    handle: DeploymentHandle, members: Sequence[Member], method: str, args: tuple, kwargs: dict
) -> list[OneResponse]:
    request = Request(uuid.uuid4().hex, method, waits_in_line=False)
    return [
        OneResponse(handle, member, request, member.actor.call.remote(request, *args, **kwargs))
        for member in members
    ]


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


def _rebuild(name: str, namespace: str, options: dict[str, Any]) -> DeploymentHandle:
    return DeploymentHandle(name, namespace, **options)
