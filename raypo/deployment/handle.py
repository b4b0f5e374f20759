"""How replicas are called: `handle.score.remote(rollouts).result()`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import ray

from raypo.cluster.actors import DeploymentError
from raypo.deployment.replicas import PROBE_TIMEOUT_S, Deadline, Replicas
from raypo.deployment.response import MethodOfAll, OneResponse, PinnedReplicas, Response
from raypo.deployment.spec import Life, Request, Required
from raypo.ray_internals import failed_to_start


@dataclass(eq=False)
class _Requirement:
    """What comes before each request of a handle, and of all that were made from it."""

    call: Required | None = None


@dataclass(eq=False)
class DeploymentHandle:
    """Calls the replicas of a deployment; can be pickled and used anywhere in the cluster.

    A request goes to a preferred replica, where there is one with room, else to the one with the
    fewest requests; where all queues are full, it waits at its caller. Where a replica is lost on
    the way, the request goes to another one, or to the same one when Ray has started it again.
    """

    _replicas: Replicas
    _prefer: tuple[int, ...] = ()
    _requirement: _Requirement = field(default_factory=_Requirement)
    _known_as: tuple[str, tuple[int, ...]] | None = None
    _stays: bool = False

    def __repr__(self) -> str:
        return f"DeploymentHandle({self.name})"

    def __getattr__(self, name: str) -> Method:
        if name.startswith("_"):
            raise AttributeError(name)
        return Method(self, name)

    @property
    def name(self) -> str:
        """raypo:<run>:<role>."""
        return self._replicas.limits.name

    def preferring(self, *indexes: int) -> DeploymentHandle:
        """A handle that asks these replicas first, as long as one of them has room.

        What either of the two requires from now on, both do.
        """
        return replace(self, _prefer=indexes)

    def each_preferred(self) -> list[DeploymentHandle]:
        """A handle for each replica that this one prefers; itself where there is none.

        Each stays with its replica as long as that is there, however many requests it has.
        """
        if not self._prefer:
            return [self]
        return [replace(self, _prefer=(index,), _stays=True) for index in self._prefer]

    @property
    def preferred(self) -> tuple[int, ...]:
        """Numbers of the replicas that it asks first."""
        return self._prefer

    def known_as(self, id: str, part: Sequence[int]) -> DeploymentHandle:
        """A handle for one call that other processes make too, under the same id.

        A replica works on it once, and each of them gets its part of the answer, which is a list.
        """
        return replace(self, _known_as=(id, tuple(part)))

    def require(self, method: str | None, *args: Any) -> None:
        """Have every replica make a call before each request from now on; None: no call.

        It has to cost nothing where there is nothing to do. So a replica that was started again
        makes up for what it has missed when it is first asked.
        """
        self._requirement.call = (method, args) if method else None

    @property
    def required(self) -> tuple[Any, ...]:
        """What `require` was last given."""
        method, args = self._requirement.call or (None, ())
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
        """Whether no replica is left or will ever be."""
        replicas = self._replicas
        replicas.ask("where", replicas.left(), PROBE_TIMEOUT_S)
        return not replicas.left()

    def lives(self) -> list[Life]:
        """Where each replica that is up lives; waits for one where none is."""
        return list(self._replicas.lives().values())

    def pinned(self) -> PinnedReplicas:
        """The replicas that are up now, for a conversation of several calls with all of them.

        One that is started again on the way is lost to it. The calls go without what the handle
        requires. Where no replica is up, it waits for one.

        Raises:
            DeploymentError: none is left, or none is up within `start_timeout_s`.
        """
        return PinnedReplicas(self._replicas, self._replicas.lives())

    def shutdown(self, grace_s: float | None = None) -> None:
        """End the replicas.

        Args:
            grace_s: Seconds for requests under way; None: `graceful_shutdown_timeout_s`.
        """
        replicas = self._replicas
        limit = replicas.limits.graceful_shutdown_timeout_s if grace_s is None else grace_s
        up, _ = replicas.ask("where", replicas.left(), PROBE_TIMEOUT_S)
        replicas.ask("drain", list(up), limit)
        for index in replicas.left():
            ray.kill(replicas.actor(index))


@dataclass(frozen=True)
class Method:
    """A method of a deployment's class."""

    _handle: DeploymentHandle
    _name: str

    def remote(self, *args: Any, **kwargs: Any) -> Response:
        """Call the method on one replica."""
        return self._response(args, kwargs, waits=True)

    async def asked(self, *args: Any, **kwargs: Any) -> Any:
        """The answer of one replica; the event loop goes on also while none can be asked."""
        return await self._response(args, kwargs, waits=False)

    def _response(self, args: Any, kwargs: Any, *, waits: bool) -> Response:
        handle = self._handle
        request = Request(self._name, args, kwargs, handle._requirement.call)
        if handle._known_as is not None:
            id, part = handle._known_as
            request = replace(request, id=id, part=part)
        return Response(handle._replicas, request, handle._prefer, stays=handle._stays, waits=waits)

    def on_all(self, *args: Any, **kwargs: Any) -> list[OneResponse]:
        """Call the method on every replica that is up, however full its queue is."""
        handle = self._handle
        required = handle._requirement.call
        pinned = PinnedReplicas(handle._replicas, handle._replicas.lives(), required)
        return MethodOfAll(pinned, self._name).on_all(*args, **kwargs)
