"""From a config and the shapes of its models to the memory of each role, and of each device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from raypo.config import FrozenSection, LoraSection, PPOConfig
from raypo.plan import memory
from raypo.plan.memory import ITEMSIZE, Batch, Bytes, Memory, Sharding
from raypo.plan.model_shape import ModelShape

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
LEARNER = "learner worker"
"""Name of that role."""
ENGINE_SEQUENCES = 256
"""Sequences that vLLM samples at a time; each has a row of float32 logits, three times."""


@dataclass(frozen=True)
class Models:
    """Shapes of the models of a run."""

    policy: ModelShape
    critic: ModelShape | None
    reference: ModelShape | None
    rewards: tuple[ModelShape, ...] = ()

    @classmethod
    def read(cls, config: PPOConfig) -> Models:
        """From the folders or the hub; the same path is read once."""
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
        reference = config.reference
        return cls(
            policy,
            critic if config.ppo.needs_critic else None,
            shape("model.reference", reference) if reference else None,
            rewards,
        )


@dataclass(frozen=True)
class Role:
    """One kind of process."""

    name: str
    memory: Memory


def update_batch(config: PPOConfig, shape: ModelShape) -> Batch:
    """The largest micro-batch of an update on one worker."""
    return _worst(config, shape, rows=config.ppo.minibatch_size)


def step_batch(config: PPOConfig, shape: ModelShape) -> Batch:
    """The largest batch of a pass over all of a step's responses."""
    return _worst(config, shape, rows=config.responses_per_step)


def learner(config: PPOConfig, models: Models, sharding: Sharding, device: Device) -> Memory:
    """A learner worker: policy and critic under DeepSpeed."""
    itemsize = ITEMSIZE[config.model.dtype]
    result = Memory(held={"runtime": RUNTIME[device]["learner"]})
    learned = [("policy", models.policy, models.policy.parameters)]
    if models.critic:
        learned.append(("critic", models.critic, models.critic.backbone_parameters))
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
    saved, made = _passes(config, models, itemsize)
    step = sum(update.values())
    bucket = memory.push_bytes(models.policy, itemsize=itemsize)
    result.phases = {
        "evaluate": _named(gathered, activations=_scratch(config, models, itemsize)),
        "update": _update(device, gathered, saved, made, step),
    }
    if device == "cpu":  # weights go to the object store from where they lie, if they lie whole
        is_made = sharding.stage == 3 or config.model.lora is not None
        result.phases["push"] = {"push bucket": bucket if is_made else 0}
    else:
        result.host["push bucket"] = bucket
    return result


def _trained(config: PPOConfig, name: str, shape: ModelShape, parameters: int) -> tuple[int, int]:
    """Elements that a model trains, and of the largest tensor among them."""
    lora = config.model.lora
    if lora is None:
        return parameters, shape.largest_tensor
    if name == "critic" and lora.critic == "head":
        return shape.hidden + 1, shape.hidden
    widest = max(shape.hidden, shape.intermediate, shape.attention)
    return _adapter(lora, shape), lora.rank * widest


def _adapter(lora: LoraSection, shape: ModelShape) -> int:
    targets = None if lora.target_modules == "all-linear" else lora.target_modules
    return shape.adapter_parameters(lora.rank, targets)


def frozen(
    config: PPOConfig,
    shape: ModelShape,
    device: Device,
    gpu_bytes: int | None,
    *,
    section: FrozenSection,
    head: bool = True,
) -> Memory:
    """The reference, or another frozen model without its head."""
    if section.backend == "vllm":
        return _frozen_in_vllm(config, shape, device, gpu_bytes, section=section, head=head)
    itemsize = ITEMSIZE[config.model.dtype]
    batch = step_batch(config, shape)
    added = {"activations": memory.layer_scratch(shape, batch, itemsize=itemsize)}
    if head:
        added["logits"] = memory.logits(shape, batch, itemsize=itemsize, copies=1)
    parameters = shape.parameters if head else shape.backbone_parameters
    return Memory(
        held={"runtime": RUNTIME[device]["frozen"], "weights": parameters * itemsize},
        phases={"score": added},
    )


def _frozen_in_vllm(
    config: PPOConfig,
    shape: ModelShape,
    device: Device,
    gpu_bytes: int | None,
    *,
    section: FrozenSection,
    head: bool,
) -> Memory:
    """As an engine: it takes its fraction of a GPU, and what is left over is cache."""
    itemsize, size = ITEMSIZE[config.model.dtype], section.tensor_parallel
    parameters = shape.parameters if head else shape.backbone_parameters
    held: Bytes = {
        "runtime": _vllm_runtime(device, size),
        "weights": parameters * itemsize // size,
    }
    if device == "cpu":
        held["KV cache"] = memory.default_cpu_kv_bytes(
            shape, max_model_len(config) + 1, itemsize=itemsize, tensor_parallel=size
        )
    elif gpu_bytes:
        taken = int(section.gpu_memory_fraction * gpu_bytes)
        held["KV cache"] = max(0, taken - sum(held.values()))
    return Memory(held=held)


def engine(config: PPOConfig, shape: ModelShape, device: Device, gpu_bytes: int | None) -> Memory:
    """A vLLM engine on one of its devices, or its process there.

    On a GPU it takes `gpu_memory_fraction` and makes the rest its KV cache.
    """
    itemsize = ITEMSIZE[config.model.dtype]
    section, length = config.rollout.engine, max_model_len(config)
    size = section.tensor_parallel
    sampling = ENGINE_SEQUENCES * shape.vocabulary * 4 * 3
    held: Bytes = {
        "runtime": _vllm_runtime(device, size),
        "weights": shape.parameters * itemsize // size,
        "sampling": sampling
        if device == "cuda"
        else min(config.responses_per_step, ENGINE_SEQUENCES) * shape.vocabulary * 12,
    }
    lora = config.model.lora
    if lora and lora.push == "adapter":
        held["adapter"] = _adapter(lora, shape) * itemsize
    if section.kv_cache_gb is not None:
        held["KV cache"] = int(section.kv_cache_gb * 1e9)
    elif device == "cpu":
        held["KV cache"] = memory.default_cpu_kv_bytes(
            shape, length, itemsize=itemsize, tensor_parallel=size
        )
    elif gpu_bytes:
        taken = int(section.gpu_memory_fraction * gpu_bytes)
        held["KV cache"] = max(0, taken - sum(held.values()))
    result = Memory(held=held)
    if size > 1 and by_object(config, device):  # each process gets a copy of its own
        received = {"received bucket": memory.push_bytes(shape, itemsize=itemsize)}
        if device == "cpu":
            result.phases["push"] = received
        else:
            result.host |= received
    return result


def by_object(config: PPOConfig, device: Device) -> bool:
    """Whether whole weights go through the object store."""
    section, lora = config.rollout.engine, config.model.lora
    return (
        section.transport == "object"
        or (section.transport == "auto" and device == "cpu")
        or (lora is not None and lora.push == "adapter")  # the base, beside adapters
    )


def _vllm_runtime(device: Device, tensor_parallel: int) -> int:
    """Of one of a replica's processes; on CPU it bears its part of the one that asks them."""
    if device == "cuda" or tensor_parallel == 1:
        return RUNTIME[device]["engine"]
    return SEVERAL_ON_CPU["worker"] + SEVERAL_ON_CPU["asks"] // tensor_parallel


def max_model_len(config: PPOConfig) -> int:
    """Most tokens of prompt and response together."""
    return config.data.max_prompt_tokens + config.rollout.max_new_tokens


def _worst(config: PPOConfig, shape: ModelShape, *, rows: int) -> Batch:
    return memory.worst_batch(
        max_tokens=config.learner.max_tokens_per_microbatch,
        max_rows=-(-rows // config.learner.num_workers),
        samples=config.rollout.samples_per_prompt,
        prompt_tokens=config.data.max_prompt_tokens,
        response_tokens=config.rollout.max_new_tokens,
    )


def _passes(config: PPOConfig, models: Models, itemsize: int) -> tuple[int, int]:
    """Bytes that the larger forward and backward pass saves, and of its logits."""
    batch = update_batch(config, models.policy)
    kind = {"itemsize": itemsize, "checkpointing": config.learner.activation_checkpointing}
    saved = memory.activations(models.policy, batch, **kind)
    made = memory.logits(models.policy, batch, itemsize=itemsize, copies=2)
    if models.critic:
        saved = max(saved, memory.activations(models.critic, batch, **kind))
    return saved, made


def _scratch(config: PPOConfig, models: Models, itemsize: int) -> int:
    batch = step_batch(config, models.policy)
    return memory.layer_scratch(models.policy, batch, itemsize=itemsize) + memory.logits(
        models.policy, batch, itemsize=itemsize, copies=1
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


def _named(gathered: int, parts: Bytes | None = None, **more: int) -> Bytes:
    parts = {**(parts or {}), **more}
    return {"gathered weights": gathered, **parts} if gathered else parts
