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
from raypo.cluster.devices import together
from raypo.cluster.placement import (
    PlacementError,
    ServedRole,
    served_roles,
    torn_apart,
    workers_beside,
)
from raypo.collectives import Workers
from raypo.config import OnlineConfig, PolicyExamplesConfig
from raypo.deployment.deployment import (
    Deployment,
    DeploymentHandle,
    Place,
    own_devices,
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
        asked: dict[str, Sequence[Future[dict[str, float]]]] = {"engine": self.engine.peak_memory()}
        return asked | {role: client.peak_memory() for role, client in self.frozen}

    def wait(self, timeout_s: float) -> None:
        """Wait until every replica has started.

        Raises:
            DeploymentError: a replica failed to start, with its error, or took too long.
        """
        for client in [self.engine, *(handle for _, handle in self.frozen)]:
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
    is_online = isinstance(config, OnlineConfig)
    elsewhere = dict(dedicated or {})
    if is_online:
        elsewhere |= of_shared(shared, config, run_name, workers)
    # Workers that only train a critic have no engine beside them.
    count = workers.count - (config.learner.total_workers - config.learner.num_workers)
    roles = served_roles(config, num_workers=count, use_gpu=torch.cuda.is_available())
    colocated = [role for role in roles if role.name not in elsewhere]
    # A reference or reward model gets the cores of the workers that it is placed beside. Engines
    # share the cores of all workers.
    cpus, engines = config.learner.cpus_per_worker, int(roles[0].num_replicas)
    deployments = [
        deployment_of(
            role,
            config,
            num_threads=cpus * workers.count // engines
            if role.kind == "engine"
            else cpus * role.num_devices,
            run_name=run_name,
            logs_dir=logs_dir,
        )
        for role in colocated
    ]
    nodes = workers.gather(ray.get_runtime_context().get_node_id())
    sleeps = is_online and config.rollout.engine.sleeps and "engine" not in elsewhere
    in_turn = torch.cuda.is_available() and (sleeps or any(map(measures_memory, colocated)))
    started = _start(
        deployments,
        places_beside(colocated, workers, nodes),
        workers,
        in_turn=in_turn,
        sleeps=sleeps,
    )
    handles = {**elsewhere, **started}
    of_kind = {
        kind: {role.name: handles[role.name] for role in roles if role.kind == kind}
        for kind in ("reference", "reward", "judge")
    }
    apart = elsewhere if torch.cuda.is_available() else (dedicated or {})
    pool = shared if shared is not None and shared.pool and "engine" in elsewhere else None
    return Services(
        engine=EngineClient(handles["engine"]),
        references={name: ReferenceClient(h) for name, h in of_kind["reference"].items()},
        rewards={name: RewardModelClient(h) for name, h in of_kind["reward"].items()},
        judge=next(map(JudgeClient, of_kind["judge"].values()), None),
        elsewhere=frozenset(elsewhere),
        in_pool=pool is not None,
        in_turn=in_turn,
        models_apart=all(role.name in apart for role in roles if role.kind != "engine"),
    )


def places_beside(
    roles: Sequence[ServedRole], workers: Workers, nodes: Sequence[str]
) -> dict[str, list[Place]]:
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
    places: dict[str, list[Place]] = {}
    for role in roles:
        if problem := torn_apart(role, nodes):
            raise PlacementError(problem)
        places[role.name] = [
            replace(beside[ranks[0]], env=together([beside[rank].env for rank in ranks]))
            for ranks in workers_beside(role, nodes)
        ]
    return places


def _start(
    deployments: Sequence[Deployment],
    places: Mapping[str, list[Place]],
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
            deployment = replace(deployment, takes_turns=in_turn)
            handles[deployment.role] = start_deployment(deployment, places[deployment.role])
            if in_turn and deployment.start_timeout_s is not None:
                handles[deployment.role].wait(deployment.start_timeout_s)
                if sleeps:
                    survivors(FrozenClient(handles[deployment.role]).sleep())
    return workers.broadcast(handles)


def _own_place(workers: Workers, nodes: Sequence[str]) -> Place:
    """Return the place beside this worker: its bundle and devices, without reserving resources.

    The replica and the worker take turns.
    """
    group = ray.util.get_current_placement_group()
    if group is None:
        return Place(env=own_devices())
    # Ray Train sorts its workers after it has created them, so a rank is not a bundle index. Its
    # local rank counts by IP address, which several Ray nodes on one machine share.
    here = nodes[workers.rank]
    bundles = [index for index, node in enumerate(nodes_of(group)) if node == here]
    return Place(group, bundles[nodes[: workers.rank].count(here)], env=own_devices())
