"""Replicas of a plain class behind one handle: Ray actors pinned to bundles of a placement group.

Ray restarts a replica whose process has ended, in the same bundle, with the same name and
environment. A deployment has no controller process that could be lost. Instead, callers check the
health of a replica while they wait for it, and kill it if it hangs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from raypo.cluster.actors import start_named
from raypo.cluster.devices import shown
from raypo.deployment.handle import DeploymentHandle
from raypo.deployment.replica import Replica
from raypo.deployment.spec import Deployment, Place

__all__ = ["Deployment", "DeploymentHandle", "Place", "own_devices", "start_deployment"]

MOST_CALLS = 100_000
"""Calls that a replica accepts, running or queued (Ray's `max_concurrency`). Beyond this limit, Ray
delivers no calls, not even health checks."""
_keep_alive: dict[str, tuple[list[ActorHandle], Any]] = {}
"""Actor handles of each deployment, and the reference to its spec. The handles keep the actors
alive. The reference keeps the spec in memory: Ray 2.60 would free a large constructor argument
before a restart needs it again."""


def start_deployment(
    deployment: Deployment, places: Sequence[Place], *, in_turn: bool = False
) -> DeploymentHandle:
    """Start a replica in each place, in the background. The replicas end with this process.

    Args:
        deployment: The spec.
        places: The place of each replica.
        in_turn: Whether to wait for each replica before the next one starts.

    Returns:
        A handle to all replicas.

    Raises:
        DeploymentError: another deployment has the name.
    """
    made_from = ray.put(deployment)
    # A subclass, so that the dashboard shows the name of the deployed class.
    cls = type(deployment.cls.__name__, (_RemoteReplica,), {})
    actors = []
    for index, place in enumerate(places):
        actor = start_named(
            cls,
            f"{deployment.name}:{index}",
            options=_options(deployment, place),
            kwargs={"made_from": [made_from], "index": index},
        )
        actors.append(actor)
        if in_turn:  # a failed start raises in the first call to the replica, not here
            ray.wait([actor.status.remote()], timeout=deployment.start_timeout_s)
    _keep_alive[deployment.name] = (actors, made_from)
    namespace = ray.get_runtime_context().namespace
    return DeploymentHandle.of(deployment.limits(), namespace, len(actors))


class _RemoteReplica(Replica):
    def __init__(self, made_from: list[Any], index: int) -> None:
        super().__init__(ray.get(made_from[0]), index)


def _options(deployment: Deployment, place: Place) -> dict[str, Any]:
    options: dict[str, Any] = {
        "num_cpus": place.num_cpus,
        "num_gpus": place.num_gpus,
        "runtime_env": {"env_vars": {**deployment.env, **place.env}},
        "max_restarts": deployment.max_restarts,
        "max_concurrency": MOST_CALLS,
    }
    if place.group is not None:
        options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
            place.group,
            placement_group_bundle_index=place.bundle,
            placement_group_capture_child_tasks=True,
        )
    return options


def own_devices() -> dict[str, str]:
    """Return environment variables that make only this worker's devices visible to a process."""
    import torch

    ids = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
    return shown(ids, is_rocm=torch.version.hip is not None)
