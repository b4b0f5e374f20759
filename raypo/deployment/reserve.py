"""Reserve a whole placement group, or raise an error that names the missing resources."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
import ray.util
from ray.util.placement_group import PlacementGroup, placement_group_table, remove_placement_group

from raypo.cluster.placement import Bundle, PlacementError, Resources, format_resources, place
from raypo.config import PlacementSection
from raypo.deployment.handle import DeploymentHandle
from raypo.tracking.console import Console

WAIT_S = 0.5
MESSAGE_AFTER_S = 5.0
"""Seconds of waiting after which a message names the programs that hold the resources."""


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
    description: str,
    *,
    name: str,
    placement: PlacementSection,
    on_requested: Callable[[PlacementGroup], object] = lambda group: None,
    notify: Callable[[str], object] | None = None,
) -> PlacementGroup:
    """Reserve a placement group and wait until it is placed. Ray removes it when this job ends.

    Args:
        bundles: The bundles to reserve.
        description: Description of the group, for messages.
        name: Name of the group in Ray's dashboard.
        placement: Section with the placement strategy and the timeout.
        on_requested: Callback that receives the group as soon as it is requested.
        notify: Callback for the message after `MESSAGE_AFTER_S` of waiting. None means that the
            message is printed.

    Raises:
        PlacementError: the group was not placed in time. The message names a bundle that was not
            placed and the free resources.
    """
    resources = [dict(bundle.resources) for bundle in bundles]
    labels = [dict(bundle.labels) for bundle in bundles]
    group = ray.util.placement_group(
        resources,
        placement.strategy,
        name=name,
        bundle_label_selector=labels if any(labels) else None,  # pyright: ignore[reportArgumentType]
    )
    start_time, has_notified = time.monotonic(), False
    try:
        on_requested(group)
        while not group.wait(WAIT_S):  # wait briefly, so that Ctrl-C takes effect
            waited_s = time.monotonic() - start_time
            if waited_s > placement.timeout_s:
                raise PlacementError(
                    f"placement.timeout_s ({placement.timeout_s:g}): "
                    f"{_describe_shortage(bundles, description, group, placement)} Wait until they "
                    "end, raise placement.timeout_s, or use a larger cluster."
                )
            if waited_s > MESSAGE_AFTER_S and not has_notified:
                has_notified = True
                (notify or Console().message)(
                    f"waiting for room, up to {placement.timeout_s:g} s (placement.timeout_s): "
                    f"{_describe_shortage(bundles, description, group, placement)}"
                )
    except BaseException:
        remove_placement_group(group)
        raise
    return group


def nodes_of(group: PlacementGroup) -> list[str]:
    """Return the node id of each bundle."""
    node_ids = placement_group_table(group)["bundles_to_node_id"]
    return [node_ids[index] for index in range(group.bundle_count)]


def _describe_shortage(
    bundles: Sequence[Bundle], description: str, group: PlacementGroup, placement: PlacementSection
) -> str:
    resource_names = {name for bundle in bundles for name in bundle.resources}
    available = ray.available_resources()
    free_resources = {name: available.get(name, 0.0) for name in resource_names}
    placed_bundles = place(bundles, [free_resources], "PACK")
    unplaced = [index for index in range(len(bundles)) if index not in placed_bundles]
    first_unplaced = unplaced[0] if unplaced else len(bundles) - 1
    return (
        f"bundle {first_unplaced} of {description} ({bundles[first_unplaced]}) is not free; the "
        f"group asks for {len(bundles)} bundles under placement.strategy {placement.strategy}, and "
        f"{format_resources(free_resources)} are free. {_describe_holders(group.id.hex())}"
    )


def _describe_holders(waiting_id: str) -> str:
    """Return a sentence that names the other placed groups and their resources."""
    names = []
    for info in placement_group_table().values():
        if info["state"] == "CREATED" and info["placement_group_id"] != waiting_id:
            names.append(
                f"{info['name'] or info['placement_group_id'][:8]} "
                f"({format_resources(_resources_of(info))})"
            )
    if not names:
        return (
            "No placement group holds the missing resources: actors or tasks of other programs do."
        )
    return f"Placement groups that hold the missing resources: {', '.join(names)}."


def _resources_of(info: dict[str, Any]) -> Resources:
    """Return the resources of a placement group, from its row in Ray's table."""
    total: Resources = {}
    for bundle in info["bundles"].values():
        total |= {name: total.get(name, 0.0) + amount for name, amount in bundle.items()}
    return total
