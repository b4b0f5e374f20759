"""Actors with names that people read in the dashboard."""

from __future__ import annotations

import time
from collections.abc import Iterable
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

from raypo.pending import Pending
from raypo.ray_internals import readiness

T = TypeVar("T")

NAME_TIMEOUT_S = 30.0
"""How long an actor of an earlier attempt may take to give up its name."""
PING_TIMEOUT_S = 5.0
"""How long an actor may take to answer before it counts as busy."""


class DeploymentError(RuntimeError):
    """A deployment could not be started, or does not answer."""


class ReplicaLost(DeploymentError):
    """The one replica that was asked ended before it answered."""


class NoReplicaLeft(DeploymentError):
    """No replica serves, and none will before the caller does something about it."""


def survivors(
    calls: Iterable[Pending[T]], *, passing_over: type[DeploymentError] = ReplicaLost
) -> list[T]:
    """Wait for calls to several replicas; leave out the replicas that were lost.

    Args:
        calls: One for each replica.
        passing_over: Errors that leave a replica out. All others are raised.
    """
    values: list[T] = []
    for call in calls:
        with suppress(passing_over):
            values.append(call.result())
    return values


def start_named(cls: type, name: str, *, options: dict[str, Any], kwargs: dict[str, Any]) -> Any:
    """An actor of this name, owned by this process; waits for a dying one to give the name up.

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
                    f"{name}: an actor of this name is alive. Another run of the same name uses "
                    f"this cluster: stop it, or choose another name."
                ) from None
            time.sleep(0.5)


def is_lost_actor(error: BaseException) -> bool:
    """Whether what a call raises says that the actor itself is gone, for a moment or for good.

    Ray 2.60 has errors of their own for an actor that its memory monitor has killed, and for one
    whose node is gone. A method that met another dead actor raises such an error too, as its own.
    """
    lost = (RayActorError, OutOfMemoryError, ActorUnschedulableError)
    return isinstance(error, lost) and not isinstance(error, RayTaskError)


def is_alive(actor: ActorHandle) -> bool:
    """Whether it answers; one that is busy counts as alive."""
    try:
        ray.get(readiness(actor), timeout=PING_TIMEOUT_S)
    except GetTimeoutError:
        return True
    except RayError:
        return False
    return True
