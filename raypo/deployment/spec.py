"""The description of a deployment, and the messages between its callers and its replicas."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ray.util.placement_group import PlacementGroup

from raypo.cluster.actors import ReplicaLost

Prerequisite = tuple[str, tuple[Any, ...]]
"""Method and arguments of a call that a replica makes to itself before it serves a call."""


@dataclass(frozen=True)
class Deployment:
    """Specification of a plain class that runs as replicas. Field names follow Ray Serve.

    The class may have three methods that replicas call. `check_health` raises if the object can no
    longer work. `stalled_s` returns the seconds since the last progress. If either reports a
    problem, the replica ends its process, and Ray restarts it. `num_moves` counts the steps of its
    work, by which callers see that it goes on.
    """

    name: str
    """Name for the dashboard, raypo:<run>:<role>. Replica i is named <name>:<i>."""
    cls: type
    kwargs: dict[str, Any]
    """Arguments of the constructor."""
    env: dict[str, str] = field(default_factory=dict)
    """Environment variables of each replica's process."""
    logs_dir: str | None = None
    """Folder in which replica i writes library logs to <role>_<i>.log. None means Ray's logs
    only."""
    max_ongoing_requests: int = 1
    """Maximum number of concurrent calls of a replica. Each uses a thread while its method runs."""
    request_timeout_s: float | None = None
    """Seconds that a call may take, retries included. None means no limit."""
    health_check_period_s: float = 10.0
    """Seconds between health checks of a replica for which a call waits."""
    health_check_timeout_s: float = 30.0
    """Seconds without an answer to a health check after which a replica is killed and
    restarted."""
    stall_timeout_s: float | None = None
    """Longest time without progress in seconds. None means no limit."""
    graceful_shutdown_timeout_s: float = 20.0
    """Seconds that ongoing calls get when the deployment shuts down."""
    start_timeout_s: float | None = None
    """Seconds that callers wait for a replica that restarts. None means no limit."""
    max_restarts: int = 3
    """Maximum number of times that Ray restarts each replica."""
    takes_turns: bool = False
    """True if a restarted replica allocates memory only once it gets its first call. Until then,
    another process may be using this memory."""

    @property
    def role(self) -> str:
        """Last part of the name, such as engine or reference."""
        return self.name.split(":")[-1]

    def limits(self) -> Deployment:
        """Return a copy for callers. It omits the class, whose import takes seconds."""
        return replace(self, cls=object, kwargs={}, env={})


@dataclass(frozen=True)
class Place:
    """Location of one replica. Without a group it reserves nothing and may run anywhere."""

    group: PlacementGroup | None = None
    bundle: int = 0
    """Index of a bundle of the group."""
    num_cpus: float = 0.0
    """CPUs taken from the bundle: 0 if the bundle has a learner worker, because that holds all
    CPUs."""
    num_gpus: float = 0.0
    env: dict[str, str] = field(default_factory=dict)
    """Environment variables, for example the devices of the learner worker beside it."""


@dataclass(frozen=True)
class Call:
    """A request to a replica. A retry has the same id, which makes the request idempotent."""

    method: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    prerequisite: Prerequisite | None = None
    is_urgent: bool = False
    """True for a request that runs ahead of queued ones, as control calls do."""
    id: str = field(default_factory=lambda: uuid.uuid4().hex)


class Unprepared(ReplicaLost):
    """The prerequisite of a request failed, for example on an engine without weights."""


@dataclass(frozen=True)
class Status:
    """A replica's reply to a health check."""

    node_id: str
    pid: int
    """Process id on that node."""
    num_calls: int
    """Number of requests that run or wait."""
    problem: str | None = None
    """Reason why the object cannot go on. The replica then ends its process."""
    num_moves: int = 0
    """Number of steps of its work, such as engine steps, that the object has done so far."""
