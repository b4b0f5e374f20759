"""Callers' side of a deployment: `handle.call(RewardModel.score, rollouts).result()`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Concatenate, ParamSpec, TypeVar

import ray

from raypo.cluster.actors import DeploymentError
from raypo.deployment.pending_call import PendingCall, PinnedCall, PinnedReplicas
from raypo.deployment.replicas import PROBE_TIMEOUT_S, Deadline, Replicas
from raypo.deployment.spec import Call, Incarnation, Prerequisite
from raypo.ray_internals import failed_to_start

P = ParamSpec("P")
T = TypeVar("T")
Method = Callable[Concatenate[Any, P], T]
"""A method of the deployment's class, as `Engine.generate`; its name is what travels."""


@dataclass(eq=False)
class _SharedPrerequisite:
    """The prerequisite of a handle and of all handles that were derived from it."""

    call: Prerequisite | None = None


@dataclass(eq=False)
class DeploymentHandle:
    """Calls the replicas of a deployment; can be pickled and used anywhere in the cluster.

    A call goes to a preferred replica with room, else to the replica with the shortest queue. If
    all queues are full, the caller waits. If the replica is lost, the call is retried on another
    replica, or on the same one after Ray has restarted it.
    """

    _replicas: Replicas
    _prefer: tuple[int, ...] = ()
    _prerequisite: _SharedPrerequisite = field(default_factory=_SharedPrerequisite)
    _shared_call: tuple[str, tuple[int, ...]] | None = None
    _is_sticky: bool = False

    def __repr__(self) -> str:
        return f"DeploymentHandle({self.name})"

    @property
    def name(self) -> str:
        """raypo:<run>:<role>."""
        return self._replicas.limits.name

    def call(self, method: Method[P, T], /, *args: P.args, **kwargs: P.kwargs) -> PendingCall[T]:
        """Call a method on one replica."""
        return self._pending(method, args, kwargs, waits=True)

    async def call_async(self, method: Method[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a method on one replica without blocking the event loop while none is available."""
        return await self._pending(method, args, kwargs, waits=False)

    def call_all(
        self, method: Method[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> list[PinnedCall[T]]:
        """Call a method on every replica that is up, ahead of its queue."""
        incarnations = self._replicas.incarnations()
        pinned = PinnedReplicas(self._replicas, incarnations, self._prerequisite.call)
        return pinned.call(method, *args, **kwargs)

    def _pending(self, method: Any, args: Any, kwargs: Any, *, waits: bool) -> PendingCall[Any]:
        call = Call(method.__name__, args, kwargs, self._prerequisite.call)
        if self._shared_call is not None:
            id, part = self._shared_call
            call = replace(call, id=id, part=part)
        return PendingCall(
            self._replicas, call, self._prefer, is_sticky=self._is_sticky, waits=waits
        )

    def preferring(self, *indexes: int) -> DeploymentHandle:
        """Derive a handle that tries these replicas first, as long as one of them has room."""
        return replace(self, _prefer=indexes)

    def per_replica(self) -> list[DeploymentHandle]:
        """Derive a handle for each preferred replica; return this one if there is none.

        Each handle stays with its replica while that is up, however long its queue is.
        """
        if not self._prefer:
            return [self]
        return [replace(self, _prefer=(index,), _is_sticky=True) for index in self._prefer]

    @property
    def preferred(self) -> tuple[int, ...]:
        """Indices of the replicas that it tries first."""
        return self._prefer

    def sharing_call(self, id: str, part: Sequence[int]) -> DeploymentHandle:
        """Derive a handle for one call that other processes make too, under the same id.

        The replica runs the call once. Each process gets its part of the value, which is a list.
        """
        return replace(self, _shared_call=(id, tuple(part)))

    def require(self, method: str | None, *args: Any) -> None:
        """Set the call that every replica makes to itself before each call. None means no call.

        A restarted replica thereby catches up when it is first called. The call must cost nothing
        if there is nothing to catch up with. It applies to all derived handles of this process.
        """
        self._prerequisite.call = (method, args) if method else None

    @property
    def required(self) -> tuple[Any, ...]:
        """The arguments that `require` was last called with."""
        method, args = self._prerequisite.call or (None, ())
        return (method, *args)

    def wait(self, timeout_s: float) -> None:
        """Wait until every replica has started.

        Raises:
            DeploymentError: one failed to start, with its error, or took too long.
        """
        replicas, deadline = self._replicas, Deadline(timeout_s)
        waiting = set(replicas.left())
        while waiting and deadline.left():
            up, _ = replicas.ask("where", list(waiting), deadline.left(PROBE_TIMEOUT_S))
            for index, error in replicas.lost.items():
                if not replicas.left() or failed_to_start(error):
                    raise DeploymentError(f"{replicas.name(index)}: {error}")
            waiting &= set(replicas.left()) - up.keys()
        if waiting:
            raise DeploymentError(
                f"{', '.join(map(replicas.name, waiting))}: not started in {timeout_s:g} s. Look "
                f"at its log in the Ray dashboard, or raise placement.timeout_s."
            )

    def is_lost(self) -> bool:
        """Return whether no replica is left or will ever be."""
        replicas = self._replicas
        replicas.ask("where", replicas.left(), PROBE_TIMEOUT_S)
        return not replicas.left()

    def incarnations(self) -> list[Incarnation]:
        """Return the replicas that are up; wait for one if none is."""
        return list(self._replicas.incarnations().values())

    def pinned(self) -> PinnedReplicas:
        """Return the replicas that are up now, for several calls to all of them, such as a push.

        A replica that restarts in between is lost to the conversation. The calls are made without
        the prerequisite. If no replica is up, wait for one.

        Raises:
            DeploymentError: none is left, or none is up within `start_timeout_s`.
        """
        return PinnedReplicas(self._replicas, self._replicas.incarnations())

    def shutdown(self, grace_s: float | None = None) -> None:
        """End the replicas.

        Args:
            grace_s: Seconds for ongoing calls. None means `graceful_shutdown_timeout_s`.
        """
        replicas = self._replicas
        limit = replicas.limits.graceful_shutdown_timeout_s if grace_s is None else grace_s
        up, _ = replicas.ask("where", replicas.left(), PROBE_TIMEOUT_S)
        replicas.ask("drain", list(up), limit)
        for index in replicas.left():
            ray.kill(replicas.actor(index))
