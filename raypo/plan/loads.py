"""Where the processes of a run lie, and what each device then holds at its worst moment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from raypo.config import ConfigError, PPOConfig
from raypo.plan import estimate
from raypo.plan.estimate import Device, Models, Role
from raypo.plan.hardware import Node
from raypo.plan.layout import place
from raypo.plan.memory import Sharding

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
        Role("learner worker", estimate.learner(config, models, sharding, device)),
        Role("engine", estimate.engine(config, models.policy, device, gpu_bytes)),
    ]
    if models.reference:
        roles.append(Role("reference", estimate.frozen(config, models.reference, device)))
    for number, shape in enumerate(models.rewards):
        frozen = estimate.frozen(config, shape, device, head=False)
        roles.append(Role(f"reward_{number}", frozen))
    return roles


def num_engines(config: PPOConfig, device: Device) -> int:
    """Engines that are started."""
    return config.rollout.engine.resolved_count(
        num_workers=config.learner.num_workers, use_gpu=device == "cuda"
    )


def place_workers(config: PPOConfig, nodes: Sequence[Node], device: Device) -> list[int]:
    """Index of the node of each learner worker's bundle.

    Raises:
        ConfigError: they do not fit onto the nodes.
    """
    learner = config.learner
    return place(
        nodes,
        learner.num_workers,
        cpus=learner.cpus_per_worker,
        gpus=1 if device == "cuda" else 0,
        strategy=config.placement.strategy,
    )


def smallest_gpu(nodes: Sequence[Node], placed: list[int]) -> int | None:
    """Bytes of the smallest GPU that is used; None: nobody said."""
    sizes = [nodes[index].gpu_bytes for index in placed]
    return min((size for size in sizes if size), default=None)


def roles_in(config: PPOConfig, bundle: int, device: Device, frozen: Sequence[str]) -> list[str]:
    """Kinds of the processes of a bundle: engine i beside worker i, frozen models beside 0."""
    roles = ["learner worker"]
    roles += ["engine"] if bundle < num_engines(config, device) else []
    return roles + (list(frozen) if bundle == 0 else [])


def device_loads(
    config: PPOConfig, roles: list[Role], nodes: Sequence[Node], placed: list[int], device: Device
) -> list[DeviceLoad]:
    """Each GPU and each node's RAM at its worst phase."""
    by_name = {role.name: role for role in roles}
    frozen = [name for name in by_name if name not in ("learner worker", "engine")]
    loads, on_node = [], {}
    taken: dict[int, int] = {}
    for bundle, node in enumerate(placed):
        kinds = [by_name[name] for name in roles_in(config, bundle, device, frozen)]
        on_node.setdefault(node, []).extend(kinds)
        if device == "cuda":
            gpu = taken.get(node, 0)
            taken[node] = gpu + 1
            needed, phase = _worst(kinds)
            name = f"{nodes[node].name} GPU {gpu}"
            loads.append(DeviceLoad(name, phase, needed, nodes[node].gpu_bytes))
    for node, kinds in on_node.items():
        needed, phase = _ram(config, kinds, device)
        loads.append(DeviceLoad(f"{nodes[node].name} RAM", phase, needed, nodes[node].ram_bytes))
    return loads


def _worst(roles: Sequence[Role]) -> tuple[int, str]:
    """Bytes of some processes together at their worst phase, and which it is."""
    steady = sum(role.memory.steady for role in roles)
    phases = dict.fromkeys(phase for role in roles for phase in role.memory.phases)
    added = {phase: sum(role.memory.added(phase) for role in roles) for phase in phases}
    worst = max(added, key=lambda phase: added[phase])
    return steady + added[worst], worst


def _ram(config: PPOConfig, roles: list[Role], device: Device) -> tuple[int, str]:
    """RAM of a node: Ray, the pushed weights in its object store, and what the processes hold."""
    weights = (
        next(role.memory.held["weights"] for role in roles if role.name == "engine")
        if any(role.name == "engine" for role in roles)
        else 0
    )
    base = estimate.RAY_BYTES + weights
    if device == "cpu":
        needed, phase = _worst(roles)
        return base + needed, phase
    host = sum(estimate.HOST_RUNTIME + sum(role.memory.host.values()) for role in roles)
    return base + host, "update"
