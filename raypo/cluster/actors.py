"""Named actors, their errors and health checks."""

from __future__ import annotations

import time
from collections.abc import Iterable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

import ray
from ray.actor import ActorHandle
from ray.exceptions import (
    ActorUnschedulableError,
    GetTimeoutError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
)

from raypo.ray_internals import readiness

T = TypeVar("T")

NAME_TIMEOUT_S = 30.0
"""Seconds to wait for a name while a dying actor of an earlier attempt still holds it."""
PING_TIMEOUT_S = 5.0
"""Timeout of a health check in seconds, after which an actor counts as busy."""


class DeploymentError(RuntimeError):
    """A deployment could not be started, or does not respond."""


class ReplicaLost(DeploymentError):
    """A replica ended before it replied to a call, or was restarted during a weight push."""


class NoReplicaLeft(DeploymentError):
    """No replica can serve the call until the caller acts, for example pushes the weights again."""


def survivors(
    calls: Iterable[Future[T]], *, lost_error: type[DeploymentError] = ReplicaLost
) -> list[T]:
    """Wait for calls to several replicas, and return the results of the surviving replicas.

    Args:
        calls: Pending calls, one per replica.
        lost_error: Error that means that a replica is lost. All other errors are raised.
    """
    values: list[T] = []
    for call in calls:
        with suppress(lost_error):
            values.append(call.result())
    return values


def start_named(cls: type, name: str, *, options: dict[str, Any], kwargs: dict[str, Any]) -> Any:
    """Start a named actor, owned by this process. Wait while a dying actor holds the name.

    Args:
        cls: Class of the actor.
        name: Name of the actor, shown in Ray's dashboard.
        options: Ray options of the actor.
        kwargs: Arguments of the class.

    Raises:
        DeploymentError: the name is still taken after `NAME_TIMEOUT_S` seconds.
    """
    deadline = time.monotonic() + NAME_TIMEOUT_S
    while True:
        try:
            actor: Any = ray.remote(cls).options(name=name, **options)
            return actor.remote(**kwargs)
        except ValueError as error:
            if "already taken" not in str(error):
                raise
            if time.monotonic() > deadline:
                raise DeploymentError(
                    f"{name}: an actor with this name is alive. Another run with the same name "
                    "uses this cluster: stop it, or choose another name."
                ) from None
            time.sleep(0.5)


def is_lost_actor(error: BaseException) -> bool:
    """Return True if a call failed because its actor is lost, temporarily or permanently."""
    # Ray 2.60 has separate errors for actors killed by its memory monitor, and for actors on a lost
    # node.
    lost = (RayActorError, OutOfMemoryError, ActorUnschedulableError)
    # A RayTaskError that also has one of these types was raised inside the method: this actor is
    # alive, but an actor that the method called is dead.
    return isinstance(error, lost) and not isinstance(error, RayTaskError)


def is_alive(actor: ActorHandle) -> bool:
    """Return True if the actor responds to a health check, or if it times out (it may be busy)."""
    try:
        ray.get(readiness(actor), timeout=PING_TIMEOUT_S)
    except GetTimeoutError:
        return True
    except RayError:
        return False
    return True
