"""What a deployment is made of, and what its controller says about it; plain data."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

import ray
from ray.actor import ActorHandle
from ray.util.placement_group import PlacementGroup


@dataclass(frozen=True)
class Sealed:
    """A class and its arguments in the object store.

    A controller carries them without importing what they import: torch and vLLM cost seconds.
    """

    name: str
    """Of the class."""
    ref: Any

    def __call__(self) -> Any:
        """The object."""
        cls, kwargs = ray.get(self.ref)
        return cls(**kwargs)


@dataclass(frozen=True)
class Deployment:
    """A plain class to run as replicas; the words are Ray Serve's.

    Where the class has a method `check_health`, it raises when the object cannot go on; the
    replica is then replaced.
    """

    name: str
    """Readable, for the dashboard: raypo:<run>:<role>."""
    cls: type | Sealed
    kwargs: dict[str, Any]
    """Of the constructor."""
    env: dict[str, str] = field(default_factory=dict)
    """Environment variables of each replica's process."""
    logs_dir: str | None = None
    """Where replica i writes what libraries say, into <role>_<i>.log; None: to Ray's logs alone."""
    max_ongoing_requests: int = 1
    """Requests that a replica works on at the same time, each in a thread."""
    max_queued_requests: int | None = None
    """Most requests that wait at a replica before it refuses more; None: no bound."""
    request_timeout_s: float | None = None
    """Seconds that a caller waits for an answer, re-sends included; None: for ever."""
    health_check_period_s: float = 10.0
    """Seconds between two health checks of a replica."""
    health_check_timeout_s: float = 30.0
    """Seconds without an answer after which a replica counts as lost."""
    graceful_shutdown_timeout_s: float = 20.0
    """Seconds that requests under way get when the deployment is shut down."""
    start_timeout_s: float | None = None
    """Seconds that a replacement may take to be placed and made; None: for ever."""
    max_restarts: int = 3
    """Lost replicas that are replaced, over all replicas and the deployment's whole life."""

    @property
    def class_name(self) -> str:
        """For the dashboard."""
        return self.cls.name if isinstance(self.cls, Sealed) else self.cls.__name__

    def sealed(self) -> Deployment:
        """The same, as a controller carries it."""
        ref = ray.put((self.cls, self.kwargs))
        return replace(self, cls=Sealed(self.class_name, ref), kwargs={})

    @property
    def role(self) -> str:
        """The last word of the name: engine, reference."""
        return self.name.split(":")[-1]


@dataclass(frozen=True)
class Place:
    """Where one replica lives; one without a group takes nothing and may be anywhere."""

    group: PlacementGroup | None = None
    bundle: int = 0
    """Of the group."""
    num_cpus: float = 0.0
    """Taken from the bundle; 0 beside a learner worker, which has all of it and takes turns."""
    num_gpus: float = 0.0
    env: dict[str, str] = field(default_factory=dict)
    """Like the devices of the learner worker that the replica lives beside."""


@dataclass(frozen=True)
class Request:
    """A call on its way to a replica; a re-send has the same id."""

    id: str
    method: str
    waits_in_line: bool = True
    """Whether it may be refused for the length of the queue."""


@dataclass(frozen=True)
class Refused:
    """Answer of a replica that takes no more requests."""

    load: int


@dataclass(frozen=True)
class Unhealthy:
    """Answer of a replica whose object cannot go on; the request may be sent elsewhere."""

    reason: str


@dataclass(frozen=True)
class Member:
    """A replica as callers see it."""

    index: int
    name: str
    """Of its actor; a replacement has another one."""
    actor: ActorHandle


@dataclass(frozen=True)
class Membership:
    """Who serves, as of one moment."""

    epoch: int
    """Grows with every change."""
    serving: tuple[Member, ...]
    waiting: tuple[Member, ...]
    """Up, but still to be told what all were told: engines without weights."""
    recovers: bool
    """Whether replicas that do not serve yet will, without anybody's doing."""
    max_ongoing_requests: int
    request_timeout_s: float | None
    failure: str | None = None
    """Why the deployment is at its end."""


ReplicaState = Literal["starting", "waiting", "serving", "lost"]


@dataclass(frozen=True)
class ReplicaStatus:
    """One replica, for people."""

    name: str
    state: ReplicaState
    """waiting: it is up, and has still to be told what all were told (an engine: its weights)."""
    bundle: int
    node_id: str = ""
    pid: int = 0
    """Of its process on that node."""
    reason: str = ""
    """Why its predecessor, or it itself, was lost."""


@dataclass(frozen=True)
class DeploymentStatus:
    """A deployment, for people."""

    name: str
    state: Literal["starting", "healthy", "degraded", "failed"]
    replicas: tuple[ReplicaStatus, ...]
    restarts: int
    max_restarts: int
    message: str = ""
