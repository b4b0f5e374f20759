"""Deployment specs of a run's served roles: class, arguments and processes."""

from __future__ import annotations

import os
from typing import Any

from raypo.cluster.connect import missing_environment
from raypo.cluster.placement import ServedRole
from raypo.config import EngineSection, OnlineConfig, PolicyExamplesConfig, PolicyLoraSection
from raypo.deployment.deployment import Deployment
from raypo.serving.engine import Engine
from raypo.serving.engine_sizes import max_requests_of
from raypo.serving.frozen import ReferenceModel, RewardModel
from raypo.serving.vllm_arguments import with_head_dtype
from raypo.serving.vllm_frozen import VllmJudge, VllmReference, VllmRewardModel
from raypo.weight_sync.probe import NUM_PROBES

MAX_CALLS_PER_ENGINE = 64
"""Maximum number of calls in flight per engine. Further calls go to another replica. Each call may
contain many requests."""


def class_and_arguments(
    role: ServedRole, config: OnlineConfig | PolicyExamplesConfig
) -> tuple[type, dict[str, Any]]:
    """Return the class of a role's replicas, and its arguments except the number of threads."""
    kwargs: dict[str, Any] = {"model": role.model, "dtype": config.model.dtype}
    vllm_kwargs = {"section": role.section, "max_model_len": config.max_model_len}
    if isinstance(role.section, EngineSection):
        lora = config.model.lora
        holds_adapter = isinstance(lora, PolicyLoraSection) and lora.push == "adapter"
        kwargs |= {"seed": config.seed, "reads_text": config.rollout.reads_text}
        kwargs["max_images"] = config.data.max_images if config.data.image_key else 1
        kwargs["max_requests"] = max_requests_of(config, num_engines=int(role.num_replicas))
        if isinstance(config, OnlineConfig) and config.rollout.has_requests_in_flight:
            kwargs["probes"] = NUM_PROBES  # only if probes join batches that are in flight
        elif not isinstance(config, OnlineConfig) or not config.rollout.is_episodic:
            kwargs["whole_batches"] = True
        if isinstance(config, OnlineConfig):
            kwargs["records_experts"] = config.rollout.router_replay == "engine"
            vllm_kwargs["section"] = with_head_dtype(role.section, config.model.head_dtype)
        return Engine, kwargs | vllm_kwargs | {"lora": lora if holds_adapter else None}
    assert isinstance(config, OnlineConfig), "other recipes have only engines"
    if role.kind == "judge":
        judge = config.reward.judge
        assert judge is not None, "the judge role requires reward.judge"
        vllm_kwargs |= {"max_model_len": judge.max_model_len}
        judge_kwargs = {"chat": judge.chat, "sampling": judge.merged_sampling}
        return VllmJudge, kwargs | vllm_kwargs | judge_kwargs
    uses_vllm, is_reference = role.section.backend == "vllm", role.kind == "reference"
    if uses_vllm:
        kwargs |= vllm_kwargs | (
            {"max_model_len": config.max_reference_len} if is_reference else {}
        )
    else:
        kwargs["max_batch_tokens"] = config.learner.microbatch_tokens
        kwargs["attention"] = config.model.attention
        kwargs["compile_layers"] = config.learner.compile_layers
    if is_reference:
        kwargs["head_dtype"] = config.model.head_dtype
    else:
        return VllmRewardModel if uses_vllm else RewardModel, kwargs | {
            "policy": config.model.policy
        }
    if uses_vllm:
        return VllmReference, kwargs
    # If models sleep, the next role waits until this role has started, so do not warm up.
    kwargs |= {"warms_up": not config.rollout.engine.sleeps}
    return ReferenceModel, kwargs | {"temperature": config.trained_temperature}


def measures_free_memory(role: ServedRole) -> bool:
    """Return True if a role on GPUs runs vLLM and claims the GPU memory that is free at its start.

    Other roles must not allocate GPU memory while it starts.
    """
    if isinstance(role.section, EngineSection):
        return role.section.kv_cache_gb is None
    return role.section.backend == "vllm"


def make_deployment(
    role: ServedRole,
    config: OnlineConfig | PolicyExamplesConfig,
    *,
    num_threads: int,
    run_name: str,
    logs_dir: str,
    **extra_kwargs: Any,
) -> Deployment:
    """Return the deployment spec of a role in a run.

    Args:
        role: The role.
        config: The run's config.
        num_threads: Number of threads per replica, over all its processes.
        run_name: Name of the run, which is part of the deployment's name.
        logs_dir: Folder for the replicas' logs.
        extra_kwargs: Further arguments of the role's class.
    """
    cls, kwargs = class_and_arguments(role, config)
    # Ray limits an actor without reserved CPUs to one thread. A replica and its learner worker take
    # turns, so the replica may use the worker's cores.
    cores = min(num_threads, os.cpu_count() or num_threads)
    threads = max(1, cores // role.num_devices)
    return Deployment(
        name=f"raypo:{run_name}:{role.name}",
        cls=cls,
        kwargs=kwargs | {"num_threads": max(1, num_threads // role.num_devices)} | extra_kwargs,
        env={**missing_environment(), "OMP_NUM_THREADS": str(threads)},
        logs_dir=logs_dir,
        start_timeout_s=config.placement.timeout_s,
        max_ongoing_requests=MAX_CALLS_PER_ENGINE if role.kind == "engine" else 1,
        **config.placement.deployment.model_dump(),
    )
