"""Start engines and frozen models beside the learner (step 2 of `raypo.recipes.ppo`).

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
from raypo.run.served_roles import deployment_of, measures_memory
from raypo.run.setup import Shared
from raypo.run.shared_services import of_shared
from raypo.serving.client import (
    EngineClient,
    FrozenClient,
    JudgeClient,
    ReferenceClient,
    RewardModelClient,
)


@dataclass(frozen=True)
class Services:
    """Clients of the engines, of the reference and reward models, and of the judge."""

    engine: EngineClient
    references: dict[str, ReferenceClient]
    """Reference models by role: at most one in PPO, one for each teacher in distillation."""
    rewards: dict[str, RewardModelClient] = field(default_factory=dict)
    """Reward models by role, in the order of `model.reward`."""
    judge: JudgeClient | None = None
    """Judge of `reward.judge.path`."""
    elsewhere: frozenset[str] = frozenset()
    """Roles that are not colocated with these workers: engine, reference, reward_0, ..., judge."""
    in_pool: bool = False
    """True if several runs share the engines. They push adapters only."""
    in_turn: bool = False
    """True if the roles start one after the other, and the learner after them."""
    models_apart: bool = False
    """True if all reference and reward models have cores or devices that neither engines nor
    workers use. On CPUs this is False if the trials of a sweep share any of these models."""

    @property
    def frozen(self) -> list[tuple[str, FrozenClient]]:
        """All reference and reward models, and the judge, with their roles."""
        judge = [("judge", self.judge)] if self.judge else []
        return [*self.references.items(), *self.rewards.items(), *judge]

    @property
    def reference(self) -> ReferenceClient | None:
        """Reference model of the policy, or None if no deployment holds one."""
        return self.references.get("reference")

    def ask_peak_memory(self) -> Mapping[str, Sequence[Future[dict[str, float]]]]:
        """Request the peak memory of each replica, and return the pending calls by role."""
        calls: dict[str, Sequence[Future[dict[str, float]]]] = {"engine": self.engine.peak_memory()}
        return calls | {role: client.peak_memory() for role, client in self.frozen}

    def wait(self, timeout_s: float) -> None:
        """Wait until every replica has started.

        Raises:
            DeploymentError: a replica failed to start, with its error, or took too long.
        """
        for client in [self.engine, *(client for _, client in self.frozen)]:
            client.wait(timeout_s)


def start_services(run: Run[OnlineConfig]) -> Services:
    """Start engines and frozen models. Wait for them if they start one after the other."""
    run.tell.phase("starting the engine and the frozen models")
    services = start_deployments(
        run.config,
        run.name,
        run.workers,
        logs_dir=str(run.files.logs_dir),
        dedicated=run.runtime.dedicated,
        shared=run.runtime.shared,
    )
    if services.in_turn:
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
    """Start all roles that are not running elsewhere, in the workers' own placement group.

    All workers call this. Replica i is placed beside worker i: in its bundle, on its devices. On
    CPUs, reference and reward models are placed beside the first worker of each node. A
    tensor-parallel replica uses the devices of consecutive workers.

    All roles start in the background, at the same time, except on GPUs if models sleep
    (`rollout.engine.sleep`) or if vLLM measures the free memory. The roles then start one after the
    other, and with `rollout.engine.sleep` each goes to sleep before the next one starts.

    Args:
        config: The run's config.
        run_name: Name of the run.
        workers: The learner workers.
        logs_dir: Folder for the logs of the replicas.
        dedicated: Deployments that the driver has started, by role.
        shared: Deployments that a sweep has started. Those that fit this config are used.

    Returns:
        Clients of all roles.

    Raises:
        PlacementError: workers that would share a replica are on different nodes.
    """
    use_gpu = torch.cuda.is_available()
    elsewhere = dict(dedicated or {})
    sleeps = False
    if isinstance(config, OnlineConfig):
        elsewhere |= of_shared(shared, config, run_name, workers)
        sleeps = config.rollout.engine.sleeps and "engine" not in elsewhere
    # Workers that only train a critic have no engine beside them.
    num_workers = workers.count - (config.learner.total_workers - config.learner.num_workers)
    roles = served_roles(config, num_workers=num_workers, use_gpu=use_gpu)
    colocated = [role for role in roles if role.name not in elsewhere]
    cpus, num_engines = config.learner.cpus_per_worker, int(roles[0].num_replicas)
    deployments = []
    for role in colocated:
        # A reference or reward model gets the cores of the workers that it is placed beside.
        # Engines share the cores of all workers.
        threads = cpus * role.num_devices
        if role.kind == "engine":
            threads = cpus * workers.count // num_engines
        deployments.append(
            deployment_of(role, config, num_threads=threads, run_name=run_name, logs_dir=logs_dir)
        )
    nodes = workers.gather(ray.get_runtime_context().get_node_id())
    places = places_beside(colocated, workers, nodes)
    in_turn = use_gpu and (sleeps or any(map(measures_memory, colocated)))
    started = _start(deployments, places, workers, in_turn=in_turn, sleeps=sleeps)
    handles = {**elsewhere, **started}
    apart = elsewhere if use_gpu else (dedicated or {})
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
        elsewhere=frozenset(elsewhere),
        in_pool=shared is not None and shared.pool and "engine" in elsewhere,
        in_turn=in_turn,
        models_apart=all(role.name in apart for role in roles if role.kind != "engine"),
    )


def places_beside(
    roles: Sequence[ServedRole], workers: Workers, nodes: Sequence[str]
) -> dict[str, list[Placement]]:
    """Return the places of each role's replicas: a worker's bundle and one or more GPUs.

    All workers call it.

    Args:
        roles: The roles to place.
        workers: The learner workers.
        nodes: Node id of each worker.

    Raises:
        PlacementError: workers that would share a replica are on different nodes.
    """
    beside = workers.gather(_own_place(workers, nodes))
    places: dict[str, list[Placement]] = {}
    for role in roles:
        if problem := colocation_problem(role, nodes):
            raise PlacementError(problem)
        places[role.name] = [
            replace(
                beside[ranks[0]], env=merged_visibility_env([beside[rank].env for rank in ranks])
            )
            for ranks in colocated_ranks(role, nodes)
        ]
    return places


def _start(
    deployments: Sequence[Deployment],
    places: Mapping[str, list[Placement]],
    workers: Workers,
    *,
    in_turn: bool = False,
    sleeps: bool = False,
) -> dict[str, DeploymentHandle]:
    """Start deployments from rank 0, and return the handles on all workers.

    Args:
        deployments: The deployments.
        places: The places of each deployment's replicas, by role.
        workers: The learner workers.
        in_turn: True to start one after the other.
        sleeps: True if each deployment frees its GPU memory before the next one starts.
    """
    handles: dict[str, DeploymentHandle] = {}
    if workers.rank == 0:
        for deployment in deployments:
            deployment = replace(deployment, builds_lazily_on_restart=in_turn)
            role = deployment.role
            handles[role] = start_deployment(deployment, places[role])
            if in_turn and deployment.start_timeout_s is not None:
                handles[role].wait(deployment.start_timeout_s)
                if sleeps:
                    survivors(FrozenClient(handles[role]).sleep())
    return workers.broadcast(handles)


def _own_place(workers: Workers, nodes: Sequence[str]) -> Placement:
    """Return the place beside this worker: its bundle and devices, without reserving resources.

    The replica and the worker take turns.
    """
    group = ray.util.get_current_placement_group()
    if group is None:
        return Placement(env=local_device_env())
    # Ray Train sorts its workers after it has created them, so a rank is not a bundle index. Its
    # local rank counts by IP address, which several Ray nodes on one machine share.
    own_node = nodes[workers.rank]
    bundles = [index for index, node in enumerate(nodes_of(group)) if node == own_node]
    return Placement(group, bundles[nodes[: workers.rank].count(own_node)], env=local_device_env())
