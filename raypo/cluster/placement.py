"""Placement of a run's processes into bundles, and of bundles onto nodes.

The reservation, the checks before a start, the capacity of a sweep and `raypo plan` use this
module. It only computes with Ray's resources. A run has up to two placement groups: the dedicated
group, which is reserved first, and the learner workers' group, which contains everything else.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from raypo.config import (
    AnyConfig,
    ConfigError,
    EngineSection,
    FrozenSection,
    OnlineConfig,
    RewardModelConfig,
)
from raypo.config.placement_section import Group, RoleKind

Resources = dict[str, float]
"""Ray's resources of a node or a bundle."""


class LabelledResources(Resources):
    """Resources of a node with known labels. Nodes with unknown labels match every selector."""

    def __init__(self, resources: Resources, labels: Mapping[str, str]) -> None:
        super().__init__(resources)
        self.labels = labels


LEARNER = "learner worker"
CRITIC = "critic worker"
"""A worker that trains only the critic (`learner.critic_workers`)."""
LEARNERS = (LEARNER, CRITIC)
"""Names of the learner's roles. Served roles are engine, reference, reward_0, ..., judge."""
NODE_ID_LABEL = "ray.io/node-id"
"""Label that Ray gives to every node."""
_ROUNDING = 1e-9
"""Tolerance in comparisons of fractional GPU shares."""


class PlacementError(ConfigError):
    """The cluster is too small for the run's bundles, or they were not placed in time."""


@dataclass(frozen=True)
class ServedRole:
    """A deployed model of a run besides the learner, with its number of replicas and resources."""

    name: str
    """engine, reference, reward_0, ..., judge"""
    kind: RoleKind
    model: str
    """Path of the model."""
    section: EngineSection | FrozenSection
    group: Group
    num_replicas: int | Literal["auto"]
    """Number of replicas. "auto" means one replica if the role is dedicated. If it is colocated,
    the number depends on `on_every_device`."""
    gpu_share: float
    """Fraction of a GPU. A dedicated replica reserves this fraction of each GPU that it uses."""
    on_every_device: bool = False
    """Location of colocated replicas if their number is "auto". True places replicas with all
    learner workers, False only with the first worker of each node."""

    @property
    def num_devices(self) -> int:
        """Number of GPUs per replica. On CPUs, the number of processes per replica."""
        return self.section.tensor_parallel

    @property
    def devices_key(self) -> str:
        """Config key of `num_devices`."""
        is_engine = self.kind == "engine"
        section_key = "rollout.engine" if is_engine else f"placement.frozen.{self.kind}"
        return f"{section_key}.tensor_parallel"


@dataclass(frozen=True)
class Occupant:
    """Occupant of a bundle: a learner worker, or a replica (or part of one) of a served role."""

    role: str
    index: int
    gpus: float = 0.0
    """Number of GPUs that the occupant uses of a dedicated bundle."""
    processes: int = 1
    """Number of the occupant's processes in this bundle."""

    def __str__(self) -> str:
        return f"{self.role} {self.index}" if self.role in LEARNERS else f"{self.role}:{self.index}"


@dataclass(frozen=True)
class Bundle:
    """Resources that are reserved together on one node, with their occupants."""

    resources: Resources
    occupants: tuple[Occupant, ...]
    labels: Mapping[str, str] = field(default_factory=dict)
    """Label selector for the bundle's node."""

    @property
    def gpus(self) -> int:
        """Number of whole GPUs."""
        return round(self.resources.get("GPU", 0.0))

    def __str__(self) -> str:
        return (
            f"{format_resources(self.resources)}{with_labels(self.labels)} for "
            f"{', '.join(map(str, self.occupants))}"
        )


@dataclass(frozen=True)
class PlacedBundle:
    """A bundle that is placed on a node."""

    group: Literal["dedicated", "workers"]
    index: int
    """Index of the bundle in its group. In the workers' group, it is the worker's rank."""
    bundle: Bundle
    node: int
    """Index of the node."""
    gpus: range
    """Indices of the bundle's GPUs on the node."""

    @property
    def roles(self) -> tuple[str, ...]:
        """Display names of the occupants."""
        return tuple(map(str, self.bundle.occupants))

    @property
    def devices(self) -> str:
        """Display name of the devices, like `GPU 0, 1`."""
        return f"GPU {', '.join(map(str, self.gpus))}" if self.gpus else "CPU"


def format_resources(resources: Resources) -> str:
    """Format resources, like `1 CPU, 2 GPU`. Unlimited resources are omitted."""
    named = sorted(resources.items())
    finite = [f"{amount:g} {name}" for name, amount in named if math.isfinite(amount)]
    return ", ".join(finite) or "enough"


def with_labels(selector: Mapping[str, str]) -> str:
    """Format a label selector, like ` with ray.io/accelerator-type=H100`, or "" if it is empty."""
    return f" with {', '.join(f'{k}={v}' for k, v in selector.items())}" if selector else ""


def served_roles(config: AnyConfig, *, num_workers: int, use_gpu: bool) -> list[ServedRole]:
    """Return all served roles of a run: the engine first, then the frozen models."""
    if isinstance(config, RewardModelConfig) or not config.needs_engine:
        return []
    placement, engine = config.placement, config.rollout.engine
    models: list[tuple[str, RoleKind, str, EngineSection | FrozenSection]]
    models = [("engine", "engine", config.model.policy, engine)]
    if isinstance(config, OnlineConfig):
        for name, path in config.references.items():
            models.append((name, "reference", path, placement.frozen.reference))
        for name, entry in config.reward_models.items():
            models.append((name, "reward", entry.path, placement.frozen.reward))
        for name, path in config.judge_models.items():
            models.append((name, "judge", path, placement.frozen.judge))
    return [
        ServedRole(
            name,
            kind,
            model,
            section,
            group=placement.group_of(kind),
            num_replicas=section.num_replicas
            if isinstance(section, FrozenSection)
            else section.resolved_count(num_workers=num_workers, use_gpu=use_gpu),
            gpu_share=getattr(placement.gpus, kind),
            on_every_device=use_gpu and kind != "engine",
        )
        for name, kind, model, section in models
    ]


def dedicated_bundles(config: AnyConfig, *, use_gpu: bool) -> list[Bundle]:
    """Return the bundles of the dedicated group, engines first. [] if all roles are colocated.

    Replicas with the same label selector share a bundle if their GPU shares fit into it. On CPUs,
    all frozen models share the cores of the first bundle, but each engine has its own cores.
    """
    bundles: list[tuple[int, dict[str, str], list[Occupant]]] = []
    for role in served_roles(config, num_workers=config.learner.num_workers, use_gpu=use_gpu):
        if role.group != "dedicated":
            continue
        gpu_share = role.gpu_share * role.num_devices if use_gpu else 0.0
        takes_cores = role.name == "engine" and not use_gpu
        labels = config.placement.labels_of(role.kind)
        for index in range(1 if role.num_replicas == "auto" else role.num_replicas):
            occupant = Occupant(role.name, index, gpu_share, processes=role.num_devices)
            for gpus, selector, occupants in bundles:
                used_share = sum(other.gpus for other in occupants)
                fits = selector == labels and used_share + gpu_share <= gpus + _ROUNDING
                if not takes_cores and fits:
                    occupants.append(occupant)
                    break
            else:
                bundles.append((max(1, round(gpu_share)) if use_gpu else 0, labels, [occupant]))
    cpus = config.placement.cpus_per_bundle
    return [
        Bundle(_resources(cpus, gpus), tuple(occupants), labels)
        for gpus, labels, occupants in bundles
    ]


def worker_bundles(
    config: AnyConfig, *, use_gpu: bool, resources_per_worker: Resources | None = None
) -> list[Bundle]:
    """Return the bundles of the learner workers, without colocated replicas.

    Args:
        config: Config of the run.
        use_gpu: Whether the run uses GPUs.
        resources_per_worker: Resources of a worker. None means the resources in the config.
    """
    resources = resources_per_worker or worker_resources(config, use_gpu=use_gpu)
    learner, labels = config.learner, config.placement.labels_of("learner")
    return [
        Bundle(
            resources, (Occupant(LEARNER if rank < learner.num_workers else CRITIC, rank),), labels
        )
        for rank in range(learner.total_workers)
    ]


def takes_gpus(config: AnyConfig, nodes: Sequence[Resources]) -> bool:
    """Return `learner.use_gpu`, where auto means True if a node has GPUs."""
    has_gpus = any(node.get("GPU") for node in nodes)
    return has_gpus if config.learner.use_gpu == "auto" else config.learner.use_gpu


def worker_resources(config: AnyConfig, *, use_gpu: bool) -> Resources:
    """Return the resources of a learner worker."""
    return _resources(config.learner.cpus_per_worker, 1 if use_gpu else 0)


def _resources(cpus: int, gpus: int) -> Resources:
    return {"CPU": float(cpus)} | ({"GPU": float(gpus)} if gpus else {})


def with_dedicated(config: OnlineConfig, roles: Iterable[str]) -> OnlineConfig:
    """Return the config with exactly these roles in the dedicated group.

    Args:
        roles: engine, reference, reward_0, ..., judge
    """
    dedicated_kinds = {role.partition("_")[0] for role in roles}
    mode = {
        role: "dedicated" if role in dedicated_kinds else "colocated" for role in get_args(RoleKind)
    }
    placement = config.placement.model_copy(update={"mode": mode})
    return config.model_copy(update={"placement": placement})


def colocated_ranks(role: ServedRole, nodes: Sequence[Hashable]) -> list[range]:
    """Return the ranks of the workers whose bundles each colocated replica of a role uses.

    A fixed number of engines is placed with the first workers. All other replicas are placed
    according to `first_workers`. A tensor-parallel replica spans as many consecutive workers as it
    has devices.

    Args:
        role: The colocated role.
        nodes: Node of each worker, in the order of ranks.
    """
    size = role.num_devices
    if role.name == "engine" and role.num_replicas != "auto":
        first_ranks = [index * size for index in range(role.num_replicas)]
    else:
        first_ranks = first_workers(role, nodes)
    return [range(first_rank, first_rank + size) for first_rank in first_ranks]


def first_workers(role: ServedRole, nodes: Sequence[Hashable]) -> list[int]:
    """Return the rank of the first worker that each replica of a role serves.

    A fixed number of replicas is spread evenly over the workers. If the number is "auto", see
    `ServedRole.on_every_device`.

    Args:
        role: The role.
        nodes: Node of each worker, in the order of ranks.
    """
    count = role.num_replicas
    if count != "auto":
        return [index * len(nodes) // count for index in range(count)]
    first_ranks, size = [], role.num_devices
    workers_per_node, num_seen = Counter(nodes), Counter[Hashable]()
    for rank, node in enumerate(nodes):
        index_on_node = num_seen[node]
        is_replica_start = (
            index_on_node % size == 0 and index_on_node + size <= workers_per_node[node]
        )
        if not index_on_node or (role.on_every_device and is_replica_start):
            first_ranks.append(rank)
        num_seen[node] += 1
    return first_ranks


def colocation_problem(role: ServedRole, nodes: Sequence[Hashable]) -> str | None:
    """Return the reason why a replica cannot be colocated with these workers, or None if it can.

    Args:
        role: The colocated role.
        nodes: Node of each worker, in the order of ranks.
    """
    key, size = role.devices_key, role.num_devices
    for ranks in colocated_ranks(role, nodes):
        if ranks.stop > len(nodes):
            return (
                f"{key} ({size}): a colocated replica uses the devices of {size} learner "
                "workers, but there are too few (learner.num_workers). Lower it or "
                "rollout.engine.count, or raise learner.num_workers."
            )
        if (count := len(set(nodes[ranks.start : ranks.stop]))) > 1:
            return (
                f"{key} ({size}): learner workers {ranks[0]} to {ranks[-1]} would share a "
                f"replica but are on {count} nodes. Set placement.strategy to PACK and "
                f"learner.num_workers so that each node holds a multiple of {size}, or "
                "placement.mode to dedicated."
            )
    return None


def lay_out(
    config: AnyConfig,
    nodes: Sequence[Resources],
    *,
    use_gpu: bool,
    resources_per_worker: Resources | None = None,
) -> list[PlacedBundle]:
    """Place all bundles of a run on empty nodes, starting with the dedicated group.

    Args:
        config: Config of the run.
        nodes: Resources of each node.
        use_gpu: Whether the run uses GPUs.
        resources_per_worker: Resources of a learner worker. None means the resources in the config.

    Raises:
        PlacementError: the bundles do not fit. The message compares the requested and the available
            resources, and suggests a change.
    """
    strategy = config.placement.strategy
    dedicated = dedicated_bundles(config, use_gpu=use_gpu)
    workers = worker_bundles(config, use_gpu=use_gpu, resources_per_worker=resources_per_worker)
    placed_dedicated = place(dedicated, nodes, strategy)
    placed_workers = place(
        workers, remaining_resources(nodes, dedicated, placed_dedicated), strategy
    )
    if len(placed_dedicated) < len(dedicated) or len(placed_workers) < len(workers):
        raise PlacementError(_placement_error_text(dedicated, workers, nodes, strategy))
    ranks = sorted(placed_workers.values())  # node of each rank, as Ray Train sorts its workers
    occupants = {rank: list(bundle.occupants) for rank, bundle in enumerate(workers)}
    for role in served_roles(config, num_workers=config.learner.num_workers, use_gpu=use_gpu):
        for index, span in enumerate(colocated_ranks(role, ranks)):
            for rank in span if role.group == "colocated" else ():
                occupants.get(rank, []).append(Occupant(role.name, index))
    assignments: list[tuple[Literal["dedicated", "workers"], int, Bundle, int]] = [
        ("dedicated", index, bundle, placed_dedicated[index])
        for index, bundle in enumerate(dedicated)
    ]
    for rank, (bundle, node) in enumerate(zip(workers, ranks, strict=True)):
        assignments.append(
            ("workers", rank, replace(bundle, occupants=tuple(occupants[rank])), node)
        )
    result: list[PlacedBundle] = []
    for group, index, bundle, node in assignments:
        first = sum(device.bundle.gpus for device in result if device.node == node)
        gpus = range(first, first + bundle.gpus)
        result.append(PlacedBundle(group, index, bundle, node, gpus))
    return result


def place(bundles: Sequence[Bundle], nodes: Sequence[Resources], strategy: str) -> dict[int, int]:
    """Return the node index on which Ray would place each bundle, by bundle index.

    Bundles that do not fit are omitted.

    Ray places the largest bundles first and prefers the node with the most free resources. PACK
    fills a node before it uses another one. SPREAD uses the node with the fewest bundles of the
    group.
    """
    if strategy == "STRICT_PACK":
        placed_by_node = [place(bundles, [node], "PACK") for node in nodes]
        capacities = [_num_copies(bundles[0], node) if bundles else 0 for node in nodes]
        order = sorted(
            range(len(nodes)), key=lambda node: (-len(placed_by_node[node]), -capacities[node])
        )
        return {bundle: order[0] for bundle in placed_by_node[order[0]]} if order else {}
    free, node_by_bundle = list(nodes), dict[int, int]()
    # Place bundles with a label selector first. Otherwise bundles without a selector might use the
    # only matching nodes.
    sizes = [
        (bool(bundle.labels), bundle.gpus, bundle.resources.get("CPU", 0.0)) for bundle in bundles
    ]
    opened: dict[int, int] = {}
    """Rank of each used node in the order of first use, from 0, by node index."""
    for index in sorted(range(len(bundles)), key=lambda index: sizes[index], reverse=True):
        capacities = [_num_copies(bundles[index], node) for node in free]
        candidates = [node for node, capacity in enumerate(capacities) if capacity]
        if strategy == "PACK":
            priorities = [opened.get(node, len(opened)) for node in range(len(free))]
        else:
            num_bundles = Counter(node_by_bundle.values())
            priorities = [num_bundles[node] for node in range(len(free))]
        if strategy == "STRICT_SPREAD":
            candidates = [node for node in candidates if not priorities[node]]
        if candidates:
            node = min(candidates, key=lambda node: (priorities[node], -capacities[node]))
            node_by_bundle[index] = node
            opened.setdefault(node, len(opened))
            free = remaining_resources(free, [bundles[index]], {0: node})
    return node_by_bundle


def remaining_resources(
    nodes: Sequence[Resources], bundles: Sequence[Bundle], node_by_bundle: Mapping[int, int]
) -> list[Resources]:
    """Return the resources that remain free on each node after these bundles are placed."""
    remaining = [copy(node) for node in nodes]
    for index, node in node_by_bundle.items():
        for name, amount in bundles[index].resources.items():
            remaining[node][name] = remaining[node].get(name, 0.0) - amount
    return remaining


def count_group_copies(
    groups: Sequence[Sequence[Bundle]],
    nodes: Sequence[Resources],
    strategy: str,
    *,
    max_copies: int,
) -> int:
    """Return how many copies of these groups fit at the same time, up to `max_copies`."""
    remaining = list(nodes)
    for count in range(max_copies):
        for bundles in groups:
            placed = place(bundles, remaining, strategy)
            if len(placed) < len(bundles):
                return count
            remaining = remaining_resources(remaining, bundles, placed)
    return max_copies


def matches(selector: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    """Return whether labels match a selector. As in Ray, `!v` also matches a missing label."""
    for key, condition in selector.items():
        value = condition.removeprefix("!")
        is_list = value.startswith("in(")
        accepted_values = (
            [label.strip() for label in value[3:-1].split(",")] if is_list else [value]
        )
        if (labels.get(key) in accepted_values) == condition.startswith("!"):
            return False
    return True


def _matches_labels(bundle: Bundle, node: Resources) -> bool:
    """Return whether a node's labels match the bundle's selector. Unknown labels match."""
    return not isinstance(node, LabelledResources) or matches(bundle.labels, node.labels)


def _num_copies(bundle: Bundle, node: Resources) -> int:
    """Return how many copies of a bundle fit on a node, up to one million."""
    if not _matches_labels(bundle, node):
        return 0
    parts = [node.get(name, 0.0) / amount for name, amount in bundle.resources.items() if amount]
    return int(min(1e6, *parts) + _ROUNDING)


def _placement_error_text(
    dedicated: Sequence[Bundle],
    workers: Sequence[Bundle],
    nodes: Sequence[Resources],
    strategy: str,
) -> str:
    """Return the error message for a run that does not fit."""
    for bundle in (*dedicated, *workers):
        if not any(_matches_labels(bundle, node) for node in nodes):
            return _label_error_text(bundle, nodes)
    names = sorted({name for bundle in (*dedicated, *workers) for name in bundle.resources})
    if len(place(workers, nodes, strategy)) < len(workers):
        nodes = [node for node in nodes if _matches_labels(workers[0], node)]
    total = {name: sum(node.get(name, 0.0) for node in nodes) for name in names}
    largest = {name: max((node.get(name, 0.0) for node in nodes), default=0.0) for name in names}
    node_count = _pluralize(len(nodes), "node")
    if (fits := len(place(workers, nodes, strategy))) < len(workers):
        return (
            f"learner.num_workers ({len(workers)}): asks for {_pluralize(len(workers), 'bundle')} "
            f"of {format_resources(workers[0].resources)}, each on one node; the cluster has "
            f"{format_resources(total)} on {node_count}{with_labels(workers[0].labels)}, and the "
            f"largest node has {format_resources(largest)}: under placement.strategy {strategy} "
            f"there is room for {fits}. {_suggest_change(workers, nodes, strategy)}, or use a "
            "larger cluster."
        )
    placed = place(dedicated, nodes, strategy)
    remaining = remaining_resources(nodes, dedicated, placed)
    groups = f"the dedicated group ({'; '.join(map(str, dedicated))})"
    if len(placed) < len(dedicated):
        problem, suggestion = f"{groups} does not fit the cluster", "Use a larger cluster"
    else:
        size = f"{format_resources(workers[0].resources)}{with_labels(workers[0].labels)}"
        groups += f" and the learner workers ({_pluralize(len(workers), 'bundle')} of {size})"
        problem = f"{groups} do not fit the cluster at the same time"
        has_gpus = any(node.get("GPU", 0.0) >= workers[0].gpus for node in remaining)
        suggestion = (
            _suggest_change(workers, remaining, strategy) if has_gpus else "Use a larger cluster"
        )
    return (
        f"placement.mode: {problem} under placement.strategy {strategy}. It has "
        f"{format_resources(total)} on {node_count}, and its largest node "
        f"{format_resources(largest)}. {suggestion}, lower rollout.engine.count, placement.gpus or "
        "placement.cpus_per_bundle, or set placement.mode to colocated."
    )


def _label_error_text(bundle: Bundle, nodes: Sequence[Resources]) -> str:
    """Return the error message for a bundle whose label selector no node matches."""
    label_keys = {
        key for node in nodes for key in getattr(node, "labels", ()) if key != NODE_ID_LABEL
    }
    label_counts = Counter(
        with_labels({key: node.labels[key] for key in sorted(label_keys & node.labels.keys())})
        for node in nodes
        if isinstance(node, LabelledResources)
    )
    nodes_found = "; ".join(
        f"{_pluralize(num_nodes, 'node')}{labels or ' without labels'}"
        for labels, num_nodes in label_counts.items()
    )
    return (
        f"placement.label_selector ({dict(bundle.labels)}): no node matches it, for "
        f"{bundle.occupants[0]}; the cluster has {nodes_found}. Correct it, or add nodes that were "
        f"started with these labels (ray start --labels)."
    )


def _pluralize(count: int, singular: str) -> str:
    return f"1 {singular}" if count == 1 else f"{count} {singular}s"


def _suggest_change(workers: Sequence[Bundle], nodes: Sequence[Resources], strategy: str) -> str:
    """Suggest which key to change if the learner workers do not fit on the nodes."""
    resources, relaxed_strategy = workers[0].resources, strategy.removeprefix("STRICT_")
    if len(place(workers, nodes, relaxed_strategy)) == len(workers):
        return f"Set placement.strategy to {relaxed_strategy}"
    if num_fitting := len(place(workers, nodes, strategy)):
        return f"Set learner.num_workers to at most {num_fitting}"
    insufficient = [
        name for name in resources if all(node.get(name, 0.0) < resources[name] for node in nodes)
    ]
    if "GPU" in insufficient and not any(node.get("GPU") for node in nodes):
        return "Set learner.use_gpu to false"
    if other_resources := [name for name in insufficient if name not in ("CPU", "GPU")]:
        return f"Lower {other_resources[0]} in ScalingConfig.resources_per_worker"
    if resources.get("CPU", 0.0) > 1:
        return f"Lower learner.cpus_per_worker ({resources['CPU']:g})"
    return "Lower learner.num_workers"
