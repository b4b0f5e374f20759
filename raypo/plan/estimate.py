"""Predict the memory of each role of a run from its config and the shapes of its models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from raypo.cluster.placement import CRITIC, LEARNER, ServedRole, served_roles
from raypo.config import (
    AnyConfig,
    DistillationConfig,
    EngineSection,
    ExamplesConfig,
    FrozenSection,
    LearnerSection,
    LoraSection,
    OnlineConfig,
    PolicyExamplesConfig,
    PolicyLoraSection,
    RewardModelConfig,
    SFTConfig,
)
from raypo.learner.deepspeed_config import Sharding
from raypo.models.model_shape import ITEMSIZE, Models, ModelShape
from raypo.plan import memory
from raypo.plan.memory import Batch, Bytes, Memory
from raypo.serving.engine_sizes import (
    default_cpu_kv_bytes,
    engine_batched_tokens,
    engine_sequences,
    max_requests_of,
)

Device = Literal["cpu", "cuda"]
RUNTIME = {
    "cpu": {"learner": 700 * 10**6, "engine": 1100 * 10**6, "frozen": 600 * 10**6},
    "cuda": {"learner": 600 * 10**6, "engine": 600 * 10**6, "frozen": 600 * 10**6},
}
"""Bytes of a process before it loads a model: imports on CPU, the CUDA context and library
workspaces on GPU. The CPU numbers are measured with a tiny model (learner worker 0.71 GB, reference
model 0.56 GB; tests/benchmarks/test_memory.py); the GPU numbers are typical values."""
COMMUNICATOR = 5 * 10**8
"""Bytes of a GPU that each of NCCL's communicators takes in a process (a typical value)."""
SEVERAL_ON_CPU = {"worker": 900 * 10**6, "client": 750 * 10**6}
"""Measured bytes of vLLM's processes on CPU, if there are several. The client is the process that
sends requests to the workers."""
HOST_RUNTIME = 2 * 10**9
"""RAM of a process that uses a GPU: imports and CUDA's libraries."""
RAY_BYTES = 10**9
"""RAM of Ray's own processes on a node."""
CPU_HEAP = 1.4
"""Resident bytes per byte of activations on CPU (measured): glibc's heap keeps freed memory."""


@dataclass(frozen=True)
class Role:
    """A kind of process and its memory."""

    name: str
    memory: Memory


@dataclass(frozen=True)
class Learned:
    """A model that a learner worker trains."""

    name: str
    shape: ModelShape
    weights: int
    """Number of weights, including those of the head."""


def roles_of(
    config: AnyConfig,
    models: Models,
    sharding: Sharding,
    device: Device,
    gpu_bytes: int | None,
) -> list[Role]:
    """Return each kind of process with its memory. All replicas of a kind need the same memory."""
    roles = [Role(name, memory) for name, memory in _learners(config, models, sharding, device)]
    for role in served_roles(config, num_workers=1, use_gpu=device == "cuda"):
        if role.kind == "engine":
            assert not isinstance(config, RewardModelConfig), "it samples nothing"
            held = engine(config, models, device, gpu_bytes)
        else:
            held = _frozen(config, role, models.frozen[role.name], device, gpu_bytes)
        roles.append(Role(role.name, held))
    return roles


def _learners(
    config: AnyConfig, models: Models, sharding: Sharding, device: Device
) -> Iterator[tuple[str, Memory]]:
    """Yield each kind of learner worker, with its memory.

    If the critic has its own workers, there are two kinds. Otherwise one kind trains all models.
    """
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
    """Return the memory of a learner worker under DeepSpeed.

    A worker that learns from examples loads the reference model itself, before the first update.
    """
    itemsize, first = ITEMSIZE[config.model.dtype], learned[0].shape
    has_words = learned[0].name == "policy" and not isinstance(config, RewardModelConfig)
    is_pushed = has_words and config.needs_engine
    broadcasts = (
        is_pushed
        and isinstance(config, OnlineConfig | PolicyExamplesConfig)
        and transport(config, device) == "nccl"
    )
    runtime = RUNTIME[device]["learner"]
    shares_rows = config.learner.sequence_parallel > 1
    runtime += _communicators([sharding.workers > 1, broadcasts, shares_rows], device)
    result = Memory(held={"runtime": runtime})
    update: Bytes = {}
    for model in learned:
        trained, largest = _trained(config, model)
        frozen = model.weights if config.model.lora else 0
        is_muon = config.learner.optimizer == "muon"
        matrices = model.shape.layers * model.shape.layer_weights if is_muon else 0
        held, added, host = memory.trained(
            trained, largest, sharding, itemsize=itemsize, frozen=frozen, matrices=matrices
        )
        is_exported = model.name == "policy" or (
            isinstance(config.learner, LearnerSection) and config.learner.save_critic
        )
        exported = model.weights * itemsize if is_exported else 0
        result.snapshot += memory.snapshot(trained, sharding, matrices=matrices, exported=exported)
        result.held |= {f"{model.name} {what}": size for what, size in held.items()}
        result.host |= {f"{model.name} {what}": size for what, size in host.items()}
        for what, size in added.items():
            update[what] = max(update.get(what, 0), size)
    gathered = update.pop("gathered weights", 0)
    learning, reading = _batches(config, workers=sharding.workers)
    checkpointing = config.learner.activation_checkpointing
    result.host |= _inputs_on_host(config, learned, learning, device)
    saved = max(
        memory.activations(
            model.shape,
            learning,
            itemsize=itemsize,
            device=device,
            checkpointing=checkpointing,
            mlp_tile=config.learner.mlp_tile_tokens,
        )
        for model in learned
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
    if is_pushed:
        pushed = {"push bucket": memory.push_bytes(first, itemsize=itemsize)}
        if device == "cuda":
            result.host |= pushed
        elif sharding.stage < 3 and not config.model.lora:
            pushed = {"push bucket": 0}  # the weights go into the object store without a copy
        if sharding.stage == 3:
            pushed["gathered weights"] = memory.push_bytes(first, itemsize=itemsize)
        result.phases |= {"push": pushed, "probe": dict(log_probs)}
    in_ram = result.host if device == "cuda" else result.held
    groups = sharding.workers // config.learner.sequence_parallel
    in_ram.update(_replayed(config, models.policy, workers=groups))
    if isinstance(config, ExamplesConfig):
        for name, reference in models.references.items():
            log_probs[name] = reference.parameters * itemsize
    return result


def _inputs_on_host(
    config: AnyConfig, learned: Sequence[Learned], batch: Batch, device: Device
) -> Bytes:
    """Return the size of the layers' inputs that wait in RAM for the backward pass."""
    if config.learner.activation_checkpointing != "offload" or device != "cuda":
        return {}
    itemsize = ITEMSIZE[config.model.dtype]
    sizes = (memory.layer_inputs(model.shape, batch, itemsize=itemsize) for model in learned)
    return {"layer inputs": max(sizes)}


def _replayed(config: AnyConfig, shape: ModelShape, *, workers: int) -> Bytes:
    """Return the size of the experts in a worker's share of the longest possible batch."""
    if not isinstance(config, OnlineConfig) or config.rollout.router_replay == "off":
        return {}
    rows = -(-config.responses_per_step // workers)
    return {"experts": rows * config.max_model_len * shape.expert_bytes}


def _loaded_whole(
    config: AnyConfig, learned: Sequence[Learned], sharding: Sharding, held: Bytes
) -> int:
    """Return how many more bytes are in use while the largest model loads than afterwards.

    Before stage 3 shards a model, DeepSpeed moves the whole model to the device. Models that
    `learner.trained_model.in_shares` loads in shards are the exception.
    """
    apart = config.learner.total_workers > config.learner.num_workers
    in_shares = sharding.workers > 1 and not apart and not isinstance(config, RewardModelConfig)
    if sharding.stage < 3 or in_shares:
        return 0
    whole = max(model.weights for model in learned) * ITEMSIZE[config.model.dtype]
    return whole - sum(size for what, size in held.items() if what != "runtime")


def _batches(config: AnyConfig, *, workers: int) -> tuple[Batch, Batch]:
    """Return a worker's largest micro-batches: in an update, and in the passes before it."""
    if isinstance(config, OnlineConfig):
        rows, shares = config.rows_per_update, config.learner.sequence_parallel
        return (
            _batch(config, rows, workers, shares=shares),
            _batch(config, config.responses_per_step, workers, shares=shares),
        )
    learner, answers = config.learner, 1 if isinstance(config, SFTConfig) else 2
    groups = learner.num_workers // learner.sequence_parallel
    batch = memory.worst_batch(
        max_tokens=learner.microbatch_tokens,
        max_rows=-(-learner.batch_size // groups) * answers,
        samples=answers,
        prompt_tokens=config.data.max_prompt_tokens,
        response_tokens=config.data.max_response_tokens,
        shares=learner.sequence_parallel,
    )
    return batch, batch


def _logits(
    config: AnyConfig, shape: ModelShape, batch: Batch, device: Device, *, learns: bool = False
) -> int:
    """Return the bytes of a chunk of logits. If `learns`, add those of the head's gradient."""
    return memory.logits(
        shape,
        batch,
        itemsize=ITEMSIZE[config.model.dtype],
        device=device,
        learns=learns and config.model.lora is None,
        head_in_float32=getattr(config.model, "head_dtype", "model") == "float32",
        of_divergence=isinstance(config, DistillationConfig),
    )


def _trained(config: AnyConfig, model: Learned) -> tuple[int, int]:
    """Return the number of trained weights, and the number in the largest trained tensor."""
    lora, shape = config.model.lora, model.shape
    if lora is None:
        return model.weights, shape.largest_tensor
    if model.name == "critic" and isinstance(lora, PolicyLoraSection) and lora.critic == "head":
        return shape.hidden + 1, shape.hidden
    widest = max(shape.hidden, shape.intermediate, shape.attention)
    return adapter_weights(lora, shape), lora.rank * widest


def adapter_weights(lora: LoraSection, shape: ModelShape) -> int:
    """Return the number of weights of a LoRA adapter: rank * (in + out) for each adapted layer.

    If the config names a layer that is not in `shape.linears`, all linear layers count as adapted.
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
    """Return the memory of a reference model or a judge, or of a reward model without LM head."""
    assert isinstance(config, OnlineConfig)
    assert isinstance(role.section, FrozenSection)
    itemsize, head = ITEMSIZE[config.model.dtype], role.kind != "reward"
    weights = (shape.parameters if head else shape.backbone_parameters) * itemsize
    if role.section.backend == "vllm":
        length = (config.max_reference_len if head else config.max_model_len) + 1
        if role.kind == "judge" and config.reward.judge:
            length = config.reward.judge.max_model_len
        dtype = config.model.dtype
        return _in_vllm(role.section, [shape], device, gpu_bytes, weights, dtype, length)
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
    models: Models,
    device: Device,
    gpu_bytes: int | None,
) -> Memory:
    """Return the memory that a vLLM engine needs per GPU, or per process on CPU."""
    shape, drafter, itemsize = models.policy, models.drafter, ITEMSIZE[config.model.dtype]
    section, lora = config.rollout.engine, config.model.lora
    sequences = sequences_at_once(config, device, gpu_bytes)
    if device == "cpu" and isinstance(config, OnlineConfig):
        sequences = min(config.responses_per_step, sequences)
    speculation = section.speculation
    drafted = 0 if speculation.kind == "none" else speculation.num_tokens
    # A pass has a row of logits for each drafted token, and one for the token after them.
    more = {"sampling": 3 * 4 * sequences * (1 + drafted) * shape.vocabulary}
    if isinstance(lora, PolicyLoraSection) and lora.push == "adapter":
        more["adapter"] = adapter_weights(lora, shape) * itemsize
    if drafter is not None:
        more["draft model"] = drafter.parameters * itemsize // section.tensor_parallel
    weights, length = engine_weight_bytes(config, shape), config.max_model_len
    dtype = config.model.dtype
    groups = [transport(config, device) == "nccl"]
    cached = [shape] if drafter is None else [shape, drafter]
    result = _in_vllm(section, cached, device, gpu_bytes, weights, dtype, length, more, groups)
    if isinstance(config, OnlineConfig) and config.rollout.router_replay == "engine":
        kv_dtype = section.kv_dtype(dtype)
        keys = shape.kv_bytes_per_token(kv_dtype, tensor_parallel=section.tensor_parallel)
        result.held["experts"] = result.held.get("KV cache", 0) // keys * shape.expert_bytes
    # Each process gets a copy of the weights.
    if section.tensor_parallel > 1 and transport(config, device) == "object":
        received = {"received bucket": memory.push_bytes(shape, itemsize=itemsize)}
        if device == "cpu":
            result.phases["push"] = received
        else:
            result.host |= received
    return result


def engine_weight_bytes(config: OnlineConfig | PolicyExamplesConfig, shape: ModelShape) -> int:
    """Return the size of an engine's weights. Embeddings and head are never quantised."""
    itemsize = ITEMSIZE[config.model.dtype]
    if config.rollout.engine.quantization is None:
        return shape.parameters * itemsize
    outside = shape.vocabulary * shape.hidden * (1 if shape.tied else 2)
    return shape.parameters + outside * (itemsize - 1)


def sequences_at_once(
    config: OnlineConfig | PolicyExamplesConfig, device: Device, gpu_bytes: int | None
) -> int:
    """Return the maximum number of sequences that an engine samples at a time."""
    section, num_workers = config.rollout.engine, config.learner.num_workers
    count = section.resolved_count(num_workers=num_workers, use_gpu=device == "cuda")
    default = engine_sequences(gpu_bytes, max_requests_of(config, num_engines=count))
    return section.extra.get("max_num_seqs") or default


def _in_vllm(
    section: EngineSection | FrozenSection,
    shapes: Sequence[ModelShape],
    device: Device,
    gpu_bytes: int | None,
    weights: int,
    dtype: str,
    max_model_len: int,
    more: Bytes | None = None,
    groups: Sequence[bool] = (),
) -> Memory:
    """Return the memory of vLLM. On a GPU, the KV cache takes the rest of `gpu_memory_fraction`."""
    size = section.tensor_parallel
    of_engine = section if isinstance(section, EngineSection) else None
    runtime = RUNTIME[device]["engine"]
    runtime += _communicators([size > 1, *groups], device)
    if device == "cpu" and size > 1:  # add each process's share of the client
        runtime = SEVERAL_ON_CPU["worker"] + SEVERAL_ON_CPU["client"] // size
    held: Bytes = {"runtime": runtime, "weights": weights // size, **(more or {})}
    if device == "cuda":
        tokens = of_engine and of_engine.extra.get("max_num_batched_tokens")
        tokens = tokens or engine_batched_tokens(gpu_bytes)
        held["activations"] = memory.vllm_activations(
            shapes[0], tokens, itemsize=ITEMSIZE[dtype], tensor_parallel=size
        )
    if of_engine and of_engine.kv_cache_gb is not None:
        held["KV cache"] = int(of_engine.kv_cache_gb * 1e9)
    elif device == "cpu":
        kv_dtype = of_engine.kv_dtype(dtype) if of_engine else dtype
        a_token = sum(shape.kv_bytes_per_token(kv_dtype, tensor_parallel=size) for shape in shapes)
        held["KV cache"] = default_cpu_kv_bytes(a_token, max_model_len)
    elif gpu_bytes:
        taken = int(section.gpu_memory_fraction * gpu_bytes)
        held["KV cache"] = max(0, taken - sum(held.values()))
    return Memory(held=held)


def transport(config: OnlineConfig | PolicyExamplesConfig, device: Device) -> str:
    """Return how weights are pushed: object, ipc or nccl.

    Raises:
        ConfigError: `rollout.engine.transport` does not work on these devices.
    """
    lora = config.model.lora
    if isinstance(lora, PolicyLoraSection) and lora.push == "adapter":
        return "object"  # also for the base weights, which are pushed once
    return config.rollout.engine.resolved_transport(
        colocated=config.placement.group_of("engine") == "colocated",
        use_gpu=device == "cuda",
        share_gpus=isinstance(config, OnlineConfig) and config.engines_share_gpus,
    )


def _communicators(groups: Sequence[bool], device: Device) -> int:
    """Return the bytes of a process's NCCL groups: those of `groups` that are True."""
    return COMMUNICATOR * sum(groups) if device == "cuda" else 0


def _batch(config: OnlineConfig, rows: int, workers: int, *, shares: int = 1) -> Batch:
    """Return a worker's largest micro-batch. `rows` counts the responses of all workers.

    `shares` is the number of workers that share the tokens of each row.
    """
    return memory.worst_batch(
        max_tokens=config.learner.microbatch_tokens,
        max_rows=-(-rows * shares // workers),
        samples=config.rollout.samples_per_prompt,
        prompt_tokens=config.data.max_prompt_tokens,
        response_tokens=config.rollout.max_response_tokens,
        shares=shares,
    )


def _update(device: Device, gathered: int, saved: int, made: int, step: int) -> Bytes:
    """Return the bytes that an update adds at its peak: in a backward pass or an optimizer step."""
    if device == "cpu":
        # Activations are freed before the optimizer step, but the heap keeps their memory.
        heap = int(CPU_HEAP * saved)
        added = {"logits": made} if made >= step else {"gradient copies": step}
        return _named(gathered, {"activations": heap, **added})
    if saved + made >= step:
        return _named(gathered, {"activations": saved, "logits": made})
    return _named(gathered, {"gradient copies": step})


def _named(gathered: int, parts: Bytes) -> Bytes:
    return {"gathered weights": gathered, **parts} if gathered else parts
