"""What makes the deployments of a run: the class of each, its arguments, and its processes."""

from __future__ import annotations

import os
from typing import Any

from raypo.cluster.connect import untold_environment
from raypo.config import EngineSection, OnlineConfig, PolicyExamplesConfig, PolicyLoraSection
from raypo.deployment.deployment import Deployment
from raypo.plan.estimate import max_model_len
from raypo.plan.placement import ServedRole
from raypo.serving.engine import Engine
from raypo.serving.frozen import ReferenceModel, RewardModel
from raypo.serving.vllm_frozen import VllmReference, VllmRewardModel
from raypo.weight_sync.push import NUM_PROBES

CALLERS = 64
"""Most calls that an engine has under way before another replica is asked; each may bring many
requests."""


def class_and_arguments(
    role: ServedRole, config: OnlineConfig | PolicyExamplesConfig
) -> tuple[type, dict[str, Any]]:
    """The class of a role's replicas, and what they are made with; its threads are added later."""
    kwargs: dict[str, Any] = {"model": role.model, "dtype": config.model.dtype}
    lengths = {"section": role.section, "max_model_len": max_model_len(config)}
    if isinstance(role.section, EngineSection):
        lora = config.model.lora
        holds_adapter = isinstance(lora, PolicyLoraSection) and lora.push == "adapter"
        kwargs |= {"seed": config.seed, "reads_text": config.rollout.reads_text}
        if isinstance(config, OnlineConfig) and config.rollout.has_requests_in_flight:
            kwargs["probes"] = NUM_PROBES  # not where a batch has its engines for itself
        return Engine, kwargs | lengths | {"lora": lora if holds_adapter else None}
    assert isinstance(config, OnlineConfig), "others have engines only"
    in_vllm, is_reference = role.section.backend == "vllm", role.kind == "reference"
    if in_vllm:
        kwargs |= lengths
    else:
        kwargs["max_batch_tokens"] = config.learner.microbatch_tokens
        kwargs["attention"] = config.model.attention
    if not is_reference:
        return VllmRewardModel if in_vllm else RewardModel, kwargs | {"policy": config.model.policy}
    if in_vllm:
        return VllmReference, kwargs
    return ReferenceModel, kwargs | {"temperature": config.trained_temperature}


def deployment_of(
    role: ServedRole,
    config: OnlineConfig | PolicyExamplesConfig,
    *,
    num_threads: int,
    run_name: str,
    logs_dir: str,
    **more: Any,
) -> Deployment:
    """The role as a deployment of a run, which has its name and its logs.

    Args:
        num_threads: Of a replica, all its processes together.
        more: Further arguments of its class.
    """
    cls, kwargs = class_and_arguments(role, config)
    # An actor that reserves no CPU gets one thread from Ray; it takes turns with its worker.
    cores = min(num_threads, os.cpu_count() or num_threads)
    threads = max(1, cores // role.num_devices)
    return Deployment(
        name=f"raypo:{run_name}:{role.name}",
        cls=cls,
        kwargs=kwargs | {"num_threads": max(1, num_threads // role.num_devices)} | more,
        env={**untold_environment(), "OMP_NUM_THREADS": str(threads)},
        logs_dir=logs_dir,
        start_timeout_s=config.placement.timeout_s,
        max_ongoing_requests=CALLERS if role.kind == "engine" else 1,
        **config.placement.deployment.model_dump(),
    )
