"""Replicas of a plain class behind one handle: Ray actors pinned to bundles of a shared group."""

from __future__ import annotations

from collections.abc import Sequence

import ray
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raypo.cluster.actors import start_named
from raypo.cluster.controller import DeploymentController
from raypo.cluster.devices import shown
from raypo.cluster.handle import DeploymentHandle
from raypo.cluster.spec import Deployment, Place

__all__ = ["Deployment", "DeploymentHandle", "Place", "own_devices", "start_deployment"]

_keep_alive: dict[str, ActorHandle] = {}
"""Controllers end when nobody holds them: with the process that started them."""


def start_deployment(deployment: Deployment, places: Sequence[Place]) -> DeploymentHandle:
    """Start a replica in each place, in the background; they end with the calling process.

    Raises:
        DeploymentError: another deployment has the name.
    """
    context = ray.get_runtime_context()
    here = NodeAffinitySchedulingStrategy(context.get_node_id(), soft=False)
    controller = start_named(
        DeploymentController,
        deployment.name,
        options={"num_cpus": 0, "scheduling_strategy": here},
        kwargs={"deployment": deployment.sealed(), "places": list(places)},
    )
    controller.run.remote()
    _keep_alive[deployment.name] = controller
    return DeploymentHandle(deployment.name, context.namespace)


def own_devices() -> dict[str, str]:
    """Environment that shows a process the devices of this worker and no others."""
    import torch

    ids = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
    return shown(ids, is_rocm=torch.version.hip is not None)
