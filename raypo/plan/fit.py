"""Plan of a run: bundles on nodes, memory of roles and devices, remedies if it does not fit."""

from __future__ import annotations

import itertools
import math
import operator
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import yaml
from omegaconf import OmegaConf

from raypo.cluster.hardware import GB, Node
from raypo.cluster.placement import (
    LEARNERS,
    PlacedBundle,
    colocation_problem,
    lay_out,
    served_roles,
    takes_gpus,
)
from raypo.config import (
    AnyConfig,
    ConfigError,
    LearnerSection,
    OnlineConfig,
    PolicyExamplesConfig,
)
from raypo.config.auto_values import (
    KV_CACHE_SIZE,
    SNAPSHOT_SHARE,
    candidates,
    is_sleep_unresolved,
    least_memory,
    with_value,
)
from raypo.config.sweep_config import with_values
from raypo.learner.deepspeed_config import Sharding
from raypo.models.model_shape import Models
from raypo.plan import estimate
from raypo.plan.estimate import Device, Role, roles_of
from raypo.run.phase_table import (
    ENGINE_WEIGHTS,
    FROZEN_MODELS,
    KV_CACHE,
    PARAMETERS,
    PRESENT,
    TRAINING_STATE,
    Phase,
)
from raypo.serving.engine_sizes import cpu_sequence_bytes

USABLE = 0.95
"""Usable share of a device's memory. Ray kills workers above 95 % of a node's RAM, and torch's
allocator loses about 5 % of a GPU's memory to fragmentation."""
SIDE_BY_SIDE = 0.85
"""Share of a GPU that `auto` may fill. The margin covers the error of the predictions, about 15 %.
If models that were placed side by side do not fit, the run fails. If they take turns on the GPU
without need, the run is only slower."""
CHOICES = (
    (0, False, False),
    (1, False, False),
    (2, False, False),
    (2, True, False),
    (3, False, False),
    (3, True, False),
    (3, True, True),
)
"""Ways to shard the learner's models: ZeRO stage, whether the optimizer is off-loaded, whether the
weights are off-loaded."""
OFF_LOAD = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
"""Values of `learner.deepspeed` that off-load the optimizer to RAM."""
TILE = 4096
"""Value of `learner.mlp_tile_tokens` that is proposed for long rows."""
CORES_PER_GPU = 3
"""CPU cores that keep a GPU busy (an estimate): the learner's thread, the engine's, and Ray's."""
MAX_REMEDIES = 3
MOMENTS = {phase.value: phase for phase in Phase if phase != Phase.LEARN} | {
    "load": Phase.LEARN,
    "log_probs": Phase.LEARN,
    "update": Phase.LEARN,
}
"""Maps each moment for which memory is predicted to the phase of a step that contains it."""


@dataclass(frozen=True)
class DeviceLoad:
    """Peak memory of a GPU or of a node's RAM."""

    name: str
    phase: str
    needed: int
    available: int | None
    """Memory of the device in bytes. None means unknown."""
    snapshot: int = 0
    """Bytes of RAM for writing checkpoints beside the steps. Not in `needed`, because a run that
    lacks them writes checkpoints within their step."""

    @property
    def is_gpu(self) -> bool:
        """True for a GPU's memory, False for a node's RAM."""
        return not self.name.endswith("RAM")

    @property
    def fits(self) -> bool:
        """True if the load stays within the usable share, or if the memory is unknown."""
        return self.available is None or self.needed <= USABLE * self.available


@dataclass(frozen=True)
class Choice:
    """One way to shard the learner's models, with the loads of the fullest device and node."""

    sharding: Sharding
    is_chosen: bool
    device: DeviceLoad
    host: DeviceLoad


@dataclass(frozen=True)
class Plan:
    """A run laid out on nodes: everything that `raypo plan` prints."""

    config: AnyConfig
    nodes: Sequence[Node]
    device: Device
    """Kind of device that holds the models."""
    models: Models
    bundles: list[PlacedBundle]
    decisions: tuple[str, ...] = ()
    """One sentence for each `auto`: the value chosen, and why."""
    decides_cache: bool = False
    """True if the plan has set `rollout.engine.kv_cache_gb`."""

    @property
    def fits(self) -> bool:
        """True if the run can be started."""
        return not self.problems

    @property
    def holds(self) -> bool:
        """True if every device has enough memory.

        This is cheaper than `fits`, which also searches remedies.
        """
        return not any(_impossible(self)) and all(load.fits for load in self.loads)

    @cached_property
    def problems(self) -> list[str]:
        """Reasons why the run cannot start, each as `key (value): rule. remedy.`"""
        problems = [*_impossible(self), *self._torn_apart()]
        full = [load for load in self.loads if not load.fits]
        if full:
            worst = max(full, key=lambda load: load.needed / (load.available or 1))
            problems.append(
                f"memory ({worst.name}): needs {worst.needed / GB:.3g} GB in the phase "
                f"{worst.phase}, {USABLE * (worst.available or 0) / GB:.3g} GB of "
                f"{(worst.available or 0) / GB:.3g} GB are usable. {_remedy(self)}"
            )
        return problems

    @property
    def notes(self) -> list[str]:
        """Sentences on the values chosen for `auto`, and on quantities that are unknown."""
        notes = list(self.decisions)
        if not self.models.policy.is_exact:
            notes.append("model.policy has no weights here: its size is computed from config.json")
        if self.device == "cuda" and any(n.gpus and n.gpu_bytes is None for n in self.nodes):
            notes.append("the memory of the GPUs is not known, so it is not checked: use --cluster")
        if self.device == "cuda" and any(n.gpus and n.gpu is None for n in self.nodes):
            notes.append(
                "the kind of the GPUs is not known, so no times are predicted: name it like "
                "--cluster 8xH100"
            )
        if self.device == "cuda" and self.idle_gpus:
            notes.append(
                f"{self.idle_gpus} of {sum(node.gpus for node in self.nodes)} GPUs are idle: "
                "learner.num_workers sets how many the learner uses"
            )
        if self.device == "cuda":
            notes += self._few_cores()
        if any(node.ram_bytes is None for node in self.nodes):
            notes.append("the nodes' RAM is not stated, so it is not checked")
        return [*notes, *self._checkpoints()]

    def _few_cores(self) -> Iterator[str]:
        """Yield a sentence for each node whose cores may be too few to keep its GPUs busy."""
        used = Counter(node for node, _ in {(e.node, gpu) for e in self.bundles for gpu in e.gpus})
        for index, gpus in used.items():
            node = self.nodes[index]
            if node.cpus is not None and node.cpus < CORES_PER_GPU * gpus:
                yield (
                    f"{node.name} has {node.cpus} CPU cores for {gpus} GPUs: learner, engine and "
                    f"Ray keep about {CORES_PER_GPU} cores busy for each GPU, so steps may take "
                    "longer than predicted"
                )

    def _checkpoints(self) -> Iterator[str]:
        """Yield a sentence that says if checkpoints are written beside the steps.

        The first checkpoint decides it by the same rule (`run/run_checkpoints.py`).
        """
        learner = self.config.learner
        two_write = (
            isinstance(learner, LearnerSection) and learner.critic_workers and learner.save_critic
        )
        if two_write or self.config.checkpoint.background != "auto":
            return
        frees = [
            (max(0, load.available - load.needed), load)
            for load in self.loads
            if load.snapshot and load.available is not None
        ]
        short = [pair for pair in frees if pair[1].snapshot > SNAPSHOT_SHARE * pair[0]]
        for free, load in (short or frees)[:1]:
            where = "within their step" if short else "while the next steps run"
            yield (
                f"checkpoint.background (auto): checkpoints are written {where}: a copy of the "
                f"state takes {load.snapshot / GB:.3g} GB of {free / GB:.3g} GB of free "
                f"{load.name}, of which it may take {SNAPSHOT_SHARE:.0%}"
            )

    @property
    def sharding(self) -> Sharding:
        """Sharding of the learner's models."""
        learner, dtype = self.config.learner, self.config.model.dtype
        return Sharding.of(
            learner, dtype=dtype, num_workers=learner.num_workers, on_gpu=self.device == "cuda"
        )

    @property
    def roles(self) -> list[Role]:
        """Kinds of processes, each with the memory that it needs."""
        return roles_of(self.config, self.models, self.sharding, self.device, self.gpu_bytes)

    @cached_property
    def loads(self) -> list[DeviceLoad]:
        """Peak memory of each GPU and of each node's RAM."""
        return self._loads(self.sharding)

    @property
    def choices(self) -> list[Choice]:
        """Ways to shard the learner's models."""
        own, choices = self.sharding, []
        kinds = [*CHOICES, (own.stage, own.offload_optimizer, own.offload_param)]
        for stage, optimizer, param in dict.fromkeys(kinds):
            sharding = replace(own, stage=stage, offload_optimizer=optimizer, offload_param=param)
            if self.device == "cpu" and (optimizer or param) and sharding != own:
                continue  # everything is in RAM already
            if stage == 0 and self.config.model.dtype == "bfloat16":
                continue  # it runs as stage 1, see deepspeed_config
            fullest = sorted(
                self._loads(sharding),
                key=lambda load: -load.needed / (load.available or load.needed * 2),
            )
            rams = [load for load in fullest if load.name.endswith("RAM")]
            gpus = [load for load in fullest if load not in rams] or fullest
            choices.append(Choice(sharding, sharding == own, gpus[0], rams[0]))
        return choices

    @property
    def idle_gpus(self) -> int:
        """Number of GPUs of the nodes that no bundle uses."""
        used = {(placed.node, gpu) for placed in self.bundles for gpu in placed.gpus}
        return sum(node.gpus for node in self.nodes) - len(used)

    @property
    def is_torn_apart(self) -> bool:
        """True if a role's replica would span workers on several nodes."""
        return bool(self._torn_apart())

    @property
    def gpu_bytes(self) -> int | None:
        """Memory of the smallest GPU in use. None means unknown."""
        sizes = [self.nodes[placed.node].gpu_bytes for placed in self.bundles]
        return min((size for size in sizes if size), default=None)

    def _torn_apart(self) -> list[str]:
        """Return an error for each role whose replica would span workers on several nodes."""
        where = [placed.node for placed in self.bundles if placed.group == "workers"]
        count, use_gpu = self.config.learner.num_workers, self.device == "cuda"
        roles = served_roles(self.config, num_workers=count, use_gpu=use_gpu)
        errors = [colocation_problem(role, where) for role in roles if role.group == "colocated"]
        # Reward models share one config key, so they share one error.
        return list(dict.fromkeys(filter(None, errors)))

    def _loads(self, sharding: Sharding) -> list[DeviceLoad]:
        """Return the loads of devices if the learner's models are sharded as `sharding` says."""
        config, device = self.config, self.device
        roles = roles_of(config, self.models, sharding, device, self.gpu_bytes)
        by_name = {role.name: role for role in roles}
        # Models that are idle in a phase are moved from a learner worker's GPU to the host.
        takes_turns = (
            isinstance(config, OnlineConfig)
            and device == "cuda"
            and config.placement.group_of("engine") == "colocated"
            and config.rollout.engine.sleeps
        )
        is_ahead = isinstance(config, OnlineConfig) and config.rollout.mode != "sync"
        loads: list[DeviceLoad] = []
        processes: dict[int, list[Role]] = {}
        in_turn: dict[int, list[Role]] = {}
        stores: set[int] = set()
        for placed in self.bundles:
            occupants = [by_name[occupant.role] for occupant in placed.bundle.occupants]
            node, is_shared = self.nodes[placed.node], takes_turns and placed.group == "workers"
            needed, phase = _worst_turn(occupants) if is_shared else _worst(occupants, is_ahead)
            for gpu in placed.gpus:
                loads.append(DeviceLoad(f"{node.name} GPU {gpu}", phase, needed, node.gpu_bytes))
            for occupant, role in zip(placed.bundle.occupants, occupants, strict=True):
                processes.setdefault(placed.node, []).extend([role] * occupant.processes)
            in_turn.setdefault(placed.node, []).extend(occupants if is_shared else ())
            if by_name.get("engine") in occupants or (placed.group, placed.index) == ("workers", 0):
                stores.add(
                    placed.node
                )  # the object store holds weights pushed from rank 0 to engines
        stored = 0
        sampled = engine_config(config)
        if sampled is not None and estimate.transport(sampled, device) == "object":
            engine = by_name["engine"].memory
            stored = engine.held["weights"] * sampled.rollout.engine.tensor_parallel
        for index, here in processes.items():
            needed, phase = _ram(here, in_turn[index], device, is_ahead)
            needed += stored if index in stores else 0
            node = self.nodes[index]
            copied = sum(role.memory.snapshot for role in here)
            loads.append(DeviceLoad(f"{node.name} RAM", phase, needed, node.ram_bytes, copied))
        return loads


def make_plan(config: AnyConfig, nodes: Sequence[Node]) -> Plan:
    """Plan a run on nodes. Reads the models' configs and the headers of their weight files.

    Raises:
        ConfigError: a model's sizes cannot be read, learner.use_gpu is true and no node has a GPU,
            or the bundles do not fit onto the nodes.
    """
    resources = [node.resources for node in nodes]
    use_gpu = takes_gpus(config, resources)
    if use_gpu and not any(node.gpus for node in nodes):
        raise ConfigError(
            "learner.use_gpu (True): no node has a GPU. Set learner.use_gpu to auto or false, or "
            "name nodes with GPUs, like --cluster 8xGPU80G."
        )
    config = config.with_dtype(use_gpu=use_gpu)
    bundles = lay_out(config, resources, use_gpu=use_gpu)
    plan = Plan(config, nodes, "cuda" if use_gpu else "cpu", Models.read(config), bundles)
    return decided(plan) if use_gpu else plan


def decide_for_gpus(config: AnyConfig, gpu_bytes: int) -> tuple[AnyConfig, Sequence[str]]:
    """Decide every `auto` of a run as `make_plan` does, for workers that already have their GPUs.

    A trainer passes this function to its workers (`Runtime.decide`), because only the workers know
    the memory of the GPUs that Ray has assigned to them.

    Args:
        config: Config of the run.
        gpu_bytes: Memory of the smallest GPU.

    Returns:
        The config, and a message for each decision.
    """
    # Placement does not matter here, so plan on one node with room for all bundles.
    anywhere = with_value(with_value(config, "placement.strategy", "PACK"), "learner.use_gpu", True)
    try:
        plan = make_plan(anywhere, [Node("the cluster", gpus=10**6, gpu_bytes=gpu_bytes)])
    except ConfigError as error:  # the plan cannot read the model; it may still run
        decided, _ = least_memory(config, gpu_bytes)
        return decided, [
            f"auto keys are set for the lowest memory use, because there is no plan: {error}"
        ]
    decided = with_value(plan.config, "learner.use_gpu", config.learner.use_gpu)
    strategy = config.placement.strategy
    return with_value(decided, "placement.strategy", strategy), plan.decisions


def decided(plan: Plan) -> Plan:
    """Decide the values that depend on the memory of the GPUs.

    These are `learner.max_tokens_per_microbatch: auto`, `rollout.engine.sleep: auto`, and the size
    of the KV cache (`_with_known_cache`).

    The first choice that fills GPUs to at most `SIDE_BY_SIDE` is taken. Choices in which the models
    share the GPU side by side are tried before choices in which they take turns. Within each of the
    two kinds, more tokens are tried before fewer. If no choice fits, the one with the least memory
    is taken, and the plan's problems say what is missing. Values other than auto are kept.
    """
    choices = candidates(plan.config)
    tries = [replace(plan, config=choice) for choice in choices]
    found = next(filter(_leaves_room, tries), tries[-1])
    decisions = []
    if plan.config.learner.max_tokens_per_microbatch == "auto":
        tokens = found.config.learner.microbatch_tokens
        decisions.append(f"learner.max_tokens_per_microbatch is auto: {tokens}{_because(found)}")
    if is_sleep_unresolved(plan.config) and isinstance(found.config, OnlineConfig):
        sleeps = found.config.rollout.engine.sleeps
        value = (
            "true, the models take turns" if sleeps else "false, all models fit at the same time"
        )
        decisions.append(f"rollout.engine.sleep is auto: {value}{_because(found)}")
    return _with_known_cache(replace(found, decisions=tuple(decisions)))


def _with_known_cache(plan: Plan) -> Plan:
    """Set `rollout.engine.kv_cache_gb` to the predicted size, if nothing sleeps and all have room.

    vLLM then measures no free memory while it starts, so all roles can start at the same time.
    """
    config = engine_config(plan.config)
    if config is None or plan.gpu_bytes is None or config.rollout.engine.kv_cache_gb is not None:
        return plan
    is_colocated = config.placement.group_of("engine") == "colocated"
    takes_turns = isinstance(config, OnlineConfig) and config.rollout.engine.sleeps
    if not is_colocated or takes_turns or any(_impossible(plan)) or not _leaves_room(plan):
        return plan
    held = estimate.engine(config, plan.models, plan.device, plan.gpu_bytes).held
    size = held["KV cache"] // 10**7 / 100
    if not size:
        return plan
    return replace(plan, config=with_value(config, KV_CACHE_SIZE, size), decides_cache=True)


def _leaves_room(plan: Plan) -> bool:
    """Return True if no GPU is filled beyond `SIDE_BY_SIDE`. Unknown memory gives False."""
    gpus = [load for load in plan.loads if load.is_gpu]
    return all(load.needed <= SIDE_BY_SIDE * (load.available or 0) for load in gpus)


def _because(plan: Plan) -> str:
    """Describe the fullest GPU of a plan."""
    gpus = [load for load in plan.loads if load.is_gpu and load.available]
    if not gpus:
        return ", because the memory of the GPUs is not known"
    worst = max(gpus, key=lambda load: load.needed / (load.available or 1))
    return f" ({worst.needed / GB:.3g} of {(worst.available or 0) / GB:.3g} GB of a GPU)"


def tried(plan: Plan, changes: Mapping[str, Any]) -> Plan | None:
    """Return the plan of the run with some values changed, or None if the changes are invalid.

    Args:
        plan: The plan to change.
        changes: New values, by dotted config key.
    """
    if plan.decides_cache:  # its size depends on the other values
        changes = {KV_CACHE_SIZE: None, **changes}
    try:
        config = plan.config.parse(with_values(plan.config.model_dump(), changes))
        return make_plan(config, plan.nodes)
    except ConfigError:
        return None


def engine_config(config: AnyConfig) -> OnlineConfig | PolicyExamplesConfig | None:
    """Return the config if the run has engines, else None."""
    if isinstance(config, OnlineConfig | PolicyExamplesConfig) and config.needs_engine:
        return config
    return None


def _worst(roles: Sequence[Role], is_ahead: bool = False) -> tuple[int, str]:
    """Return the peak bytes of some processes together, and the phase of the peak.

    Args:
        is_ahead: True if rollouts are sampled and scored while the learner updates. The peaks of
            the learner and of the served models then add up.
    """
    if is_ahead:
        learner, phase = _worst([role for role in roles if role.name in LEARNERS])
        served, _ = _worst([role for role in roles if role.name not in LEARNERS])
        return learner + served, phase
    steady = sum(role.memory.steady for role in roles)
    phases = dict.fromkeys(phase for role in roles for phase in role.memory.phases)
    added = {phase: sum(role.memory.added(phase) for role in roles) for phase in phases}
    if not added:
        return steady, "always"
    worst = max(added, key=lambda phase: added[phase])
    return steady + added[worst], worst


def _worst_turn(roles: Sequence[Role]) -> tuple[int, str]:
    """Return peak bytes and phase of a GPU whose processes start one by one and then take turns."""
    turns = {moment: sum(_here(role, moment) for role in roles) for moment in MOMENTS}
    start = Phase.START.value
    served = [role for role in roles if role.name not in LEARNERS]
    turns[start] += max((role.memory.steady - _here(role, start) for role in served), default=0)
    return max((needed, moment) for moment, needed in turns.items())


def _ram(
    roles: Sequence[Role], in_turn: Sequence[Role], device: Device, is_ahead: bool
) -> tuple[int, str]:
    """Return a node's peak RAM (Ray, processes, models moved off the GPUs) and its phase."""
    if device == "cpu":
        needed, phase = _worst(roles, is_ahead)
        return estimate.RAY_BYTES + needed, phase
    host = sum(estimate.HOST_RUNTIME + sum(role.memory.host.values()) for role in roles)
    moments = MOMENTS.keys() - {Phase.START.value}  # the learner does not exist yet
    away, phase = max((sum(_away(role, moment) for role in in_turn), moment) for moment in moments)
    return estimate.RAY_BYTES + host + away, phase if away else "update"


def _here(role: Role, moment: str) -> int:
    """Return the bytes that a role holds on the GPU at a moment of `MOMENTS`."""
    present = (None, *PRESENT[MOMENTS[moment]])
    held = sum(size for part, _, size in _parts(role) if part in present)
    return held + role.memory.added(moment)


def _away(role: Role, moment: str) -> int:
    """Return the bytes of a role's GPU memory that are in RAM at a moment of `MOMENTS`.

    The learner and the frozen models keep their pinned buffers in RAM even while their memory is on
    the GPU. An engine does not.
    """
    stays, present = role.name != "engine", PRESENT[MOMENTS[moment]]
    return sum(size for part, kept, size in _parts(role) if kept and (stays or part not in present))


def _parts(role: Role) -> Iterator[tuple[str | None, bool, int]]:
    """Yield the parts of the memory that a role holds between phases.

    Each part is a tuple of three values. The first is its name in the phase table, or None for the
    runtime of the process, which never leaves the GPU. The second is True if the part moves to RAM
    when it leaves the GPU, and False if it is discarded, like a KV cache. The third is its size in
    bytes.
    """
    for what, size in role.memory.held.items():
        if what in ("runtime", "experts"):  # vLLM's sleep does not free the store of experts
            yield None, False, size
        elif role.name in LEARNERS:
            yield PARAMETERS if what == "policy weights" else TRAINING_STATE, True, size
        elif role.name == "engine":
            is_weights = what in ("weights", "draft model")
            yield ENGINE_WEIGHTS if is_weights else KV_CACHE, is_weights, size
        else:
            yield FROZEN_MODELS, what == "weights", size


def _impossible(plan: Plan) -> Iterator[str]:
    """Yield an error if the engine's KV cache cannot hold one sequence of full length."""
    config, gpu_bytes = engine_config(plan.config), plan.gpu_bytes
    if config is None:
        return
    section, length = config.rollout.engine, config.max_model_len
    kv_dtype = section.kv_dtype(config.model.dtype)
    one = cpu_sequence_bytes(
        sum(
            shape.kv_bytes_per_token(kv_dtype, tensor_parallel=section.tensor_parallel)
            for shape in (plan.models.policy, plan.models.drafter)
            if shape is not None
        ),
        length,
    )
    held = estimate.engine(config, plan.models, plan.device, gpu_bytes).held
    cache = held.get("KV cache")
    if cache is None or cache >= one:
        return
    if section.kv_cache_gb is not None:
        yield (
            f"rollout.engine.kv_cache_gb ({section.kv_cache_gb:g}): one sequence of {length} "
            f"tokens (data.max_prompt_tokens + {config.rollout.length_key}) takes "
            f"{one / 1e9:.3g} GB of keys and values. Set rollout.engine.kv_cache_gb to at least "
            f"{_up(one / 1e9)}, or lower the lengths."
        )
        return
    assert gpu_bytes is not None
    least = (sum(held.values()) - cache + one) / gpu_bytes
    change = (
        f"Set rollout.engine.gpu_memory_fraction to at least {_up(least)}"
        if least <= USABLE
        else "Use GPUs with more memory or a smaller model"
    )
    yield (
        f"rollout.engine.gpu_memory_fraction ({section.gpu_memory_fraction:g}): of "
        f"{gpu_bytes / GB:.3g} GB it leaves {cache / GB:.2g} GB for keys and values beside the "
        f"engine's weights, and one sequence of {length} tokens takes {one / GB:.2g} GB. "
        f"{change}, or lower the lengths."
    )


def _up(number: float) -> float:
    """Round up to two decimals."""
    return -(-number * 100 // 1) / 100


def remedies(plan: Plan) -> list[Changes]:
    """Return up to three changes, as alternatives, each of which makes the run fit.

    Keys that cost nothing but idle GPUs come first. If no single key suffices, the only element has
    several keys to change together. The list is empty if nothing helps.
    """
    ways = _ways(plan)
    single = filter(None, (_first_that_fits(plan, way) for way in ways))
    if alternatives := list(itertools.islice(single, MAX_REMEDIES)):
        return alternatives
    # Change one more key at a time, each to its most severe value, then drop those without need.
    together = list(itertools.accumulate((way[-1] for way in ways if way), operator.or_))
    changes = _first_that_fits(plan, together)
    for key in changes or ():
        fewer = {name: value for name, value in (changes or {}).items() if name != key}
        changes = _first_that_fits(plan, [fewer]) or changes
    return [changes] if changes else []


def _remedy(plan: Plan) -> str:
    """Name the keys to change so that the run fits."""
    sentences = [
        " and ".join(f"{key} to {flow(value)}" for key, value in changes.items())
        for changes in remedies(plan)
    ]
    if not sentences:
        return "None of the usual keys makes it fit: use a larger cluster or a smaller model."
    return f"Set {', or '.join(sentences)}."


Changes = dict[str, Any]
"""New values by dotted config key."""


def _ways(plan: Plan) -> list[list[Changes]]:
    """Return the alternative values of each key that saves memory, from mild to severe."""
    config = plan.config
    learner, sampled = config.learner, engine_config(config)
    halves = [learner.microbatch_tokens // 2**n for n in range(1, 32)]
    longest = config.data.max_prompt_tokens + (
        config.rollout.max_response_tokens
        if isinstance(config, OnlineConfig)
        else config.data.max_response_tokens
    )
    halves = [half for half in halves if half * learner.sequence_parallel >= longest]
    off_load = OmegaConf.to_object(OmegaConf.merge(learner.deepspeed, OFF_LOAD))
    checkpoints = [False, True, *(["offload"] if plan.device == "cuda" else [])]
    tiles = not learner.mlp_tile_tokens and longest > TILE and can_tile(plan.models)
    engine: dict[str, list[Any]] = {}
    if sampled:
        section = sampled.rollout.engine
        fractions = (0.4, 0.3, 0.2)
        engine = {
            "gpu_memory_fraction": [f for f in fractions if f < section.gpu_memory_fraction],
            "kv_cache_gb": [0.5],
            "sleep": [True] if plan.device == "cuda" and not section.sleeps else [],
            "tensor_parallel": [n for n in (2, 4, 8) if n > section.tensor_parallel],
        }
    values: dict[str, list[Any]] = {
        "learner.num_workers": worker_counts(plan),
        "learner.max_tokens_per_microbatch": halves,
        "learner.zero_stage": list(range(learner.zero_stage + 1, 4)),
        "learner.activation_checkpointing": checkpoints[
            checkpoints.index(learner.activation_checkpointing) + 1 :
        ],
        "learner.mlp_tile_tokens": [TILE] if tiles else [],
        "learner.deepspeed": [off_load] if off_load != learner.deepspeed else [],
        **{f"rollout.engine.{key}": choices for key, choices in engine.items()},
        "model.dtype": ["bfloat16"] if config.model.dtype == "float32" else [],
    }
    ways = [[{key: value} for value in choices] for key, choices in values.items()]
    return [*ways, _shared_rows(plan)]


def _shared_rows(plan: Plan) -> list[Changes]:
    """Return larger numbers of workers that share a row, with as many workers as they need."""
    learner = plan.config.learner
    apart = learner.total_workers - learner.num_workers
    if not can_share_rows(plan.config, plan.models):
        return []
    return [
        {"learner.sequence_parallel": size}
        | ({} if count == learner.num_workers else {"learner.num_workers": count})
        for size in (2, 4, 8)
        for count in (learner.num_workers, *worker_counts(plan))
        if size > learner.sequence_parallel and not learner.is_elastic
        if count % size == 0 and apart % size == 0
    ]


def can_tile(models: Models) -> bool:
    """Return True if the MLPs of all trained models can be computed in tiles."""
    return all(shape.tiles_mlps for shape in models.trained)


def can_share_rows(config: AnyConfig, models: Models) -> bool:
    """Return True if the start would not refuse workers that share rows, because of the models."""
    has_images = getattr(config.data, "image_key", None) is not None
    return not has_images and all(shape.shares_rows for shape in models.trained)


def worker_counts(plan: Plan) -> list[int]:
    """Return larger numbers of learner workers that the idle GPUs allow: powers of two, and all."""
    if plan.device != "cuda" or not plan.idle_gpus:
        return []
    now = plan.config.learner.num_workers
    most = now + plan.idle_gpus
    return sorted({*(2**n for n in range(1, most.bit_length()) if now < 2**n <= most), most})


def _first_that_fits(plan: Plan, way: Sequence[Changes]) -> Changes | None:
    """Return the mildest change with which the run fits when planned again."""
    for changes in way:
        changed = tried(plan, changes)
        if changed is not None and changed.holds and not changed.is_torn_apart:
            return changes
    return None


def flow(value: Any) -> str:
    """Format a value as in a run file, on one line."""
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=math.inf)
    return text.removesuffix("\n").removesuffix("\n...")
