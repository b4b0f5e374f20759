"""The plan of a run: role -> bundle -> node and devices, memory, and whether it fits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from raypo.config import PPOConfig
from raypo.plan import memory
from raypo.plan.estimate import LEARNER, Device, Models, Role
from raypo.plan.hardware import GB, Node
from raypo.plan.loads import (
    USABLE,
    DeviceLoad,
    GpuNumbers,
    Layout,
    apart,
    device_loads,
    device_of,
    lay_out,
    roles_in,
    roles_of,
    smallest_gpu,
)
from raypo.plan.memory import Sharding
from raypo.plan.remedies import impossible, remedy

CHOICES = (
    (0, False, False),
    (1, False, False),
    (2, False, False),
    (2, True, False),
    (3, False, False),
    (3, True, False),
    (3, True, True),
)
"""ZeRO stage, optimizer off-loaded, weights off-loaded."""


@dataclass(frozen=True)
class Bundle:
    """One bundle of a placement group and who lives in it."""

    group: Literal["dedicated", "workers"]
    index: int
    node: str
    resources: str
    roles: tuple[str, ...]
    devices: str


@dataclass(frozen=True)
class Choice:
    """What one way to shard would need on the fullest device and the fullest node."""

    sharding: Sharding
    is_chosen: bool
    device: DeviceLoad
    host: DeviceLoad

    @property
    def fits(self) -> bool:
        """Whether both hold it."""
        return self.device.fits and self.host.fits


@dataclass(frozen=True)
class Plan:
    """Everything that `raypo plan` prints."""

    bundles: list[Bundle]
    roles: list[Role]
    loads: list[DeviceLoad]
    choices: list[Choice]
    problems: list[str]
    """One sentence each: key (value): rule. remedy."""
    notes: list[str]

    @property
    def fits(self) -> bool:
        """Whether the run can be started."""
        return not self.problems


def make_plan(config: PPOConfig, nodes: Sequence[Node]) -> Plan:
    """Plan a run on some nodes; pure but for the models' headers.

    Raises:
        ConfigError: a model's sizes cannot be read, or the bundles do not fit onto the nodes.
    """
    models = Models.read(config)
    device = device_of(config, nodes)
    layout = lay_out(config, nodes, device)
    sharding = memory.sharding_of(
        config.learner.zero_stage,
        config.learner.num_workers,
        config.learner.deepspeed,
        dtype=config.model.dtype,
    )
    roles = roles_of(config, models, sharding, device, smallest_gpu(nodes, layout))
    loads = device_loads(config, roles, nodes, layout, device)
    problems = _problems(config, models, nodes, layout, device, loads)
    return Plan(
        bundles=list(_bundles(config, models, nodes, layout, device)),
        roles=roles,
        loads=loads,
        choices=list(_choices(config, models, nodes, layout, device, sharding)),
        problems=problems,
        notes=_notes(models, nodes, device),
    )


def _bundles(
    config: PPOConfig, models: Models, nodes: Sequence[Node], layout: Layout, device: Device
) -> Iterator[Bundle]:
    frozen = ["reference"] if models.reference else []
    frozen += [f"reward_{number}" for number in range(len(models.rewards))]
    gpus = GpuNumbers()
    for index, (dedicated, node) in enumerate(zip(layout.bundles, layout.dedicated, strict=True)):
        numbers = gpus.take(node, dedicated.gpus)
        yield Bundle(
            group="dedicated",
            index=index,
            node=nodes[node].name,
            resources=words(dedicated.cpus, dedicated.gpus),
            roles=tuple(map(str, dedicated.guests)),
            devices=device_words(numbers),
        )
    for bundle, node in enumerate(layout.workers):
        num_gpus = 1 if device == "cuda" else 0
        kinds = roles_in(config, bundle, layout, device, frozen)
        names = {kind: f"{kind}:{number}" for kind, number in kinds.items()}
        names[LEARNER] = f"learner {bundle}"
        yield Bundle(
            group="workers",
            index=bundle,
            node=nodes[node].name,
            resources=words(config.learner.cpus_per_worker, num_gpus),
            roles=tuple(names.values()),
            devices=device_words(gpus.take(node, num_gpus)),
        )


def words(cpus: int, gpus: int) -> str:
    """`1 CPU, 2 GPU`."""
    return f"{cpus} CPU" + (f", {gpus} GPU" if gpus else "")


def device_words(gpus: range) -> str:
    """`GPU 0, 1`."""
    return f"GPU {', '.join(map(str, gpus))}" if gpus else "CPU"


def _choices(
    config: PPOConfig,
    models: Models,
    nodes: Sequence[Node],
    layout: Layout,
    device: Device,
    chosen: Sharding,
) -> Iterator[Choice]:
    for stage, optimizer, param in CHOICES:
        if device == "cpu" and (optimizer or param):
            continue  # they are in RAM already
        if stage == 0 and config.model.dtype == "bfloat16":
            continue  # it runs as 1
        sharding = replace(chosen, stage=stage, offload_optimizer=optimizer, offload_param=param)
        roles = roles_of(config, models, sharding, device, smallest_gpu(nodes, layout))
        loads = device_loads(config, roles, nodes, layout, device)
        fullest = sorted(loads, key=lambda load: -load.needed / (load.available or load.needed * 2))
        gpus = [load for load in fullest if not load.name.endswith("RAM")] or fullest
        rams = [load for load in fullest if load.name.endswith("RAM")]
        yield Choice(sharding, sharding == chosen, gpus[0], rams[0])


def _problems(
    config: PPOConfig,
    models: Models,
    nodes: Sequence[Node],
    layout: Layout,
    device: Device,
    loads: list[DeviceLoad],
) -> list[str]:
    problems = list(impossible(config, models, device, smallest_gpu(nodes, layout)))
    problems += apart(config, layout, device)
    full = [load for load in loads if not load.fits]
    if full:
        worst = max(full, key=lambda load: load.needed / (load.available or 1))
        problems.append(
            f"memory ({worst.name}): needs {worst.needed / GB:.3g} GB in the phase "
            f"{worst.phase}, {USABLE * (worst.available or 0) / GB:.3g} GB of "
            f"{(worst.available or 0) / GB:.3g} GB are usable. {remedy(config, nodes)}"
        )
    return problems


def _notes(models: Models, nodes: Sequence[Node], device: Device) -> list[str]:
    notes = []
    if not models.policy.is_exact:
        notes.append("model.policy has no weights here: its size is computed from config.json")
    if device == "cuda" and any(node.gpus and node.gpu_bytes is None for node in nodes):
        notes.append("the memory of the GPUs is not known, so it is not checked: use --cluster")
    if any(node.ram_bytes is None for node in nodes):
        notes.append("the nodes' RAM is not stated, so it is not checked")
    return notes
