"""The slots of a deployment: one replica after the other in each."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from ray.actor import ActorHandle
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from raypo.cluster.actors import start_named
from raypo.cluster.replica import Replica
from raypo.cluster.spec import Deployment, Place


@dataclass
class Slot:
    """One replica and its successors."""

    index: int
    place: Place
    name: str = ""
    actor: ActorHandle | None = None
    attempt: int = 0
    where: tuple[str, int] = ("", 0)
    """Node id and process id."""
    is_up: bool = False
    is_given_up: bool = False
    made: dict[str, int] = field(default_factory=dict)
    """Of each owner, the number of the established call that it has made."""
    reason: str = ""
    suspected: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass
class EstablishedCall:
    """What an owner had all replicas do last."""

    number: int
    kept: tuple[str, tuple[Any, ...]] | None
    """Method and arguments, while they are good for replicas that start later."""


def start_replica(deployment: Deployment, slot: Slot) -> ActorHandle:
    """The slot's next replica, in its place and under its name; waits for the name."""
    place = slot.place
    options: dict[str, Any] = {
        "num_cpus": place.num_cpus,
        "num_gpus": place.num_gpus,
        "runtime_env": {"env_vars": {**deployment.env, **place.env}},
    }
    if place.group is not None:
        options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
            place.group,
            placement_group_bundle_index=place.bundle,
            placement_group_capture_child_tasks=True,
        )
    cls = type(deployment.class_name, (Replica,), {})  # its own name in the dashboard
    kwargs = {"deployment": deployment, "index": slot.index}
    return start_named(cls, slot.name, options=options, kwargs=kwargs)


async def answer_of(ref: Any) -> Any:
    """What an actor answers."""
    return await asyncio.wrap_future(ref.future())
