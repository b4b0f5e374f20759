"""From a config and the shapes of its models to the memory of each role, and of each device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from raypo.config import (
    AnyConfig,
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
from raypo.plan.deepspeed_config import Sharding
from raypo.plan.memory import Batch, Bytes, Memory
from raypo.plan.model_shape import ITEMSIZE, ModelShape
from raypo.plan.placement import CRITIC, LEARNER, ServedRole, served_roles
from raypo.plan.sizes import default_cpu_kv_bytes, engine_sequences

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


@dataclass(frozen=True)
class Models:
    """Shapes of the models of a run."""

    policy: ModelShape
    critic: ModelShape | None
    references: dict[str, ModelShape]
    """Reference models by role."""
    rewards: dict[str, ModelShape]
    """Reward models by role; they are read without a language-model head."""

    @property
    def frozen(self) -> dict[str, ModelShape]:
        """Reward models and references, by role."""
        return self.rewards | self.references

    @classmethod
    def read(cls, config: AnyConfig) -> Models:
        """The shapes read from folders or the hub; the same path is read once."""
        read: dict[str, ModelShape] = {}

        def shape(key: str, path: str) -> ModelShape:
            if path not in read:
                read[path] = ModelShape.read(path, key=key)
            return read[path]

        policy = shape("model.policy", config.model.policy)
        if isinstance(config, ExamplesConfig):
            named = config.model.reference if isinstance(config, DPOConfig) else None
            asked = {"reference": shape("model.reference", named)} if named else {}
            return cls(policy, None, asked, {})
        rewards = {
            role: shape("model.reward", entry.path) for role, entry in config.reward_models.items()
        }
        first = next(iter(rewards.values()), policy)
        critic = first if first.vocabulary == policy.vocabulary else policy
        if config.model.critic:
            critic = shape("model.critic", config.model.critic)
        return cls(
            policy,
            critic if config.needs_critic else None,
            {r: shape("model.reference", path) for r, path in config.references.items()},
            rewards,
        )


@dataclass(frozen=True)
class Role:
    """One kind of process."""

    name: str
    memory: Memory


@dataclass(frozen=True)
class Learned:
    """A model that a learner worker trains."""

    name: str
    shape: ModelShape
    weights: int
    """Elements of all it has, its head included."""


def roles_of(
    config: AnyConfig,
    models: Models,
    sharding: Sharding,
    device: Device,
    gpu_bytes: int | None,
) -> list[Role]:
    """Each kind of process with its memory; replicas of one kind are alike."""
    roles = [Role(name, memory) for name, memory in _learners(config, models, sharding, device)]
    for role in served_roles(config, num_workers=1, use_gpu=device == "cuda"):
        if role.kind == "engine":
            assert not isinstance(config, RewardModelConfig), "it samples nothing"
            held = engine(config, models.policy, device, gpu_bytes)
        else:
            held = _frozen(config, role, models.frozen[role.name], device, gpu_bytes)
        roles.append(Role(role.name, held))
    return roles


def _learners(
    config: AnyConfig, models: Models, sharding: Sharding, device: Device
) -> Iterator[tuple[str, Memory]]:
    """The learner workers: of both models, or of policy and critic each."""
    policy, critic = models.policy, models.critic
    weights = policy.parameters
    if isinstance(config, RewardModelConfig):
        weights = policy.backbone_parameters + policy.hidden
    learned = [Learned("policy", policy, weights)]
    critics = [Learned("critic", critic, critic.backbone_parameters)] if critic else []
    apart = config.learner.total_workers - config.learner.num_workers
    if not apart:
        yield LEARNER, _learner(config, models, learned + critics, sharding, device)
        return
    yield LEARNER, _learner(config, models, learned, sharding, device)
    own = Sharding.of(
        config.learner, dtype=config.model.dtype, num_workers=apart, on_gpu=device == "cuda"
    )
    own = replace(
        own,
        stage=sharding.stage if min(apart, sharding.workers) > 1 else own.stage,
        offload_optimizer=sharding.offload_optimizer,
        offload_param=sharding.offload_param,
    )
    yield CRITIC, _learner(config, models, critics, own, device)


def _learner(
    config: AnyConfig,
    models: Models,
    learned: Sequence[Learned],
    sharding: Sharding,
    device: Device,
) -> Memory:
    """A learner worker under DeepSpeed.

    One that learns from examples has a reference of its own while that is asked, before the first
    update, and no engine that it must push all weights to.
    """
    itemsize, first = ITEMSIZE[config.model.dtype], learned[0].shape
    has_words = learned[0].name == "policy" and not isinstance(config, RewardModelConfig)
    result = Memory(held={"runtime": RUNTIME[device]["learner"]})
    update: Bytes = {}
    for each in learned:
        trained, largest = _trained(config, each)
        frozen = each.weights if config.model.lora else 0
        held, added, host = memory.trained(
            trained, largest, sharding, itemsize=itemsize, frozen=frozen
        )
        result.held |= {f"{each.name} {what}": size for what, size in held.items()}
        result.host |= {f"{each.name} {what}": size for what, size in host.items()}
        for what, size in added.items():
            update[what] = max(update.get(what, 0), size)
    gathered = update.pop("gathered weights", 0)
    learning, reading = _batches(config, workers=sharding.workers)
    checkpointing = config.learner.activation_checkpointing
    saved = max(
        memory.activations(
            each.shape, learning, itemsize=itemsize, device=device, checkpointing=checkpointing
        )
        for each in learned
    )
    made = _logits(config, first, learning, device, learns=True) if has_words else 0
    scratch = memory.layer_scratch(first, reading, itemsize=itemsize)
    scratch += _logits(config, first, reading, device) if has_words else 0
    log_probs = _named(gathered, {"activations": scratch})
    step = sum(update.values())
    if device == "cuda" and (more := _loaded_whole(config, learned, sharding, result.held)) > 0:
        result.phases["load"] = {"whole weights": more}
    result.phases |= {
        "log_probs": log_probs,
        "update": _update(device, gathered, saved, made, step),
    }
    if isinstance(config, ExamplesConfig):
        for name, reference in models.references.items():
            log_probs[name] = reference.parameters * itemsize
    elif has_words:
        pushed = {"push bucket": memory.push_bytes(first, itemsize=itemsize)}
        if device == "cuda":
            result.host |= pushed
        elif sharding.stage < 3 and not config.model.lora:
            pushed = {"push bucket": 0}  # it goes to the store from where it lies
        result.phases |= {"push": pushed, "probe": log_probs}
    return result


def _loaded_whole(
    config: AnyConfig, learned: Sequence[Learned], sharding: Sharding, held: Bytes
) -> int:
    """Bytes that the largest model takes before stage 3 cuts it, beyond what is held afterwards.

    DeepSpeed moves a whole model to its device; those of `learner.trained_model.in_shares` it does
    not get whole.
    """
    apart = config.learner.total_workers > config.learner.num_workers
    in_shares = sharding.workers > 1 and not apart and not isinstance(config, RewardModelConfig)
    if sharding.stage < 3 or in_shares:
        return 0
    whole = max(each.weights for each in learned) * ITEMSIZE[config.model.dtype]
    return whole - sum(size for what, size in held.items() if what != "runtime")


def _batches(config: AnyConfig, *, workers: int) -> tuple[Batch, Batch]:
    """The largest micro-batch of an update on one of so many workers, and of passes before it."""
    if isinstance(config, OnlineConfig):
        rows = config.rows_per_update, config.responses_per_step
        return _batch(config, rows[0], workers), _batch(config, rows[1], workers)
    learner, answers = config.learner, 1 if isinstance(config, SFTConfig) else 2
    batch = memory.worst_batch(
        max_tokens=learner.microbatch_tokens,
        max_rows=-(-learner.batch_size // learner.num_workers) * answers,
        samples=answers,
        prompt_tokens=config.data.max_prompt_tokens,
        response_tokens=config.data.max_response_tokens,
    )
    return batch, batch


def _logits(
    config: AnyConfig, shape: ModelShape, batch: Batch, device: Device, *, learns: bool = False
) -> int:
    """Bytes of the logits that a head makes at a time, and of its gradient where it learns."""
    return memory.logits(
        shape,
        batch,
        itemsize=ITEMSIZE[config.model.dtype],
        device=device,
        learns=learns and config.model.lora is None,
        of_divergence=isinstance(config, DistillationConfig),
    )


def _trained(config: AnyConfig, model: Learned) -> tuple[int, int]:
    """Elements that a model trains, and of the largest tensor among them."""
    lora, shape = config.model.lora, model.shape
    if lora is None:
        return model.weights, shape.largest_tensor
    if model.name == "critic" and isinstance(lora, PolicyLoraSection) and lora.critic == "head":
        return shape.hidden + 1, shape.hidden
    widest = max(shape.hidden, shape.intermediate, shape.attention)
    return adapter_weights(lora, shape), lora.rank * widest


def adapter_weights(lora: LoraSection, shape: ModelShape) -> int:
    """Elements of an adapter of a model: rank * (in + out) for each linear layer that has one.

    Where the config names layers that `linears` does not know, all of them are taken to have one.
    """
    linears, targets = shape.linears, lora.target_modules
    if targets != "all-linear" and linears.keys() >= set(targets):
        linears = {name: linears[name] for name in targets}
    return shape.layers * lora.rank * sum(map(sum, linears.values()))


def _frozen(
    config: AnyConfig,
    role: ServedRole,
    shape: ModelShape,
    device: Device,
    gpu_bytes: int | None,
) -> Memory:
    """A reference, or a reward model, which is read without a language-model head."""
    assert isinstance(config, OnlineConfig)
    assert isinstance(role.section, FrozenSection)
    itemsize, head = ITEMSIZE[config.model.dtype], role.kind == "reference"
    weights = (shape.parameters if head else shape.backbone_parameters) * itemsize
    if role.section.backend == "vllm":
        length = max_model_len(config) + 1
        return _in_vllm(role.section, shape, device, gpu_bytes, weights, config.model.dtype, length)
    batch = _batch(config, config.responses_per_step, config.learner.total_workers)
    added = {"activations": memory.layer_scratch(shape, batch, itemsize=itemsize)}
    if head:
        added["logits"] = _logits(config, shape, batch, device)
    return Memory(
        held={"runtime": RUNTIME[device]["frozen"], "weights": weights},
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
    sequences = sequences_at_once(section, gpu_bytes)
    if device == "cpu" and isinstance(config, OnlineConfig):
        sequences = min(config.responses_per_step, sequences)
    more = {"sampling": 3 * 4 * sequences * shape.vocabulary}
    if isinstance(lora, PolicyLoraSection) and lora.push == "adapter":
        more["adapter"] = adapter_weights(lora, shape) * itemsize
    weights, length = shape.parameters * itemsize, max_model_len(config)
    dtype = config.model.dtype
    result = _in_vllm(section, shape, device, gpu_bytes, weights, dtype, length, more)
    if section.tensor_parallel > 1 and by_object(config, device):  # each process gets a copy
        received = {"received bucket": memory.push_bytes(shape, itemsize=itemsize)}
        if device == "cpu":
            result.phases["push"] = received
        else:
            result.host |= received
    return result


def sequences_at_once(section: EngineSection, gpu_bytes: int | None) -> int:
    """Most sequences that each engine samples at a time."""
    return section.extra.get("max_num_seqs") or engine_sequences(gpu_bytes)


def _in_vllm(
    section: EngineSection | FrozenSection,
    shape: ModelShape,
    device: Device,
    gpu_bytes: int | None,
    weights: int,
    dtype: str,
    max_model_len: int,
    more: Bytes | None = None,
) -> Memory:
    """vLLM takes `gpu_memory_fraction` of a GPU, and what it leaves free of that is KV cache."""
    size = section.tensor_parallel
    runtime = RUNTIME[device]["engine"]
    if device == "cpu" and size > 1:  # each bears its part of the process that asks them
        runtime = SEVERAL_ON_CPU["worker"] + SEVERAL_ON_CPU["asks"] // size
    held: Bytes = {"runtime": runtime, "weights": weights // size, **(more or {})}
    if isinstance(section, EngineSection) and section.kv_cache_gb is not None:
        held["KV cache"] = int(section.kv_cache_gb * 1e9)
    elif device == "cpu":
        a_token = shape.kv_bytes_per_token(dtype, tensor_parallel=size)
        held["KV cache"] = default_cpu_kv_bytes(a_token, max_model_len)
    elif gpu_bytes:
        taken = int(section.gpu_memory_fraction * gpu_bytes)
        held["KV cache"] = max(0, taken - sum(held.values()))
    return Memory(held=held)


def by_object(config: OnlineConfig | PolicyExamplesConfig, device: Device) -> bool:
    """Whether whole weights go through the object store.

    Raises:
        ConfigError: `rollout.engine.transport` cannot work on such devices.
    """
    lora = config.model.lora
    if isinstance(lora, PolicyLoraSection) and lora.push == "adapter":
        return True  # the base, beside adapters
    transport = config.rollout.engine.resolved_transport(
        colocated=config.placement.group_of("engine") == "colocated",
        use_gpu=device == "cuda",
        share_gpus=isinstance(config, OnlineConfig) and config.engines_share_gpus,
    )
    return transport == "object"


def max_model_len(config: OnlineConfig | PolicyExamplesConfig) -> int:
    """Most tokens of prompt and response together."""
    return config.data.max_prompt_tokens + config.rollout.max_response_tokens


def _batch(config: OnlineConfig, rows: int, workers: int) -> Batch:
    """The largest micro-batch on one of so many workers, of so many responses over all of them."""
    return memory.worst_batch(
        max_tokens=config.learner.microbatch_tokens,
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
