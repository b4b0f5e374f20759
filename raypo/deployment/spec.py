"""Specification of a deployment, and the messages between its callers and its replicas."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ray.util.placement_group import PlacementGroup

from raypo.cluster.actors import ReplicaLost

Prerequisite = tuple[str, tuple[Any, ...]]
"""Name and arguments of a method that a replica runs before it serves a call."""


@dataclass(frozen=True)
class Deployment:
    """Specification of a plain class that runs as replicas. Field names follow Ray Serve.

    The class may define three methods that replicas call. `check_health` raises if the object can
    no longer work. `stalled_s` returns the seconds since the object last made progress. If either
    of them reports a problem, the replica ends its process, and Ray restarts it. `num_moves` counts
    the steps of the object's work, so that callers see its progress.
    """

    name: str
    """Name for the dashboard, raypo:<run>:<role>. Replica i is named <name>:<i>."""
    cls: type
    kwargs: dict[str, Any]
    """Arguments of the constructor."""
    env: dict[str, str] = field(default_factory=dict)
    """Environment variables of each replica's process."""
    logs_dir: str | None = None
    """Folder in which replica i writes library logs to <role>_<i>.log. None means that they go to
    Ray's logs only."""
    max_ongoing_requests: int = 1
    """Maximum number of concurrent calls per replica. Each call uses one thread while its method
    runs."""
    request_timeout_s: float | None = None
    """Timeout of a call in seconds, including its retries. None means no limit."""
    health_check_period_s: float = 10.0
    """Seconds between health checks of a replica that has pending calls."""
    health_check_timeout_s: float = 30.0
    """Timeout of a health check in seconds, after which the replica is killed and restarted."""
    stall_timeout_s: float | None = None
    """Maximum time without progress in seconds. None means no limit."""
    graceful_shutdown_timeout_s: float = 20.0
    """Seconds that ongoing calls get to finish when the deployment shuts down."""
    start_timeout_s: float | None = None
    """Seconds that callers wait for a restarting replica. None means no limit."""
    max_restarts: int = 3
    """Maximum number of times that Ray restarts each replica."""
    builds_lazily_on_restart: bool = False
    """True if a restarted replica builds its object only at the first call, because another process
    may be using the memory until then."""

    @property
    def role(self) -> str:
        """Last part of the deployment's name, such as engine or reference."""
        return self.name.split(":")[-1]

    def without_class(self) -> Deployment:
        """Return a copy for callers, without the class, because importing it takes seconds."""
        return replace(self, cls=object, kwargs={}, env={})


@dataclass(frozen=True)
class Placement:
    """Location of one replica. Without a group, it may run anywhere and reserves nothing."""

    group: PlacementGroup | None = None
    bundle: int = 0
    """Index of a bundle of the group."""
    num_cpus: float = 0.0
    """Number of CPUs of the bundle. 0 if a learner worker in the bundle already holds all CPUs."""
    num_gpus: float = 0.0
    env: dict[str, str] = field(default_factory=dict)
    """Environment variables, for example the visible devices of the colocated learner worker."""


@dataclass(frozen=True)
class Call:
    """A request to a replica. A retry has the same id, which makes the request idempotent."""

    method: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    prerequisite: Prerequisite | None = None
    is_urgent: bool = False
    """True if the request runs ahead of queued requests, like a control call."""
    id: str = field(default_factory=lambda: uuid.uuid4().hex)


class PrerequisiteFailed(ReplicaLost):
    """The prerequisite of a request failed, for example on an engine without weights."""


@dataclass(frozen=True)
class Status:
    """A replica's reply to a health check."""

    node_id: str
    pid: int
    """Process id on that node."""
    num_calls: int
    """Number of requests that are running or queued."""
    problem: str | None = None
    """Reason why the object can no longer work. The replica then ends its process."""
    num_moves: int = 0
    """Number of steps of work, such as engine steps, that the object has done so far."""
