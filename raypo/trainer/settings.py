"""What Python passes to a trainer, joined with the run file: Python wins."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

import ray
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig

from raypo.cluster.connect import cluster_address, connect
from raypo.config import RecipeConfig
from raypo.config.paths import storage_path
from raypo.rewards.scoring import RewardFunction

AnyConfig = TypeVar("AnyConfig", bound=RecipeConfig)

CONTROLLER_FAILURE_LIMIT = 2
"""Ray's own default retries a start that can never succeed for ever."""

RAY_RUN_NAME = "ray_train_run-"
"""How the names begin that RunConfig makes up."""


def resolve(
    config: AnyConfig,
    scaling: ScalingConfig | None,
    run: RunConfig | None,
    reward_fn: RewardFunction | None = None,
) -> AnyConfig:
    """The config with what Python passed recorded in it, checked once more as a whole."""
    values: dict[str, Any] = config.model_dump()
    if scaling is not None:
        values["learner"]["num_workers"] = scaling.num_workers
        values["learner"]["use_gpu"] = scaling.use_gpu
        if scaling.placement_strategy != ScalingConfig().placement_strategy:
            values["placement"]["strategy"] = scaling.placement_strategy
        resources: Any = scaling.resources_per_worker or {}
        cpus = resources.get("CPU")
        values["learner"]["cpus_per_worker"] = int(cpus or values["learner"]["cpus_per_worker"])
    if run is not None:
        # Ray fills both in where the user says nothing.
        if not str(run.name).startswith(RAY_RUN_NAME):
            values["name"] = run.name
        if run.storage_path != RunConfig().storage_path:
            values["storage_path"] = run.storage_path
    if reward_fn is not None:
        module = getattr(reward_fn, "__module__", "__main__")
        name = getattr(reward_fn, "__qualname__", type(reward_fn).__name__)
        values["reward"]["function"] = f"{module}:{name}"
    return type(config).parse(values, origin="trainer")


def scaling_of(config: Any, given: ScalingConfig | None) -> ScalingConfig:
    """Ray's scaling config of the resolved config; what else the given one says stays."""
    learner = config.learner
    use_gpu = _cluster_has_gpus(config) if learner.use_gpu == "auto" else learner.use_gpu
    resources = {"CPU": float(learner.cpus_per_worker)} | ({"GPU": 1.0} if use_gpu else {})
    scaling = given or ScalingConfig(num_workers=learner.num_workers, use_gpu=use_gpu)
    return dataclasses.replace(
        scaling,
        resources_per_worker=scaling.resources_per_worker or resources,
        placement_strategy=config.placement.strategy,
    )


def _cluster_has_gpus(config: RecipeConfig) -> bool:
    """Asks the cluster where there is one, else this machine, without starting anything."""
    if ray.is_initialized() or cluster_address(config.cluster)[0]:
        connect(config.cluster)
        return ray.cluster_resources().get("GPU", 0.0) > 0.0
    import torch

    return torch.cuda.is_available()


def run_config_of(config: RecipeConfig, given: RunConfig | None) -> RunConfig:
    """Ray's run config of the resolved config; what else the given one says stays."""
    run = given or RunConfig()
    changes: dict[str, Any] = {"name": config.name, "storage_path": storage_path(config)}
    if given is None or given.checkpoint_config in (None, CheckpointConfig()):
        changes["checkpoint_config"] = CheckpointConfig(num_to_keep=config.checkpoint.keep)
    failure = run.failure_config or FailureConfig()
    if failure.controller_failure_limit < 0:
        changes["failure_config"] = dataclasses.replace(
            failure, controller_failure_limit=CONTROLLER_FAILURE_LIMIT
        )
    return dataclasses.replace(run, **changes)
