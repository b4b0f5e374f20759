"""Step 2: vLLM engines and frozen models, started beside the learner workers by these."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
import ray.util
import torch

from raypo.cluster.actors import DeploymentError, survivors
from raypo.cluster.devices import together
from raypo.cluster.placement import PlacementError, own_bundle
from raypo.collectives import Workers
from raypo.config import PPOConfig, SFTConfig
from raypo.deployment.deployment import (
    Deployment,
    DeploymentHandle,
    Place,
    own_devices,
    start_deployment,
)
from raypo.deployment.reserve import nodes_of
from raypo.plan.layout import first_workers, nearest
from raypo.run.handles import (
    EngineHandle,
    FrozenHandle,
    ReferenceHandle,
    RewardModelHandle,
)
from raypo.run.roles import Role, engine_of, roles_of, settled
from raypo.run.setup import Shared
from raypo.run.shared_services import of_shared


@dataclass(frozen=True)
class Services:
    """Handles to what samples and judges."""

    engine: EngineHandle
    reference: ReferenceHandle | None
    reward_models: tuple[RewardModelHandle, ...] = ()
    """One deployment a model, in the order of `model.reward`."""
    elsewhere: frozenset[str] = frozenset()
    """Roles that do not live beside these workers: engine, reference, reward_0, ..."""
    in_pool: bool = False
    """Whether the engines are several runs', which push adapters only."""

    @property
    def frozen(self) -> list[tuple[str, FrozenHandle]]:
        """Reference and reward models that there are, by role."""
        named: list[tuple[str, FrozenHandle | None]] = [("reference", self.reference)]
        named += [(f"reward_{number}", each) for number, each in enumerate(self.reward_models)]
        return [(role, handle) for role, handle in named if handle is not None]

    def peak_memory(self) -> dict[str, list[dict[str, float]]]:
        """By role, what `raypo.metrics.process_memory` says in each replica that answers."""
        asked = {"engine": self.engine.pinned().peak_memory.on_all()}
        asked |= {role: each.pinned().peak_memory.on_all() for role, each in self.frozen}
        # What a replica cannot do any more is told by what needs it.
        return {role: survivors(each, passing_over=DeploymentError) for role, each in asked.items()}

    def wait(self, timeout_s: float) -> None:
        """Wait until every replica has started.

        Raises:
            DeploymentError: one failed to start, with its error, or took too long.
        """
        for each in [self.engine, *(handle for _, handle in self.frozen)]:
            each.wait(timeout_s)


def start_deployments(
    config: PPOConfig,
    run_name: str,
    workers: Workers,
    *,
    logs_dir: str,
    dedicated: Mapping[str, DeploymentHandle],
    shared: Shared | None = None,
) -> Services:
    """Start in the workers' own placement group what the driver has not started; all call it.

    Engine i lives beside worker i, reference and reward models beside the first worker of each
    node; what is tensor parallel on the devices of several workers, from there on. On CPUs all
    start in the background.

    Args:
        dedicated: What the driver has started, by role.
        shared: What a sweep has started; of it these workers take what is made for their config.
    """
    elsewhere = {**dedicated, **of_shared(shared, config, run_name, workers)}
    roles = roles_of(
        config,
        engine_threads=_engine_threads(config, workers),
        frozen_threads=config.learner.cpus_per_worker,
    )
    colocated = [beside_workers(role) for role in roles if role.name not in elsewhere]
    count = _num_engines(config, workers)
    places = places_beside(workers, colocated, num_engines=count)
    deployments = [settled(role, config, run_name, logs_dir) for role in colocated]
    started = _start(deployments, places, workers, in_turn=torch.cuda.is_available())
    handles = {**elsewhere, **started}
    nodes = workers.gather(ray.get_runtime_context().get_node_id())
    near = {
        role.name: handles[role.name].preferring(_nearest(role, nodes, workers, elsewhere))
        for role in roles
        if role.name != "engine"
    }
    rewards = [role.name for role in roles if role.name.startswith("reward_")]
    return Services(
        engine=EngineHandle(handles["engine"].preferring(*own_engines(workers, count))),
        reference=ReferenceHandle(near["reference"]) if "reference" in near else None,
        reward_models=tuple(RewardModelHandle(near[name]) for name in rewards),
        elsewhere=frozenset(elsewhere),
        in_pool=shared is not None and shared.pool and "engine" in elsewhere,
    )


def start_engines(
    config: SFTConfig, run_name: str, workers: Workers, *, logs_dir: str
) -> EngineHandle:
    """Start only the engines, as `start_deployments` does."""
    role = engine_of(config, num_threads=_engine_threads(config, workers))
    count = _num_engines(config, workers)
    places = places_beside(workers, [role], num_engines=count)
    started = _start([settled(role, config, run_name, logs_dir)], places, workers)
    engines = started["engine"].preferring(*own_engines(workers, count))
    return EngineHandle(engines)


def _nearest(
    role: Role, nodes: Sequence[str], workers: Workers, elsewhere: Mapping[str, Any]
) -> int:
    """Number of the replica of a frozen model that this worker asks first."""
    if role.name in elsewhere and role.num_replicas == "auto":
        return 0
    return nearest(first_workers(role.num_replicas, nodes), workers.rank)


def beside_workers(role: Role) -> Role:
    """A role with the cores of all the workers that it lies beside; an engine has them already."""
    if role.name == "engine":
        return role
    return replace(role, num_threads=role.num_threads * role.num_devices)


def own_engines(workers: Workers, count: int) -> list[int]:
    """Numbers of the engines that a worker asks: one, or where there are more than workers several.

    Example: of five engines and two workers, worker 0 has 0, 2 and 4.
    """
    return list(range(workers.rank, count, workers.count)) or [workers.rank % count]


def places_beside(
    workers: Workers, roles: Sequence[Role], *, num_engines: int
) -> dict[str, list[Place]]:
    """By role, the place of each replica: the bundle of a worker, the devices of one or several.

    All workers call it.

    Raises:
        PlacementError: workers that would share a replica lie on several nodes.
    """
    beside = workers.gather(_own_place(workers))
    nodes = workers.gather(ray.get_runtime_context().get_node_id())
    places: dict[str, list[Place]] = {}
    for role in roles:
        size = role.num_devices
        first = [number * size for number in range(num_engines)]
        if role.name != "engine":
            first = first_workers(role.num_replicas, nodes)
        places[role.name] = [_shared(role, beside[rank : rank + size]) for rank in first]
    return places


def _start(
    deployments: Sequence[Deployment],
    places: Mapping[str, list[Place]],
    workers: Workers,
    *,
    in_turn: bool = False,
) -> dict[str, DeploymentHandle]:
    """Rank 0 starts them for all.

    Args:
        in_turn: They share GPUs: vLLM measures what is free there, while nobody else starts.
    """
    handles: dict[str, DeploymentHandle] = {}
    if workers.rank == 0:
        for each in deployments:
            each = replace(each, takes_turns=in_turn)
            handles[each.role] = start_deployment(each, places[each.role])
            if in_turn and each.start_timeout_s is not None:
                handles[each.role].wait(each.start_timeout_s)
    return workers.broadcast(handles)


def _shared(role: Role, places: Sequence[Place]) -> Place:
    """The first of some places, with the devices of all of them."""
    if len(places) < role.num_devices:
        raise PlacementError(
            f"{role.devices_key} ({role.num_devices}): every colocated replica needs as many "
            f"learner workers, and there are too few (learner.num_workers). Lower it or "
            f"rollout.engine.count, or raise learner.num_workers."
        )
    if len(places) == 1:
        return places[0]
    nodes = {nodes_of(place.group)[place.bundle] for place in places if place.group}
    if len(nodes) > 1:
        raise PlacementError(
            f"{role.devices_key} ({role.num_devices}): the learner workers that share a replica "
            f"lie on {len(nodes)} nodes. Set placement.strategy to PACK and learner.num_workers "
            f"so that they share one, {role.devices_key} lower, or placement.mode to dedicated."
        )
    return replace(places[0], env=together([place.env for place in places]))


def _own_place(workers: Workers) -> Place:
    """Beside this worker: it takes nothing of the bundle, which is the worker's, and its devices.

    The two take turns.
    """
    group = ray.util.get_current_placement_group()
    if group is None:
        return Place(env=own_devices())
    # Ray Train's local rank counts by address, which nodes of one machine share.
    nodes = workers.gather(ray.get_runtime_context().get_node_id())
    number = nodes[: workers.rank].count(nodes[workers.rank])
    return Place(group, own_bundle(group, number=number), env=own_devices())


def _num_engines(config: PPOConfig | SFTConfig, workers: Workers) -> int:
    return config.rollout.engine.resolved_count(
        num_workers=workers.count, use_gpu=torch.cuda.is_available()
    )


def _engine_threads(config: PPOConfig | SFTConfig, workers: Workers) -> int:
    return config.learner.cpus_per_worker * workers.count // _num_engines(config, workers)
