"""A placement group of several bundles: reserved whole, or refused with who waits for what."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
import ray.util
from ray.util.placement_group import PlacementGroup, placement_group_table, remove_placement_group

from raypo.cluster.placement import PlacementError, Resources, words
from raypo.deployment.handle import DeploymentHandle

WAIT_S = 0.5


@dataclass(frozen=True)
class Dedicated:
    """What the driver has started in a placement group of its own."""

    handles: dict[str, DeploymentHandle] = field(default_factory=dict)
    """By role: engine, reference, reward_0, ..."""
    group: PlacementGroup | None = None

    def shutdown(self, *, graceful: bool) -> None:
        """End the deployments and give the group back."""
        for handle in self.handles.values():
            handle.shutdown(None if graceful else 0.0)
        if self.group is not None:
            remove_placement_group(self.group)


def reserve(
    bundles: Sequence[Resources],
    *,
    name: str,
    strategy: str,
    timeout_s: float,
    guests: Sequence[str],
    what: str = "the dedicated group",
) -> PlacementGroup:
    """A placement group that is there when this returns; it ends with this process's job.

    Args:
        bundles: Resources of each.
        name: Readable, for the dashboard.
        strategy: Ray's placement strategy.
        timeout_s: Seconds to wait for what others hold.
        guests: Who lives in each bundle, for people.
        what: The group, for people.

    Raises:
        PlacementError: it was not there in time, with the bundle that waits and what is free.
    """
    group = ray.util.placement_group([dict(each) for each in bundles], strategy, name=name)
    deadline = time.monotonic() + timeout_s
    try:
        while not group.wait(WAIT_S):  # in pieces, between which Ctrl-C is heard
            if time.monotonic() > deadline:
                raise PlacementError(
                    _why_it_waits(bundles, guests, group, strategy, timeout_s, what)
                )
    except BaseException:
        remove_placement_group(group)
        raise
    return group


def wait_for_room(
    bundles: Sequence[Resources], *, name: str, strategy: str, timeout_s: float
) -> None:
    """Wait until the learner workers' group could be placed, which Ray Train then makes itself.

    It would not say which bundle waits, for what, or who has it.

    Raises:
        PlacementError: it could not in time, with the bundle that waits and what is free.
    """
    guests = [f"learner worker {number}" for number in range(len(bundles))]
    group = reserve(
        bundles,
        name=name,
        strategy=strategy,
        timeout_s=timeout_s,
        guests=guests,
        what="the learner workers' group",
    )
    remove_placement_group(group)


def nodes_of(group: PlacementGroup) -> list[str]:
    """The node id of each bundle."""
    placed = placement_group_table(group)["bundles_to_node_id"]
    return [placed[index] for index in range(group.bundle_count)]


def _why_it_waits(
    bundles: Sequence[Resources],
    guests: Sequence[str],
    group: PlacementGroup,
    strategy: str,
    timeout_s: float,
    what: str,
) -> str:
    free = ray.available_resources()
    left = {name: free.get(name, 0.0) for bundle in bundles for name in bundle}
    first = 0
    for index, bundle in enumerate(bundles):
        first = index
        if any(amount > left[name] for name, amount in bundle.items()):
            break
        for name, amount in bundle.items():
            left[name] -= amount
    return (
        f"placement.timeout_s ({timeout_s:g}): bundle {first} of {what} "
        f"({words(bundles[first])} for {guests[first]}) was not free in time; the group asks for "
        f"{len(bundles)} bundles under placement.strategy {strategy}, free are "
        f"{words({name: free.get(name, 0.0) for name in left})}. {_holders(group)}Wait until they "
        f"end, raise placement.timeout_s, or use a larger cluster."
    )


def _holders(group: PlacementGroup) -> str:
    """Other groups that hold something, by name or id."""
    names = [
        f"{info['name'] or info['placement_group_id'][:8]} "
        f"({words(_sum(info['bundles'].values()))})"
        for info in placement_group_table().values()
        if info["state"] == "CREATED" and info["placement_group_id"] != group.id.hex()
    ]
    return f"Placement groups that hold the rest: {', '.join(names)}. " if names else ""


def _sum(bundles: Any) -> Resources:
    total: Resources = {}
    for bundle in bundles:
        for name, amount in bundle.items():
            total[name] = total.get(name, 0.0) + amount
    return total
