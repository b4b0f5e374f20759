"""Start the dedicated roles in their own placement group (step 2 of `raypo.recipes.ppo`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ray.util.placement_group import PlacementGroup

from raypo.cluster.placement import Bundle, dedicated_bundles, served_roles
from raypo.config import OnlineConfig
from raypo.deployment.deployment import Placement, start_deployment
from raypo.deployment.reserve import Dedicated, reserve
from raypo.run.served_roles import make_deployment, measures_free_memory


def start_dedicated(
    config: OnlineConfig,
    run_name: str,
    *,
    logs_dir: str,
    use_gpu: bool,
    extra_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    on_requested: Callable[[PlacementGroup], object] = lambda group: None,
    notify: Callable[[str], object] | None = None,
) -> Dedicated:
    """Reserve the dedicated placement group and start its roles. The driver calls this.

    Args:
        config: Config with absolute paths.
        run_name: Name of the run.
        logs_dir: Folder for the replicas' logs.
        use_gpu: True if the run uses GPUs.
        extra_kwargs: Extra arguments of each role's class, by role.
        on_requested: Callback that receives the group as soon as it is requested.
        notify: Callback for a message if the group has to wait for resources. None means that the
            message is printed.

    Returns:
        Handles of the deployments, and the group. Both are empty if no role is dedicated.

    Raises:
        PlacementError: the group could not be placed within `placement.timeout_s`.
    """
    bundles = dedicated_bundles(config, use_gpu=use_gpu)
    if not bundles:
        return Dedicated()
    name = f"raypo:{run_name}:dedicated"
    group = reserve(
        bundles,
        "the dedicated group",
        name=name,
        placement=config.placement,
        on_requested=on_requested,
        notify=notify,
    )
    dedicated = Dedicated(group=group)
    placements = dedicated_placements(group, bundles)
    roles = served_roles(config, num_workers=config.learner.num_workers, use_gpu=use_gpu)
    memory_measuring_roles = {role.name for role in roles if measures_free_memory(role)}
    try:
        for role in roles:
            if role.name not in placements:
                continue
            deployment = make_deployment(
                role,
                config,
                num_threads=config.placement.cpus_per_bundle,
                run_name=run_name,
                logs_dir=logs_dir,
                **(extra_kwargs or {}).get(role.name, {}),
            )
            used_bundles = [bundles[placement.bundle] for placement in placements[role.name]]
            # Replicas on a shared GPU start one at a time if one of them measures the free memory.
            one_at_a_time = any(
                bundle.gpus > 0
                and len(bundle.occupants) > 1
                and any(occupant.role in memory_measuring_roles for occupant in bundle.occupants)
                for bundle in used_bundles
            )
            handle = start_deployment(
                deployment, placements[role.name], one_at_a_time=one_at_a_time
            )
            dedicated.handles[role.name] = handle
            if one_at_a_time:
                handle.wait(config.placement.timeout_s)
    except BaseException:
        dedicated.shutdown(graceful=False)
        raise
    return dedicated


def dedicated_placements(
    group: PlacementGroup, bundles: Sequence[Bundle]
) -> dict[str, list[Placement]]:
    """Return the placement of each role's replicas, in the order of the replicas."""
    placements: dict[str, list[Placement]] = {}
    for index, bundle in enumerate(bundles):
        for occupant in bundle.occupants:
            placements.setdefault(occupant.role, []).append(
                Placement(group, index, num_gpus=occupant.gpus)
            )
    return placements
