"""Keys of a run that are decided once the memory of its GPUs is known, and their values.

They are `learner.max_tokens_per_microbatch: auto` and `rollout.engine.sleep: auto`.
"""

from __future__ import annotations

from typing import Any

from raypo.config.recipe_config import AnyConfig
from raypo.config.run_config import OnlineConfig

GPU_MICROBATCHES = (16384, 8192, 4096)
"""Candidates of `learner.max_tokens_per_microbatch: auto`, the fastest first. With fewer tokens a
small model is limited by kernel launches."""


def candidates(config: AnyConfig) -> list[Any]:
    """Return the configs that `auto` can become, from the fastest to the one of least memory."""
    tokens = config.learner.max_tokens_per_microbatch
    counts = GPU_MICROBATCHES if tokens == "auto" else (tokens,)
    learners = [
        config.learner.model_copy(update={"max_tokens_per_microbatch": count}) for count in counts
    ]
    if not sleep_is_open(config):
        return [config.model_copy(update={"learner": learner}) for learner in learners]
    assert isinstance(config, OnlineConfig)
    engines = [config.rollout.engine.model_copy(update={"sleep": each}) for each in (False, True)]
    rollouts = [config.rollout.model_copy(update={"engine": engine}) for engine in engines]
    return [
        config.model_copy(update={"rollout": rollout, "learner": learner})
        for rollout in rollouts
        for learner in learners
    ]


def sleep_is_open(config: AnyConfig) -> bool:
    """Return True if `rollout.engine.sleep` is undecided; engines on their own GPUs never sleep."""
    return (
        isinstance(config, OnlineConfig)
        and config.rollout.engine.sleep == "auto"
        and config.placement.group_of("engine") == "colocated"
    )


def least_memory(config: Any, gpu_bytes: int) -> tuple[Any, list[str]]:
    """Decide every `auto` for the least memory, however large the GPUs are.

    Returns:
        The config, and a message for each decision: none, because it is always the same.
    """
    return candidates(config)[-1], []


def with_auto_of(config: OnlineConfig, other: OnlineConfig) -> OnlineConfig:
    """Return the config with `auto` restored wherever the other has auto, to compare the two."""
    if other.learner.max_tokens_per_microbatch == "auto":
        learner = config.learner.model_copy(update={"max_tokens_per_microbatch": "auto"})
        config = config.model_copy(update={"learner": learner})
    if other.rollout.engine.sleep == "auto":
        engine = config.rollout.engine.model_copy(update={"sleep": "auto"})
        rollout = config.rollout.model_copy(update={"engine": engine})
        config = config.model_copy(update={"rollout": rollout})
    return config
