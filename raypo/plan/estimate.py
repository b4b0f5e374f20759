"""From a config and the shapes of its models to the memory of each role, and of each device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from raypo.config import (
    DistillationConfig,
    DPOConfig,
    EngineSection,
    ExamplesConfig,
    FrozenSection,
    LoraSection,
    OnlineConfig,
    PolicyExamplesConfig,
    PolicyLoraSection,
    RewardModelConfig,
    SFTConfig,
)
from raypo.plan import memory
from raypo.plan.memory import ITEMSIZE, Batch, Bytes, Memory, Sharding
from raypo.plan.model_shape import ModelShape
from raypo.plan.placement import CRITIC, LEARNER
from raypo.plan.sizes import default_cpu_kv_bytes

Device = Literal["cpu", "cuda"]
RUNTIME = {
    "cpu": {"learner": 700 * 10**6, "engine": 1100 * 10**6, "frozen": 600 * 10**6},
    "cuda": {"learner": 600 * 10**6, "engine": 600 * 10**6, "frozen": 600 * 10**6},
}
"""Bytes of a process that holds no model yet: imports on CPU, the CUDA context and its libraries'
workspaces on a GPU. Measured on CPU (runs of a tiny model: a learner worker 0.71 GB, a reference
0.56 GB; tests/benchmarks/test_memory.py); a usual number on GPUs."""
SEVERAL_ON_CPU = {"worker": 900 * 10**6, "asks": 750 * 10**6}
"""Of a vLLM in several processes: each of them, and the one beside that asks them. Measured."""
HOST_RUNTIME = 2 * 10**9
"""RAM of a process that works on a GPU: imports and CUDA's libraries."""
RAY_BYTES = 10**9
"""RAM of Ray's own processes on a node."""
CPU_HEAP = 1.4
"""Resident bytes a byte of activations on CPU: glibc's heap keeps what is freed (measured)."""
ENGINE_SEQUENCES = 256
"""Sequences that vLLM samples at a time; each has a row of float32 logits, three times."""


@dataclass(frozen=True)
class Models:
    """Shapes of the models of a run."""

    policy: ModelShape
    critic: ModelShape | None
    references: dict[str, ModelShape]
    """By role."""
    rewards: tuple[ModelShape, ...] = ()

    @classmethod
    def read(cls, config: OnlineConfig | ExamplesConfig) -> Models:
        """From the folders or the hub; the same path is read once."""
        if isinstance(config, ExamplesConfig):
            policy = ModelShape.read(config.model.policy)
            named = config.model.reference if isinstance(config, DPOConfig) else None
            asked = {"reference": ModelShape.read(named, key="model.reference")} if named else {}
            return cls(policy, None, asked)
        read: dict[str, ModelShape] = {}

        def shape(key: str, path: str) -> ModelShape:
            if path not in read:
                read[path] = ModelShape.read(path, key=key)
            return read[path]

        model = config.model
        policy = shape("model.policy", model.policy)
        rewards = tuple(shape("model.reward", entry.path) for entry in model.reward or ())
        shares_words = bool(rewards) and rewards[0].vocabulary == policy.vocabulary
        critic = rewards[0] if shares_words else policy
        if model.critic:
            critic = shape("model.critic", model.critic)
        return cls(
            policy,
            critic if config.needs_critic else None,
            {role: shape("model.reference", path) for role, path in config.references.items()},
            rewards,
        )


@dataclass(frozen=True)
class Role:
    """One kind of process."""

    name: str
    memory: Memory


def roles_of(
    config: OnlineConfig | ExamplesConfig,
    models: Models,
    sharding: Sharding,
    device: Device,
    gpu_bytes: int | None,
) -> list[Role]:
    """Each kind of process with its memory; replicas of one kind are alike."""
    if isinstance(config, ExamplesConfig):
        learner = Role(LEARNER, _examples_learner(config, models, sharding, device))
        if not (isinstance(config, PolicyExamplesConfig) and config.needs_engine):
            return [learner]
        return [learner, Role("engine", engine(config, models.policy, device, gpu_bytes))]
    count, in_all = config.learner.num_workers, config.learner.total_workers
    learned = [("policy", models.policy, models.policy.parameters)]
    critic = models.critic
    critics = [("critic", critic, critic.backbone_parameters)] if critic else []
    if in_all > count:
        own = _of_its_own(config, sharding, in_all - count, device)
        roles = [
            Role(LEARNER, _learner(config, learned, sharding, device)),
            Role(CRITIC, _learner(config, critics, own, device)),
        ]
    else:
        roles = [Role(LEARNER, _learner(config, learned + critics, sharding, device))]
    roles.append(Role("engine", engine(config, models.policy, device, gpu_bytes)))
    frozen = config.placement.frozen
    for name, shape in models.references.items():
        held = _frozen(config, shape, device, gpu_bytes, section=frozen.reference)
        roles.append(Role(name, held))
    for number, shape in enumerate(models.rewards):
        held = _frozen(config, shape, device, gpu_bytes, section=frozen.reward, head=False)
        roles.append(Role(f"reward_{number}", held))
    return roles


def _of_its_own(config: OnlineConfig, sharding: Sharding, workers: int, device: Device) -> Sharding:
    """How a critic's own workers hold it, where the policy's hold theirs as `sharding` says."""
    own = memory.sharding_of(
        config.learner.zero_stage,
        workers,
        config.learner.deepspeed,
        dtype=config.model.dtype,
        on_gpu=device == "cuda",
    )
    return replace(
        own,
        stage=sharding.stage if min(workers, sharding.workers) > 1 else own.stage,
        offload_optimizer=sharding.offload_optimizer,
        offload_param=sharding.offload_param,
    )


def _learner(
    config: OnlineConfig,
    learned: Sequence[tuple[str, ModelShape, int]],
    sharding: Sharding,
    device: Device,
) -> Memory:
    """A learner worker: policy, critic or both under DeepSpeed.

    Args:
        learned: Name, shape and weights of what it trains.
    """
    itemsize = ITEMSIZE[config.model.dtype]
    result = Memory(held={"runtime": RUNTIME[device]["learner"]})
    has_policy, workers = learned[0][0] == "policy", sharding.workers
    update: Bytes = {}
    for name, shape, parameters in learned:
        trained, largest = _trained(config, name, shape, parameters)
        frozen = parameters if config.model.lora else 0
        held, extra, host = memory.trained(
            trained, largest, sharding, itemsize=itemsize, frozen=frozen
        )
        for what, size in held.items():
            result.held[f"{name} {what}"] = size
        for what, size in host.items():
            result.host[f"{name} {what}"] = size
        for what, size in extra.items():
            update[what] = max(update.get(what, 0), size)
    gathered = update.pop("gathered weights", 0)
    step = sum(update.values())
    first = learned[0][1]
    batch = _batch(config, rows=config.rows_per_update, workers=workers)
    made = _logits(config, first, batch, device, copies=2) if has_policy else 0
    saved = max(
        memory.activations(
            shape, batch, itemsize=itemsize, checkpointing=config.learner.activation_checkpointing
        )
        for _, shape, _ in learned
    )
    batch = _batch(config, rows=config.responses_per_step, workers=workers)
    scratch = memory.layer_scratch(first, batch, itemsize=itemsize)
    scratch += _logits(config, first, batch, device, copies=1) if has_policy else 0
    evaluate = _named(gathered, {"activations": scratch})
    result.phases = {
        "evaluate": evaluate,
        "update": _update(device, gathered, saved, made, step),
    }
    if not has_policy:
        return result
    pushed = {"push bucket": memory.push_bytes(first, itemsize=itemsize)}
    if device == "cuda":
        result.host |= pushed
    elif sharding.stage < 3 and not config.model.lora:  # it goes to the store from where it lies
        pushed = {"push bucket": 0}
    result.phases |= {"push": pushed, "probe": evaluate}
    return result


def _examples_learner(
    config: ExamplesConfig, models: Models, sharding: Sharding, device: Device
) -> Memory:
    """A learner worker that learns from examples: one model under DeepSpeed.

    A reference of its own is there while it is asked, before the first update.
    """
    itemsize, shape = ITEMSIZE[config.model.dtype], models.policy
    has_words = not isinstance(config, RewardModelConfig)
    parameters = shape.parameters if has_words else shape.backbone_parameters + shape.hidden
    trained, largest = _trained(config, "policy", shape, parameters)
    frozen = parameters if config.model.lora else 0
    held, update, host = memory.trained(
        trained, largest, sharding, itemsize=itemsize, frozen=frozen
    )
    result = Memory(held={"runtime": RUNTIME[device]["learner"]})
    result.held |= {f"policy {what}": size for what, size in held.items()}
    result.host |= {f"policy {what}": size for what, size in host.items()}
    learner, answers = config.learner, 1 if isinstance(config, SFTConfig) else 2
    batch = memory.worst_batch(
        max_tokens=learner.max_tokens_per_microbatch,
        max_rows=-(-learner.batch_size // learner.num_workers) * answers,
        samples=answers,
        prompt_tokens=config.data.max_prompt_tokens,
        response_tokens=config.data.max_response_tokens,
    )
    checkpointing = learner.activation_checkpointing
    saved = memory.activations(shape, batch, itemsize=itemsize, checkpointing=checkpointing)
    made = _logits(config, shape, batch, device, copies=2) if has_words else 0
    gathered = update.pop("gathered weights", 0)
    scratch = memory.layer_scratch(shape, batch, itemsize=itemsize)
    scratch += _logits(config, shape, batch, device, copies=1) if has_words else 0
    evaluate = _named(gathered, {"activations": scratch})
    for name, reference in models.references.items():
        evaluate[name] = reference.parameters * itemsize
    result.phases = {
        "evaluate": evaluate,
        "update": _update(device, gathered, saved, made, sum(update.values())),
    }
    return result


def _logits(
    config: OnlineConfig | ExamplesConfig,
    shape: ModelShape,
    batch: Batch,
    device: Device,
    *,
    copies: int,
) -> int:
    """Bytes of the logits that a head makes at a time, and of their gradient: two copies."""
    return memory.logits(
        shape,
        batch,
        itemsize=ITEMSIZE[config.model.dtype],
        copies=copies,
        device=device,
        in_float32=isinstance(config, DistillationConfig),
    )


def _trained(
    config: OnlineConfig | ExamplesConfig, name: str, shape: ModelShape, parameters: int
) -> tuple[int, int]:
    """Elements that a model trains, and of the largest tensor among them."""
    lora = config.model.lora
    if lora is None:
        return parameters, shape.largest_tensor
    if name == "critic" and isinstance(lora, PolicyLoraSection) and lora.critic == "head":
        return shape.hidden + 1, shape.hidden
    widest = max(shape.hidden, shape.intermediate, shape.attention)
    return _adapter(lora, shape), lora.rank * widest


def _adapter(lora: LoraSection, shape: ModelShape) -> int:
    targets = None if lora.target_modules == "all-linear" else lora.target_modules
    return shape.adapter_parameters(lora.rank, targets)


def _frozen(
    config: OnlineConfig,
    shape: ModelShape,
    device: Device,
    gpu_bytes: int | None,
    *,
    section: FrozenSection,
    head: bool = True,
) -> Memory:
    """The reference, or another frozen model without its head."""
    itemsize = ITEMSIZE[config.model.dtype]
    parameters = shape.parameters if head else shape.backbone_parameters
    if section.backend == "vllm":
        return _in_vllm(
            shape,
            device,
            gpu_bytes,
            section=section,
            parameters=parameters,
            itemsize=itemsize,
            max_model_len=max_model_len(config) + 1,
        )
    batch = _batch(config, rows=config.responses_per_step, workers=config.learner.total_workers)
    added = {"activations": memory.layer_scratch(shape, batch, itemsize=itemsize)}
    if head:
        added["logits"] = _logits(config, shape, batch, device, copies=1)
    return Memory(
        held={"runtime": RUNTIME[device]["frozen"], "weights": parameters * itemsize},
        phases={"score": added},
    )


def engine(
    config: OnlineConfig | PolicyExamplesConfig,
    shape: ModelShape,
    device: Device,
    gpu_bytes: int | None,
) -> Memory:
    """A vLLM engine on one of its devices, or its process there."""
    itemsize = ITEMSIZE[config.model.dtype]
    section, lora = config.rollout.engine, config.model.lora
    sequences = ENGINE_SEQUENCES
    if device == "cpu" and isinstance(config, OnlineConfig):
        sequences = min(config.responses_per_step, ENGINE_SEQUENCES)
    result = _in_vllm(
        shape,
        device,
        gpu_bytes,
        section=section,
        parameters=shape.parameters,
        itemsize=itemsize,
        max_model_len=max_model_len(config),
        more={"sampling": 3 * 4 * sequences * shape.vocabulary}
        | (
            {"adapter": _adapter(lora, shape) * itemsize}
            if isinstance(lora, PolicyLoraSection) and lora.push == "adapter"
            else {}
        ),
        kv_cache_gb=section.kv_cache_gb,
    )
    if section.tensor_parallel > 1 and by_object(config, device):  # each process gets a copy
        received = {"received bucket": memory.push_bytes(shape, itemsize=itemsize)}
        if device == "cpu":
            result.phases["push"] = received
        else:
            result.host |= received
    return result


def _in_vllm(
    shape: ModelShape,
    device: Device,
    gpu_bytes: int | None,
    *,
    section: EngineSection | FrozenSection,
    parameters: int,
    itemsize: int,
    max_model_len: int,
    more: Bytes | None = None,
    kv_cache_gb: float | None = None,
) -> Memory:
    """Of a GPU vLLM takes `gpu_memory_fraction`, and makes the rest of that its KV cache."""
    size = section.tensor_parallel
    runtime = RUNTIME[device]["engine"]
    if device == "cpu" and size > 1:  # each bears its part of the process that asks them
        runtime = SEVERAL_ON_CPU["worker"] + SEVERAL_ON_CPU["asks"] // size
    held: Bytes = {"runtime": runtime, "weights": parameters * itemsize // size, **(more or {})}
    if kv_cache_gb is not None:
        held["KV cache"] = int(kv_cache_gb * 1e9)
    elif device == "cpu":
        a_token = memory.kv_bytes_per_token(shape, itemsize=itemsize, tensor_parallel=size)
        held["KV cache"] = default_cpu_kv_bytes(a_token, max_model_len)
    elif gpu_bytes:
        taken = int(section.gpu_memory_fraction * gpu_bytes)
        held["KV cache"] = max(0, taken - sum(held.values()))
    return Memory(held=held)


def by_object(config: OnlineConfig | PolicyExamplesConfig, device: Device) -> bool:
    """Whether whole weights go through the object store."""
    section, lora = config.rollout.engine, config.model.lora
    return (
        section.transport == "object"
        or (section.transport == "auto" and device == "cpu")
        # the base, beside adapters
        or (isinstance(lora, PolicyLoraSection) and lora.push == "adapter")
    )


def max_model_len(config: OnlineConfig | PolicyExamplesConfig) -> int:
    """Most tokens of prompt and response together."""
    return config.data.max_prompt_tokens + config.rollout.max_response_tokens


def _batch(config: OnlineConfig, *, rows: int, workers: int) -> Batch:
    """The largest micro-batch on one of so many workers, of so many responses over all of them."""
    return memory.worst_batch(
        max_tokens=config.learner.max_tokens_per_microbatch,
        max_rows=-(-rows // workers),
        samples=config.rollout.samples_per_prompt,
        prompt_tokens=config.data.max_prompt_tokens,
        response_tokens=config.rollout.max_response_tokens,
    )


def _update(device: Device, gathered: int, saved: int, made: int, step: int) -> Bytes:
    """Activations and logits are gone when the optimizer steps, but the heap on CPU keeps them."""
    if device == "cpu":
        kept = int(CPU_HEAP * saved)
        added = {"logits": made} if made >= step else {"gradient copies": step}
        return _named(gathered, {"activations": kept, **added})
    if saved + made >= step:
        return _named(gathered, {"activations": saved, "logits": made})
    return _named(gathered, {"gradient copies": step})


def _named(gathered: int, parts: Bytes) -> Bytes:
    return {"gathered weights": gathered, **parts} if gathered else parts
