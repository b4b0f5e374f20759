"""Start the engines and frozen models of a run (step 2 of `raypo.recipes.ppo`).

They run in the learner workers' placement group. Rank 0 creates the actors for all workers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

import ray
import ray.util
import torch

from raypo.cluster.actors import survivors
from raypo.cluster.devices import merged_visibility_env
from raypo.cluster.placement import (
    PlacementError,
    ServedRole,
    colocated_ranks,
    colocation_problem,
    served_roles,
)
from raypo.collectives import Workers
from raypo.config import OnlineConfig, PolicyExamplesConfig
from raypo.deployment.deployment import (
    Deployment,
    DeploymentHandle,
    Placement,
    local_device_env,
    start_deployment,
)
from raypo.deployment.reserve import nodes_of
from raypo.run.run import Run
from raypo.run.served_roles import make_deployment, measures_free_memory
from raypo.run.setup import Shared
from raypo.run.shared_services import shared_handles_for
from raypo.serving.client import (
    EngineClient,
    FrozenClient,
    JudgeClient,
    ReferenceClient,
    RewardModelClient,
)


@dataclass(frozen=True)
class Services:
    """Clients of the engines, the reference and reward models, and the judge."""

    engine: EngineClient
    references: dict[str, ReferenceClient]
    """Reference models by role: at most one in PPO, one per teacher in distillation."""
    rewards: dict[str, RewardModelClient] = field(default_factory=dict)
    """Reward models by role, in the order of `model.reward`."""
    judge: JudgeClient | None = None
    """Judge model (`reward.judge.path`)."""
    elsewhere: frozenset[str] = frozenset()
    """Roles that are not colocated with these workers: engine, reference, reward_0, ..., judge."""
    uses_shared_engines: bool = False
    """True if several runs share the engines. These runs push only adapters."""
    starts_sequentially: bool = False
    """True if the roles start one after another, and then the learner."""
    models_apart: bool = False
    """True if all reference and reward models have their own cores or devices, which neither
    engines nor workers use. On CPUs, this is False if trials of a sweep share one of the models."""

    @property
    def frozen(self) -> list[tuple[str, FrozenClient]]:
        """All reference and reward models, and the judge, with their roles."""
        judge = [("judge", self.judge)] if self.judge else []
        return [*self.references.items(), *self.rewards.items(), *judge]

    @property
    def reference(self) -> ReferenceClient | None:
        """Reference model of the policy, or None if there is no such deployment."""
        return self.references.get("reference")

    def request_peak_memory(self) -> Mapping[str, Sequence[Future[dict[str, float]]]]:
        """Request each replica's peak memory, and return the pending calls by role."""
        calls: dict[str, Sequence[Future[dict[str, float]]]] = {"engine": self.engine.peak_memory()}
        return calls | {role: client.peak_memory() for role, client in self.frozen}

    def wait(self, timeout_s: float) -> None:
        """Wait until every replica has started.

        Raises:
            DeploymentError: a replica failed to start or took too long. The message has its error.
        """
        for client in [self.engine, *(client for _, client in self.frozen)]:
            client.wait(timeout_s)


def start_services(run: Run[OnlineConfig]) -> Services:
    """Start engines and frozen models. Wait for them if they start one after another."""
    run.tell.phase("starting the engine and the frozen models")
    services = start_deployments(
        run.config,
        run.name,
        run.workers,
        logs_dir=str(run.files.logs_dir),
        dedicated=run.runtime.dedicated,
        shared=run.runtime.shared,
    )
    if services.starts_sequentially:
        services.wait(run.config.placement.timeout_s)
    return services


def start_deployments(
    config: OnlineConfig | PolicyExamplesConfig,
    run_name: str,
    workers: Workers,
    *,
    logs_dir: str,
    dedicated: Mapping[str, DeploymentHandle] | None = None,
    shared: Shared | None = None,
) -> Services:
    """Start all roles that are not running elsewhere, in the workers' placement group.

    All workers call this. Replica i is colocated with worker i: in its bundle, on its devices. On
    CPUs, reference and reward models are colocated with the first worker of each node. A
    tensor-parallel replica uses the devices of consecutive workers.

    All roles start concurrently in the background, except on GPUs if models sleep
    (`rollout.engine.sleep`) or if vLLM measures the free memory. In these cases the roles start one
    after another, and with `rollout.engine.sleep` each role goes to sleep before the next one
    starts.

    Args:
        config: The run's config.
        run_name: Name of the run.
        workers: The learner workers.
        logs_dir: Folder for the replicas' logs.
        dedicated: Deployments that the driver has started, by role.
        shared: Deployments that a sweep has started. They are used if they fit this config.

    Returns:
        Clients of all roles.

    Raises:
        PlacementError: workers that would share a replica are on different nodes.
    """
    use_gpu = torch.cuda.is_available()
    external_handles = dict(dedicated or {})
    sleeps = False
    if isinstance(config, OnlineConfig):
        external_handles |= shared_handles_for(shared, config, run_name, workers)
        sleeps = config.rollout.engine.sleeps and "engine" not in external_handles
    # No engine is colocated with workers that only train a critic.
    num_workers = workers.count - (config.learner.total_workers - config.learner.num_workers)
    roles = served_roles(config, num_workers=num_workers, use_gpu=use_gpu)
    colocated = [role for role in roles if role.name not in external_handles]
    cpus, num_engines = config.learner.cpus_per_worker, int(roles[0].num_replicas)
    deployments = []
    for role in colocated:
        # A reference or reward model uses the cores of its colocated workers. Engines share the
        # cores of all workers.
        threads = cpus * role.num_devices
        if role.kind == "engine":
            threads = cpus * workers.count // num_engines
        deployments.append(
            make_deployment(role, config, num_threads=threads, run_name=run_name, logs_dir=logs_dir)
        )
    nodes = workers.gather(ray.get_runtime_context().get_node_id())
    placements_by_role = colocated_placements(colocated, workers, nodes)
    starts_sequentially = use_gpu and (sleeps or any(map(measures_free_memory, colocated)))
    started_handles = _start(
        deployments,
        placements_by_role,
        workers,
        starts_sequentially=starts_sequentially,
        sleeps=sleeps,
    )
    handles = {**external_handles, **started_handles}
    separate_roles = external_handles if use_gpu else (dedicated or {})
    judges = [JudgeClient(handles[role.name]) for role in roles if role.kind == "judge"]
    return Services(
        engine=EngineClient(handles["engine"]),
        references={
            role.name: ReferenceClient(handles[role.name])
            for role in roles
            if role.kind == "reference"
        },
        rewards={
            role.name: RewardModelClient(handles[role.name])
            for role in roles
            if role.kind == "reward"
        },
        judge=judges[0] if judges else None,
        elsewhere=frozenset(external_handles),
        uses_shared_engines=shared is not None and shared.pool and "engine" in external_handles,
        starts_sequentially=starts_sequentially,
        models_apart=all(role.name in separate_roles for role in roles if role.kind != "engine"),
    )


def colocated_placements(
    roles: Sequence[ServedRole], workers: Workers, nodes: Sequence[str]
) -> dict[str, list[Placement]]:
    """Return the placement of each role's replicas: a worker's bundle and one or more GPUs.

    All workers call this.

    Args:
        roles: Roles to place.
        workers: The learner workers.
        nodes: Node id of each worker.

    Raises:
        PlacementError: workers that would share a replica are on different nodes.
    """
    placement_per_worker = workers.gather(_colocated_placement(workers, nodes))
    placements: dict[str, list[Placement]] = {}
    for role in roles:
        if problem := colocation_problem(role, nodes):
            raise PlacementError(problem)
        placements[role.name] = [
            replace(
                placement_per_worker[ranks[0]],
                env=merged_visibility_env([placement_per_worker[rank].env for rank in ranks]),
            )
            for ranks in colocated_ranks(role, nodes)
        ]
    return placements


def _start(
    deployments: Sequence[Deployment],
    placements_by_role: Mapping[str, list[Placement]],
    workers: Workers,
    *,
    starts_sequentially: bool = False,
    sleeps: bool = False,
) -> dict[str, DeploymentHandle]:
    """Start deployments from rank 0, and return the handles on all workers.

    Args:
        deployments: The deployments.
        placements_by_role: Placements of each deployment's replicas, by role.
        workers: The learner workers.
        starts_sequentially: True if the deployments start one after another.
        sleeps: True if each deployment frees its GPU memory before the next one starts.
    """
    handles: dict[str, DeploymentHandle] = {}
    if workers.rank == 0:
        for deployment in deployments:
            deployment = replace(deployment, builds_lazily_on_restart=starts_sequentially)
            role = deployment.role
            handles[role] = start_deployment(deployment, placements_by_role[role])
            if starts_sequentially and deployment.start_timeout_s is not None:
                handles[role].wait(deployment.start_timeout_s)
                if sleeps:
                    survivors(FrozenClient(handles[role]).sleep())
    return workers.broadcast(handles)


def _colocated_placement(workers: Workers, nodes: Sequence[str]) -> Placement:
    """Return the placement for a replica in this worker's bundle and on its devices.

    It reserves no resources, because the replica and the worker take turns.
    """
    group = ray.util.get_current_placement_group()
    if group is None:
        return Placement(env=local_device_env())
    # Ray Train sorts its workers after creating them, so a rank is not a bundle index. Its local
    # rank is per IP address, which several Ray nodes on one machine share.
    own_node = nodes[workers.rank]
    bundles = [index for index, node in enumerate(nodes_of(group)) if node == own_node]
    return Placement(group, bundles[nodes[: workers.rank].count(own_node)], env=local_device_env())
