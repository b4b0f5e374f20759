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
from raypo.cluster.devices import visibility_env
from raypo.deployment.handle import DeploymentHandle
from raypo.deployment.replica import Replica
from raypo.deployment.spec import Deployment, Placement

__all__ = ["Deployment", "DeploymentHandle", "Placement", "local_device_env", "start_deployment"]

MAX_CONCURRENT_CALLS = 100_000
"""Maximum number of running and queued calls per replica (Ray's `max_concurrency`). Above this
limit, Ray delivers no further calls, not even health checks."""
_keep_alive: dict[str, tuple[list[ActorHandle], Any]] = {}
"""Actor handles of each deployment, and the reference to its spec. The handles keep the actors
alive. The reference keeps the spec in memory: Ray 2.60 would free a large constructor argument
before a restart needs it again."""


def start_deployment(
    deployment: Deployment, placements: Sequence[Placement], *, one_at_a_time: bool = False
) -> DeploymentHandle:
    """Start one replica per placement, in the background. The replicas end with this process.

    Args:
        deployment: The spec.
        placements: Where each replica runs.
        one_at_a_time: Whether to wait until a replica has started before starting the next one.

    Returns:
        A handle to all replicas.

    Raises:
        DeploymentError: another deployment already has this name.
    """
    spec_ref = ray.put(deployment)
    # Subclass the actor so that Ray's dashboard shows the name of the deployed class.
    cls = type(deployment.cls.__name__, (_RemoteReplica,), {})
    actors = []
    for index, placement in enumerate(placements):
        actor = start_named(
            cls,
            f"{deployment.name}:{index}",
            options=_options(deployment, placement),
            kwargs={"spec_ref": [spec_ref], "index": index},
        )
        actors.append(actor)
        if one_at_a_time:  # a failed start raises in the first call to the replica, not here
            ray.wait([actor.status.remote()], timeout=deployment.start_timeout_s)
    _keep_alive[deployment.name] = (actors, spec_ref)
    namespace = ray.get_runtime_context().namespace
    return DeploymentHandle.of(deployment.without_class(), namespace, len(actors))


class _RemoteReplica(Replica):
    def __init__(self, spec_ref: list[Any], index: int) -> None:
        super().__init__(ray.get(spec_ref[0]), index)


def _options(deployment: Deployment, placement: Placement) -> dict[str, Any]:
    options: dict[str, Any] = {
        "num_cpus": placement.num_cpus,
        "num_gpus": placement.num_gpus,
        "runtime_env": {"env_vars": {**deployment.env, **placement.env}},
        "max_restarts": deployment.max_restarts,
        "max_concurrency": MAX_CONCURRENT_CALLS,
    }
    if placement.group is not None:
        options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
            placement.group,
            placement_group_bundle_index=placement.bundle,
            placement_group_capture_child_tasks=True,
        )
    return options


def local_device_env() -> dict[str, str]:
    """Return environment variables that make only this worker's devices visible to a process."""
    import torch

    ids = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
    return visibility_env(ids, is_rocm=torch.version.hip is not None)
