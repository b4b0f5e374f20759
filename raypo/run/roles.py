"""What a run needs besides its learner: engines and frozen models, with all that makes them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from raypo.cluster.connect import untold_environment
from raypo.config import OnlineConfig, PolicyExamplesConfig, PolicyLoraSection
from raypo.deployment.deployment import Deployment
from raypo.plan.estimate import max_model_len
from raypo.serving.engine import Engine
from raypo.serving.frozen import ReferenceModel, RewardModel
from raypo.serving.vllm_frozen import VllmReference, VllmRewardModel

CALLERS = 64
"""Most calls that an engine has under way before another replica is asked; each may bring many
requests."""


@dataclass(frozen=True)
class Role:
    """A deployment without what all of a run have in common."""

    name: str
    cls: type
    kwargs: dict[str, Any]
    num_threads: int
    num_devices: int = 1
    """Of each replica: GPUs, on CPU processes."""
    max_ongoing_requests: int = 1
    """That a replica works on at the same time."""

    def with_kwargs(self, changes: Mapping[str, Any]) -> Role:
        """The role, made with other arguments too."""
        return replace(self, kwargs={**self.kwargs, **changes})


def roles_of(config: OnlineConfig, engine_threads: int, frozen_threads: int) -> list[Role]:
    """All that a run needs besides its learner."""
    roles = [engine_of(config, num_threads=engine_threads)]
    for name, model in config.references.items():
        roles.append(_reference(config, name, model, frozen_threads))
    num_models = len(config.model.reward or ())
    return roles + [_reward_model(config, number, frozen_threads) for number in range(num_models)]


def settled(
    role: Role, config: OnlineConfig | PolicyExamplesConfig, run_name: str, logs_dir: str
) -> Deployment:
    """The role as a deployment of a run, which has its name and its logs."""
    # An actor that reserves no CPU gets one thread from Ray; it takes turns with its worker.
    cores = min(role.num_threads, os.cpu_count() or role.num_threads)
    threads = max(1, cores // role.num_devices)
    return Deployment(
        name=f"raypo:{run_name}:{role.name}",
        cls=role.cls,
        kwargs={**role.kwargs, "num_threads": max(1, role.num_threads // role.num_devices)},
        env={**untold_environment(), "OMP_NUM_THREADS": str(threads)},
        logs_dir=logs_dir,
        start_timeout_s=config.placement.timeout_s,
        max_ongoing_requests=role.max_ongoing_requests,
        **config.placement.deployment.model_dump(),
    )


def engine_of(config: OnlineConfig | PolicyExamplesConfig, *, num_threads: int) -> Role:
    """What makes a run's engines."""
    lora = config.model.lora
    holds_adapter = isinstance(lora, PolicyLoraSection) and lora.push == "adapter"
    kwargs = {
        "model": config.model.policy,
        "section": config.rollout.engine,
        "dtype": config.model.dtype,
        "max_model_len": max_model_len(config),
        "seed": config.seed,
        "lora": lora if holds_adapter else None,
        "reads_text": config.rollout.reads_text,
    }
    return Role(
        "engine",
        Engine,
        kwargs,
        num_threads,
        config.rollout.engine.tensor_parallel,
        max_ongoing_requests=CALLERS,
    )


def _reference(config: OnlineConfig, name: str, model: str, num_threads: int) -> Role:
    section = config.placement.frozen.reference
    kwargs = {"model": model, "dtype": config.model.dtype}
    if section.backend == "vllm":
        kwargs |= {"section": section, "max_model_len": max_model_len(config)}
        return Role(name, VllmReference, kwargs, num_threads, section.tensor_parallel)
    kwargs |= {
        "temperature": config.trained_temperature,
        "max_batch_tokens": config.learner.max_tokens_per_microbatch,
        "attention": config.model.attention,
    }
    return Role(name, ReferenceModel, kwargs, num_threads, section.tensor_parallel)


def _reward_model(config: OnlineConfig, number: int, num_threads: int) -> Role:
    assert config.model.reward is not None
    section, name = config.placement.frozen.reward, f"reward_{number}"
    kwargs = {
        "model": config.model.reward[number].path,
        "policy": config.model.policy,
        "dtype": config.model.dtype,
    }
    if section.backend == "vllm":
        kwargs |= {"section": section, "max_model_len": max_model_len(config)}
        return Role(name, VllmRewardModel, kwargs, num_threads, section.tensor_parallel)
    kwargs |= {
        "max_batch_tokens": config.learner.max_tokens_per_microbatch,
        "attention": config.model.attention,
    }
    return Role(name, RewardModel, kwargs, num_threads, section.tensor_parallel)
