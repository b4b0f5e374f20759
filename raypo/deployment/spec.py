"""What a deployment is made of, and what its replicas say; plain data."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ray.util.placement_group import PlacementGroup

Required = tuple[str, tuple[Any, ...]]
"""Method and arguments of a call that comes before a request."""


@dataclass(frozen=True)
class Deployment:
    """A plain class to run as replicas; the words are Ray Serve's.

    Where the class has a method `check_health`, it raises when the object cannot go on; the
    replica then ends itself, and Ray starts it again.
    """

    name: str
    """Readable, for the dashboard: raypo:<run>:<role>; replica i is <name>:<i>."""
    cls: type
    kwargs: dict[str, Any]
    """Arguments of the constructor."""
    env: dict[str, str] = field(default_factory=dict)
    """Environment variables of each replica's process."""
    logs_dir: str | None = None
    """Where replica i writes what libraries say, into <role>_<i>.log; None: only to Ray's logs."""
    max_ongoing_requests: int = 1
    """Requests that a replica works on at the same time, each in a thread while its method runs."""
    max_queued_requests: int | None = None
    """Most requests that wait at a replica before it refuses more; None: no bound."""
    request_timeout_s: float | None = None
    """Seconds that a caller waits for an answer, re-sends included; None: for ever."""
    health_check_period_s: float = 10.0
    """Seconds that a caller waits for an answer before it checks the replica, and again."""
    health_check_timeout_s: float = 30.0
    """Seconds without an answer to a check after which a replica is killed and started again."""
    stall_timeout_s: float | None = None
    """Seconds that the object may be at work without getting on, where the class has a method
    `stalled_s` that says how long it has; then it counts as one that cannot go on; None: any."""
    graceful_shutdown_timeout_s: float = 20.0
    """Seconds that requests under way get when the deployment is shut down."""
    start_timeout_s: float | None = None
    """Seconds that callers wait for a replica that is started again; None: for ever."""
    max_restarts: int = 3
    """Times that Ray starts each replica again."""
    takes_turns: bool = False
    """Whether a replica that is started again waits until it is asked to work before it takes
    memory, because others may have it now."""

    @property
    def role(self) -> str:
        """The last word of the name: engine, reference."""
        return self.name.split(":")[-1]

    def limits(self) -> Deployment:
        """What callers know: without the class, whose import takes seconds."""
        return replace(self, cls=object, kwargs={}, env={})


@dataclass(frozen=True)
class Place:
    """Where one replica lives; one without a group takes nothing and may be anywhere."""

    group: PlacementGroup | None = None
    bundle: int = 0
    """Number of a bundle of the group."""
    num_cpus: float = 0.0
    """Taken from the bundle; 0 beside a learner worker, which has all of it and takes turns."""
    num_gpus: float = 0.0
    env: dict[str, str] = field(default_factory=dict)
    """Like the devices of the learner worker that the replica lives beside."""


@dataclass(frozen=True)
class Life:
    """A replica between two starts: where it is."""

    id: str
    node_id: str
    pid: int
    """Process id on that node."""
    bundle: int
    """Number of the bundle of its placement group."""


@dataclass(frozen=True)
class Request:
    """A call on its way to a replica; a re-send has the same id."""

    method: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    required: Required | None = None
    life: str | None = None
    """The only life of the replica that it is meant for, whose line it jumps; None: any."""
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    part: tuple[int, ...] | None = None
    """Which entries of the answer, a list, the caller wants; None: all of it."""


@dataclass(frozen=True)
class Refused:
    """Answer of a replica that takes no more requests."""


@dataclass(frozen=True)
class Unprepared:
    """Answer of a replica that could not do what comes first: an engine without weights."""

    reason: str


@dataclass(frozen=True)
class Unhealthy:
    """Answer of a replica that cannot do this any more; the request may be sent elsewhere."""

    reason: str
    life: str
    """Which one has said it."""
