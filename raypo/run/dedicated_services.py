"""Step 2 of what lives in a placement group of its own: the driver starts it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ray.util.placement_group import PlacementGroup

from raypo.config import PPOConfig
from raypo.deployment.deployment import Place, start_deployment
from raypo.deployment.reserve import Dedicated, reserve
from raypo.plan.dedicated import DedicatedBundle, dedicated_bundles
from raypo.run.roles import roles_of, settled


def start_dedicated(
    config: PPOConfig,
    run_name: str,
    *,
    logs_dir: str,
    use_gpu: bool,
    more: Mapping[str, Mapping[str, Any]] | None = None,
) -> Dedicated:
    """Reserve the dedicated group and start the roles that live in it; the driver calls it.

    Args:
        config: With absolute paths.
        more: Of a role, more arguments of its class.

    Raises:
        PlacementError: the group was not free within `placement.timeout_s`.
    """
    bundles = dedicated_bundles(config, use_gpu=use_gpu)
    if not bundles:
        return Dedicated()
    placement = config.placement
    group = reserve(
        [bundle.resources for bundle in bundles],
        name=f"raypo:{run_name}:dedicated",
        strategy=placement.strategy,
        timeout_s=placement.timeout_s,
        guests=[", ".join(map(str, bundle.guests)) for bundle in bundles],
    )
    dedicated = Dedicated(group=group)
    places = places_in(group, bundles)
    threads = placement.cpus_per_bundle
    try:
        for role in roles_of(config, engine_threads=threads, frozen_threads=threads):
            if role.name in places:
                role = role.with_kwargs((more or {}).get(role.name, {}))
                deployment = settled(role, config, run_name, logs_dir)
                handle = start_deployment(deployment, places[role.name])
                dedicated.handles[role.name] = handle
                if is_shared_gpu(bundles, role.name):  # vLLM measures what is free there
                    handle.wait(placement.timeout_s)
    except BaseException:
        dedicated.shutdown(graceful=False)
        raise
    return dedicated


def is_shared_gpu(bundles: Sequence[DedicatedBundle], role: str) -> bool:
    """Whether a replica of a role lies on a GPU with others, so that they must start in turn."""
    return any(
        bundle.gpus and len(bundle.guests) > 1 and role in {guest.role for guest in bundle.guests}
        for bundle in bundles
    )


def places_in(group: PlacementGroup, bundles: Sequence[DedicatedBundle]) -> dict[str, list[Place]]:
    """By role, the place of each replica, in the order of their numbers."""
    places: dict[str, list[Place]] = {}
    for index, bundle in enumerate(bundles):
        for guest in bundle.guests:
            places.setdefault(guest.role, []).append(Place(group, index, num_gpus=guest.gpus))
    return places
