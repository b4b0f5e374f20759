"""Where the processes of a run lie, and what each device then holds at its worst moment."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from raypo.config import ConfigError, PPOConfig
from raypo.config.placement_section import RoleKind
from raypo.plan import estimate
from raypo.plan.dedicated import DedicatedBundle, dedicated_bundles
from raypo.plan.estimate import LEARNER, Device, Models, Role
from raypo.plan.hardware import Node
from raypo.plan.layout import first_workers, left_of, place, place_bundles
from raypo.plan.memory import Sharding
from raypo.plan.turns import most_away, worst_turn

USABLE = 0.95
"""Share of a device that is planned with: Ray kills workers above 95 % of a node's RAM, and torch's
allocator loses as much of a GPU to fragments."""


@dataclass(frozen=True)
class DeviceLoad:
    """What a GPU or a node's RAM must hold at its worst moment."""

    name: str
    phase: str
    needed: int
    available: int | None
    """Bytes; None: nobody said."""

    @property
    def fits(self) -> bool:
        """Whether it stays below the usable share."""
        return self.available is None or self.needed <= USABLE * self.available


def device_of(config: PPOConfig, nodes: Sequence[Node]) -> Device:
    """Where the models live.

    Raises:
        ConfigError: learner.use_gpu is true and no node has a GPU.
    """
    there = any(node.gpus for node in nodes)
    if config.learner.use_gpu is True and not there:
        raise ConfigError(
            "learner.use_gpu (True): no node has a GPU. Set learner.use_gpu to auto or false, or "
            "name nodes with GPUs, like --cluster 8xGPU80G."
        )
    return "cuda" if there and config.learner.use_gpu else "cpu"


def roles_of(
    config: PPOConfig, models: Models, sharding: Sharding, device: Device, gpu_bytes: int | None
) -> list[Role]:
    """Each kind of process with its memory; replicas of one kind are alike."""
    roles = [
        Role(LEARNER, estimate.learner(config, models, sharding, device)),
        Role("engine", estimate.engine(config, models.policy, device, gpu_bytes)),
    ]
    if models.reference:
        section = config.placement.frozen.reference
        frozen = estimate.frozen(config, models.reference, device, gpu_bytes, section=section)
        roles.append(Role("reference", frozen))
    for number, shape in enumerate(models.rewards):
        section = config.placement.frozen.reward
        frozen = estimate.frozen(config, shape, device, gpu_bytes, section=section, head=False)
        roles.append(Role(f"reward_{number}", frozen))
    return roles


def num_engines(config: PPOConfig, device: Device) -> int:
    """Engines that are started."""
    return config.rollout.engine.resolved_count(
        num_workers=config.learner.num_workers, use_gpu=device == "cuda"
    )


@dataclass(frozen=True)
class Layout:
    """Index of the node of each bundle, and who lives in the dedicated ones."""

    workers: list[int]
    dedicated: list[int]
    bundles: list[DedicatedBundle]


def lay_out(config: PPOConfig, nodes: Sequence[Node], device: Device) -> Layout:
    """The dedicated group, which is reserved first, and the learner workers on what is left.

    Raises:
        ConfigError: they do not fit onto the nodes.
    """
    learner, strategy = config.learner, config.placement.strategy
    bundles = dedicated_bundles(config, use_gpu=device == "cuda")
    dedicated = place_bundles(nodes, bundles, strategy=strategy)
    workers = place(
        left_of(nodes, bundles, dedicated),
        learner.num_workers,
        cpus=learner.cpus_per_worker,
        gpus=1 if device == "cuda" else 0,
        strategy=strategy,
    )
    return Layout(workers, dedicated, bundles)


def smallest_gpu(nodes: Sequence[Node], layout: Layout) -> int | None:
    """Bytes of the smallest GPU that is used; None: nobody said."""
    sizes = [nodes[index].gpu_bytes for index in (*layout.workers, *layout.dedicated)]
    return min((size for size in sizes if size), default=None)


def roles_in(
    config: PPOConfig, bundle: int, layout: Layout, device: Device, frozen: Sequence[str]
) -> dict[str, int]:
    """Kinds of the processes of a worker's bundle, with the number of the replica or worker.

    An engine lies beside each of the first workers, or of as many as share it; a frozen model
    beside the first worker of each node, or of as many from there on.
    """
    roles = {LEARNER: bundle}
    for name in ("engine", *frozen):
        if config.placement.group_of(kind_of(name)) == "colocated":
            size = num_devices(config, name)
            for number, first in enumerate(_first_workers(config, name, layout, device)):
                if first <= bundle < first + size:
                    roles[name] = number
    return roles


def _first_workers(config: PPOConfig, role: str, layout: Layout, device: Device) -> list[int]:
    """Of each colocated replica of a role."""
    kind = kind_of(role)
    if kind == "engine":
        size = num_devices(config, role)
        return [number * size for number in range(num_engines(config, device))]
    frozen = config.placement.frozen
    section = frozen.reference if kind == "reference" else frozen.reward
    return first_workers(section.num_replicas, layout.workers)


def num_devices(config: PPOConfig, role: str) -> int:
    """GPUs of each replica of a role; on CPU processes."""
    return dict(config.devices_of_replicas().values())[kind_of(role)]


def apart(config: PPOConfig, layout: Layout, device: Device) -> Iterator[str]:
    """Of each role, learner workers that would share a replica and lie on several nodes."""
    for key, (role, size) in config.devices_of_replicas().items():
        if config.placement.group_of(role) == "dedicated":
            continue
        for first in _first_workers(config, role, layout, device):
            theirs = layout.workers[first : first + size]
            if len(theirs) < size or len(set(theirs)) > 1:
                yield (
                    f"{key} ({size}): learner workers {first} to {first + size - 1} would share a "
                    f"replica and do not lie on one node. Set placement.strategy to PACK and "
                    f"learner.num_workers so that each node holds a multiple of {size}, or "
                    f"placement.mode to dedicated."
                )
                break


def kind_of(role: str) -> RoleKind:
    """The word of `placement.mode` for a role: reward for reward_0."""
    if role == "engine":
        return "engine"
    return "reference" if role == "reference" else "reward"


def device_loads(
    config: PPOConfig, roles: list[Role], nodes: Sequence[Node], layout: Layout, device: Device
) -> list[DeviceLoad]:
    """Each GPU and each node's RAM at its worst phase."""
    by_name = {role.name: role for role in roles}
    frozen = [name for name in by_name if name not in (LEARNER, "engine")]
    loads: list[DeviceLoad] = []
    on_node: dict[int, list[Role]] = {}
    turns: dict[int, list[Role]] = {}
    gpus, takes_turns = GpuNumbers(), _takes_turns(config, device)
    for bundle, node in zip(layout.bundles, layout.dedicated, strict=True):
        kinds = [by_name[guest.role] for guest in bundle.guests]
        processes = [kind for kind in kinds for _ in range(num_devices(config, kind.name))]
        on_node.setdefault(node, []).extend(processes)
        for gpu in gpus.take(node, bundle.gpus):
            loads.append(_gpu_load(nodes[node], gpu, *_worst(kinds)))
    for bundle, node in enumerate(layout.workers):
        kinds = [by_name[name] for name in roles_in(config, bundle, layout, device, frozen)]
        on_node.setdefault(node, []).extend(kinds)
        turns.setdefault(node, []).extend(kinds if takes_turns else [])
        for gpu in gpus.take(node, 1 if device == "cuda" else 0):
            worst = worst_turn(kinds) if takes_turns else _worst(kinds)
            loads.append(_gpu_load(nodes[node], gpu, *worst))
    stored = _stored(config, by_name["engine"], device)
    for node, kinds in on_node.items():
        keeps = node == layout.workers[0] or any(role.name == "engine" for role in kinds)
        needed, phase = _ram(kinds, turns.get(node, ()), device)
        needed += stored if keeps else 0
        loads.append(DeviceLoad(f"{nodes[node].name} RAM", phase, needed, nodes[node].ram_bytes))
    return loads


def _takes_turns(config: PPOConfig, device: Device) -> bool:
    """Whether who does not work on a learner worker's GPU is moved to the host."""
    is_colocated = config.placement.group_of("engine") == "colocated"
    return device == "cuda" and is_colocated and config.rollout.engine.sleep


class GpuNumbers:
    """Hands out the GPUs of each node from 0, as Ray does."""

    def __init__(self) -> None:
        self._taken: dict[int, int] = {}

    def take(self, node: int, count: int) -> range:
        """The next ones of a node."""
        first = self._taken.get(node, 0)
        self._taken[node] = first + count
        return range(first, first + count)


def _gpu_load(node: Node, gpu: int, needed: int, phase: str) -> DeviceLoad:
    return DeviceLoad(f"{node.name} GPU {gpu}", phase, needed, node.gpu_bytes)


def _worst(roles: Sequence[Role]) -> tuple[int, str]:
    """Bytes of some processes together at their worst phase, and which it is."""
    steady = sum(role.memory.steady for role in roles)
    phases = dict.fromkeys(phase for role in roles for phase in role.memory.phases)
    added = {phase: sum(role.memory.added(phase) for role in roles) for phase in phases}
    if not added:
        return steady, "always"
    worst = max(added, key=lambda phase: added[phase])
    return steady + added[worst], worst


def _ram(roles: Sequence[Role], turns: Sequence[Role], device: Device) -> tuple[int, str]:
    """RAM of a node: Ray, what the processes hold, and what leaves the GPUs by turns."""
    if device == "cpu":
        needed, phase = _worst(roles)
        return estimate.RAY_BYTES + needed, phase
    host = sum(estimate.HOST_RUNTIME + sum(role.memory.host.values()) for role in roles)
    away, phase = most_away(turns) if turns else (0, "update")
    return estimate.RAY_BYTES + host + away, phase


def _stored(config: PPOConfig, engine: Role, device: Device) -> int:
    """The pushed weights in the object store of the nodes that send or load them."""
    if not estimate.by_object(config, device):
        return 0
    return engine.memory.held["weights"] * config.rollout.engine.tensor_parallel
