"""Replicas of a plain class behind one handle: Ray actors pinned to bundles of a shared group.

Ray starts a replica again whose process has ended: in its bundle, under its name, with its
environment. Nothing else watches over a deployment, so nothing else can be lost with it: callers
find out who answers, and kill a replica that hangs while they wait for it.
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
from raypo.deployment.replicas import Replicas
from raypo.deployment.spec import Deployment, Place

__all__ = ["Deployment", "DeploymentHandle", "Place", "own_devices", "start_deployment"]

MOST_CALLS = 100_000
"""That a replica has in hand, whether they are worked on or wait; of what is more Ray tells it
nothing, not even who asks for its health."""
_keep_alive: dict[str, tuple[list[ActorHandle], Any]] = {}
"""By deployment, its actors, which end when nobody holds them, and what they are made from: Ray
2.60 lets go of a constructor's large arguments before the second time that it needs them."""


def start_deployment(
    deployment: Deployment, places: Sequence[Place], *, in_turn: bool = False
) -> DeploymentHandle:
    """Start a replica in each place, in the background; they end with the calling process.

    Args:
        in_turn: One after the other: each is waited for before the next one begins.

    Raises:
        DeploymentError: another deployment has the name.
    """
    made_from = ray.put(deployment)
    # A class of its own has its own name in the dashboard.
    cls = type(deployment.cls.__name__, (_RemoteReplica,), {})
    actors = []
    for index, place in enumerate(places):
        actor = start_named(
            cls,
            f"{deployment.name}:{index}",
            options=_options(deployment, place),
            kwargs={"made_from": [made_from], "index": index, "bundle": place.bundle},
        )
        actors.append(actor)
        if in_turn:  # why it did not start is told by whoever asks it first
            ray.wait([actor.where.remote()], timeout=deployment.start_timeout_s)
    _keep_alive[deployment.name] = (actors, made_from)
    namespace = ray.get_runtime_context().namespace
    return DeploymentHandle(Replicas(deployment.limits(), namespace, len(actors)))


class _RemoteReplica(Replica):
    def __init__(self, made_from: list[Any], index: int, bundle: int) -> None:
        super().__init__(ray.get(made_from[0]), index, bundle)


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
    """Environment that shows a process the devices of this worker and no others."""
    import torch

    ids = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
    return shown(ids, is_rocm=torch.version.hip is not None)
