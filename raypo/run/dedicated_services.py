"""Step 2 of what lives in a placement group of its own: the driver starts it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ray.util.placement_group import PlacementGroup

from raypo.config import OnlineConfig
from raypo.deployment.deployment import Place, start_deployment
from raypo.deployment.reserve import Dedicated, reserve
from raypo.plan.placement import Bundle, dedicated_bundles
from raypo.run.roles import roles_of, settled


def start_dedicated(
    config: OnlineConfig,
    run_name: str,
    *,
    logs_dir: str,
    use_gpu: bool,
    more: Mapping[str, Mapping[str, Any]] | None = None,
    on_asked: Callable[[PlacementGroup], object] = lambda group: None,
) -> Dedicated:
    """Reserve the dedicated group and start the roles that live in it; the driver calls it.

    Args:
        config: With absolute paths.
        more: Of a role, more arguments of its class.
        on_asked: Called with the group before it is waited for.

    Raises:
        PlacementError: the group was not free within `placement.timeout_s`.
    """
    bundles = dedicated_bundles(config, use_gpu=use_gpu)
    if not bundles:
        return Dedicated()
    name = f"raypo:{run_name}:dedicated"
    group = reserve(
        bundles, "the dedicated group", name=name, placement=config.placement, on_asked=on_asked
    )
    dedicated = Dedicated(group=group)
    places = places_in(group, bundles)
    threads = config.placement.cpus_per_bundle
    try:
        for role in roles_of(config, engine_threads=threads, frozen_threads=threads):
            if role.name in places:
                role = role.with_kwargs((more or {}).get(role.name, {}))
                deployment = settled(role, config, run_name, logs_dir)
                handle = start_deployment(deployment, places[role.name])
                dedicated.handles[role.name] = handle
                if any(_is_shared_gpu(bundles[place.bundle]) for place in places[role.name]):
                    handle.wait(config.placement.timeout_s)  # vLLM measures what is free there
    except BaseException:
        dedicated.shutdown(graceful=False)
        raise
    return dedicated


def _is_shared_gpu(bundle: Bundle) -> bool:
    return bundle.gpus > 0 and len(bundle.guests) > 1


def places_in(group: PlacementGroup, bundles: Sequence[Bundle]) -> dict[str, list[Place]]:
    """By role, the place of each replica, in the order of their numbers."""
    places: dict[str, list[Place]] = {}
    for index, bundle in enumerate(bundles):
        for guest in bundle.guests:
            places.setdefault(guest.role, []).append(Place(group, index, num_gpus=guest.gpus))
    return places
