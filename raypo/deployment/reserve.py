"""Reservation of a whole placement group, or an error that names the missing resources."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
import ray.util
from ray.util.placement_group import PlacementGroup, placement_group_table, remove_placement_group

from raypo.cluster.placement import Bundle, PlacementError, Resources, place, words
from raypo.config import PlacementSection
from raypo.deployment.handle import DeploymentHandle
from raypo.tracking.console import Console

WAIT_S = 0.5
SAY_AFTER_S = 5.0
"""Seconds of waiting after which a message says which programs hold the resources."""


@dataclass(frozen=True)
class Dedicated:
    """Deployments that the driver has started in a separate placement group."""

    handles: dict[str, DeploymentHandle] = field(default_factory=dict)
    """Handles by role: engine, reference, reward_0, ..."""
    group: PlacementGroup | None = None

    def shutdown(self, *, graceful: bool) -> None:
        """End the deployments and remove the group.

        Args:
            graceful: Whether replicas may finish ongoing calls. False kills them immediately.
        """
        for handle in self.handles.values():
            handle.shutdown(None if graceful else 0.0)
        if self.group is not None:
            remove_placement_group(self.group)


def reserve(
    bundles: Sequence[Bundle],
    what: str,
    *,
    name: str,
    placement: PlacementSection,
    on_asked: Callable[[PlacementGroup], object] = lambda group: None,
    say: Callable[[str], object] | None = None,
) -> PlacementGroup:
    """Reserve a placement group and wait until it is placed. Ray removes it when this job ends.

    Args:
        bundles: The bundles to reserve.
        what: Description of the group, for messages.
        name: Name of the group in the dashboard.
        placement: Placement strategy, and seconds to wait.
        on_asked: Callback that gets the group as soon as it is requested.
        say: Callback for a message after `SAY_AFTER_S` of waiting. None prints it.

    Raises:
        PlacementError: the group was not placed in time. The message names the bundle that waits
            and the free resources.
    """
    resources = [dict(bundle.resources) for bundle in bundles]
    labels = [dict(bundle.labels) for bundle in bundles]
    group = ray.util.placement_group(
        resources,
        placement.strategy,
        name=name,
        bundle_label_selector=labels if any(labels) else None,  # pyright: ignore[reportArgumentType]
    )
    began, is_said = time.monotonic(), False
    try:
        on_asked(group)
        while not group.wait(WAIT_S):  # short waits, so that Ctrl-C gets through
            waited_s = time.monotonic() - began
            if waited_s > placement.timeout_s:
                raise PlacementError(
                    f"placement.timeout_s ({placement.timeout_s:g}): "
                    f"{_why_it_waits(bundles, what, group, placement)} Wait until they end, raise "
                    f"placement.timeout_s, or use a larger cluster."
                )
            if waited_s > SAY_AFTER_S and not is_said:
                is_said = True
                (say or Console().message)(
                    f"waiting for room, up to {placement.timeout_s:g} s (placement.timeout_s): "
                    f"{_why_it_waits(bundles, what, group, placement)}"
                )
    except BaseException:
        remove_placement_group(group)
        raise
    return group


def nodes_of(group: PlacementGroup) -> list[str]:
    """Return the node id of each bundle."""
    placed = placement_group_table(group)["bundles_to_node_id"]
    return [placed[index] for index in range(group.bundle_count)]


def _why_it_waits(
    bundles: Sequence[Bundle], what: str, group: PlacementGroup, placement: PlacementSection
) -> str:
    names = {name for bundle in bundles for name in bundle.resources}
    available = ray.available_resources()
    free = {name: available.get(name, 0.0) for name in names}
    fitting = place(bundles, [free], "PACK")
    waiting = [index for index in range(len(bundles)) if index not in fitting]
    first = waiting[0] if waiting else len(bundles) - 1
    return (
        f"bundle {first} of {what} ({bundles[first]}) is not free; the group asks for "
        f"{len(bundles)} bundles under placement.strategy {placement.strategy}, and "
        f"{words(free)} are free. {_holders(group.id.hex())}"
    )


def _holders(waiting: str) -> str:
    """Name, in a sentence, the placed groups other than `waiting` and their resources."""
    names = []
    for info in placement_group_table().values():
        if info["state"] == "CREATED" and info["placement_group_id"] != waiting:
            names.append(f"{info['name'] or info['placement_group_id'][:8]} ({words(_held(info))})")
    if not names:
        return (
            "No placement group holds the missing resources: actors or tasks of other programs do."
        )
    return f"Placement groups that hold the missing resources: {', '.join(names)}."


def _held(info: dict[str, Any]) -> Resources:
    """Return the resources of a placement group, from its row in Ray's table."""
    held: Resources = {}
    for bundle in info["bundles"].values():
        held |= {name: held.get(name, 0.0) + amount for name, amount in bundle.items()}
    return held
