"""Resolution of the values `auto` that depend on the memory of a run's GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from raypo.config.base import flatten
from raypo.config.recipe_config import AnyConfig
from raypo.config.run_config import OnlineConfig, RecipeConfig

MICROBATCH, SLEEP = "learner.max_tokens_per_microbatch", "rollout.engine.sleep"
KV_CACHE_SIZE = "rollout.engine.kv_cache_gb"
GPU_MICROBATCHES = (32768, 16384, 8192, 4096)
"""Candidates for `learner.max_tokens_per_microbatch: auto`, fastest first. Smaller microbatches are
slower, because kernel launches then limit a small model."""

SNAPSHOT_SHARE = 0.5
"""Maximum share of a node's free RAM for the copies of `checkpoint.background: auto`."""


def candidates(config: AnyConfig) -> list[Any]:
    """Return the configs to which `auto` can resolve.

    The first is the fastest, the last needs the least memory.
    """
    tokens = config.learner.max_tokens_per_microbatch
    microbatches = GPU_MICROBATCHES if tokens == "auto" else (tokens,)
    variants: list[Any] = [config]
    if is_sleep_unresolved(config):
        variants = [with_value(config, SLEEP, sleeps) for sleeps in (False, True)]
    return [
        with_value(variant, MICROBATCH, microbatch)
        for variant in variants
        for microbatch in microbatches
    ]


def is_sleep_unresolved(config: AnyConfig) -> bool:
    """Return True if `rollout.engine.sleep: auto` must still be resolved.

    Dedicated engines never sleep, so the result is False for them.
    """
    return (
        isinstance(config, OnlineConfig)
        and config.rollout.engine.sleep == "auto"
        and config.placement.group_of("engine") == "colocated"
    )


def least_memory(config: Any, gpu_bytes: int) -> tuple[Any, list[str]]:
    """Resolve every `auto` to the value that needs the least memory, regardless of the GPU size.

    Returns:
        The config, and an empty list of messages, because the result is always the same.
    """
    return candidates(config)[-1], []


def with_auto_of(config: OnlineConfig, other: OnlineConfig) -> OnlineConfig:
    """Return the config with `auto` (or null) restored for each key that has it in `other`.

    The two configs can then be compared.
    """
    values = flatten(other.model_dump())
    for key in (MICROBATCH, SLEEP):
        if values[key] == "auto":
            config = with_value(config, key, "auto")
    return with_value(
        config, KV_CACHE_SIZE, values[KV_CACHE_SIZE] and config.rollout.engine.kv_cache_gb
    )


def decided_as(config: RecipeConfig, recorded_values: Mapping[str, Any]) -> RecipeConfig:
    """Return the config with its `auto` values resolved as in an earlier run.

    `raypo train` calls this before it knows the devices. If they resolve `model.dtype` differently
    from the earlier run, the trainer's own check refuses the config later. Runs of old versions
    recorded fixed values, because microbatches and sleep could not be `auto` then.

    Args:
        config: Config to resolve.
        recorded_values: Recorded config of the earlier run.
    """
    dtype = recorded_values.get("model", {}).get("dtype", "auto")
    if dtype != "auto":
        config = config.with_dtype(use_gpu=dtype == "bfloat16")
    current, recorded = flatten(config.model_dump()), flatten(recorded_values)
    for key in (MICROBATCH, SLEEP):
        if current.get(key) == "auto" and recorded.get(key) is not None:
            config = with_value(config, key, recorded[key])
    return config


def with_value(config: Any, key: str, value: Any) -> Any:
    """Return a copy of a frozen config or section with another value at a dotted key."""
    name, _, subkey = key.partition(".")
    if subkey:
        value = with_value(getattr(config, name), subkey, value)
    return config.model_copy(update={name: value})
