"""What cannot be, and which keys to change: found by planning with each change."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from raypo.config import ConfigError, PPOConfig
from raypo.plan import estimate, memory
from raypo.plan.estimate import Device, Models
from raypo.plan.hardware import GB, Node
from raypo.plan.loads import USABLE, device_loads, device_of, lay_out, roles_of, smallest_gpu
from raypo.plan.memory import ITEMSIZE

OFF_LOAD = (
    "{zero_force_ds_cpu_optimizer: false, zero_optimization: {offload_optimizer: {device: cpu}}}"
)


def impossible(
    config: PPOConfig, models: Models, device: Device, gpu_bytes: int | None
) -> Iterator[str]:
    """What no memory could heal, or what the engine alone cannot hold."""
    itemsize, length = ITEMSIZE[config.model.dtype], estimate.max_model_len(config)
    size = config.rollout.engine.tensor_parallel
    one = memory.kv_bytes_of_one(models.policy, length, itemsize=itemsize, tensor_parallel=size)
    held = estimate.engine(config, models.policy, device, gpu_bytes).held
    cache = held.get("KV cache")
    if cache is None or cache >= one:
        return
    if config.rollout.engine.kv_cache_gb is not None:
        yield (
            f"rollout.engine.kv_cache_gb ({config.rollout.engine.kv_cache_gb:g}): one sequence of "
            f"{length} tokens (data.max_prompt_tokens + rollout.max_new_tokens) takes "
            f"{one / 1e9:.3g} GB of keys and values. Set rollout.engine.kv_cache_gb to at least "
            f"{_up(one / 1e9)}, or the lengths lower."
        )
        return
    assert gpu_bytes is not None
    least = (sum(held.values()) - cache + one) / gpu_bytes
    fraction = config.rollout.engine.gpu_memory_fraction
    change = (
        f"Set rollout.engine.gpu_memory_fraction to at least {_up(least)}"
        if least <= USABLE
        else "Use GPUs with more memory or a smaller model"
    )
    yield (
        f"rollout.engine.gpu_memory_fraction ({fraction:g}): of {gpu_bytes / GB:.3g} GB it leaves "
        f"{cache / GB:.2g} GB for keys and values beside the engine's weights, and one sequence of "
        f"{length} tokens takes {one / GB:.2g} GB. {change}, or set the lengths lower."
    )


def remedy(config: PPOConfig, nodes: Sequence[Node]) -> str:
    """Which single keys make it fit, found by planning with each of them."""
    found = [text for text, changes in _candidates(config) if _would_fit(config, nodes, changes)]
    if not found:
        return "None of the usual keys makes it fit: use a larger cluster or a smaller model."
    return f"Set {', or '.join(found[:3])}."


def _candidates(config: PPOConfig) -> Iterator[tuple[str, dict[str, Any]]]:
    """Changes of one key (or two that belong together) in the order they should be tried."""
    longest = estimate.max_model_len(config)
    tokens = config.learner.max_tokens_per_microbatch // 2
    while tokens >= longest:
        yield (
            f"learner.max_tokens_per_microbatch to {tokens}",
            {"learner.max_tokens_per_microbatch": tokens},
        )
        tokens //= 2
    for stage in range(config.learner.zero_stage + 1, 4):
        if config.learner.num_workers > 1:
            yield f"learner.zero_stage to {stage}", {"learner.zero_stage": stage}
    if config.learner.zero_stage >= 1:
        yield (
            f"learner.deepspeed to {OFF_LOAD}",
            {
                "learner.deepspeed.zero_force_ds_cpu_optimizer": False,
                "learner.deepspeed.zero_optimization.offload_optimizer.device": "cpu",
            },
        )
    for fraction in (0.4, 0.3, 0.2):
        if fraction < config.rollout.engine.gpu_memory_fraction:
            yield (
                f"rollout.engine.gpu_memory_fraction to {fraction}",
                {"rollout.engine.gpu_memory_fraction": fraction},
            )
    sharded = {
        "learner.zero_stage": 3,
        "learner.deepspeed.zero_force_ds_cpu_optimizer": False,
        "learner.deepspeed.zero_optimization.offload_optimizer.device": "cpu",
    }
    words = f"learner.zero_stage to 3 and learner.deepspeed to {OFF_LOAD}"
    if config.learner.num_workers > 1:
        yield words, sharded
        for fraction in (0.4, 0.3):
            more = {"rollout.engine.gpu_memory_fraction": fraction}
            yield f"{words} and rollout.engine.gpu_memory_fraction to {fraction}", sharded | more
    if config.model.dtype == "float32":
        yield "model.dtype to bfloat16", {"model.dtype": "bfloat16"}
    yield "rollout.engine.kv_cache_gb to 0.5", {"rollout.engine.kv_cache_gb": 0.5}


def _would_fit(config: PPOConfig, nodes: Sequence[Node], changes: dict[str, Any]) -> bool:
    try:
        changed = config.parse(_set(config.model_dump(), changes))
        models, device = Models.read(changed), device_of(changed, nodes)
        layout = lay_out(changed, nodes, device)
    except ConfigError:
        return False
    learner, gpu_bytes = changed.learner, smallest_gpu(nodes, layout)
    sharding = memory.sharding_of(
        learner.zero_stage, learner.num_workers, learner.deepspeed, dtype=changed.model.dtype
    )
    roles = roles_of(changed, models, sharding, device, gpu_bytes)
    loads = device_loads(changed, roles, nodes, layout, device)
    can_be = not any(True for _ in impossible(changed, models, device, gpu_bytes))
    return can_be and all(load.fits for load in loads)


def _set(values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    for key, value in changes.items():
        *path, last = key.split(".")
        place = values
        for part in path:
            place = place.setdefault(part, {})
        place[last] = value
    return values


def _up(number: float) -> float:
    """Two digits, rounded up."""
    return -(-number * 100 // 1) / 100
