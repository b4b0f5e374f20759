"""Merge the Python arguments of a trainer into the run config. The arguments take precedence."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

import ray
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig

from raypo.cluster.connect import connect
from raypo.cluster.devices import check_accelerators, check_driver
from raypo.cluster.hardware import this_machine
from raypo.cluster.machine import cluster_address
from raypo.cluster.placement import worker_resources
from raypo.config import ConfigError, RecipeConfig
from raypo.custom.loader import current_import
from raypo.rewards.scoring import RewardFunction, WeightedSum
from raypo.storage.checkpoints import SCORE

AnyConfig = TypeVar("AnyConfig", bound=RecipeConfig)

CONTROLLER_FAILURE_LIMIT = 2
"""Limit on retries of a failed start. Ray's default has no limit."""

ACCELERATOR_LABEL = "ray.io/accelerator-type"
"""Label that Ray gives to nodes with accelerators."""

RAY_RUN_NAME = "ray_train_run-"
"""Prefix of the names that RunConfig generates."""

_REFUSED = {
    "train_loop_per_worker": (
        "the recipe provides the loop. To write your own loop, use Ray's TorchTrainer; "
        "raypo.train_loop_per_worker runs under it."
    ),
    "train_loop_config": "the first argument is the config of the loop. Change it instead.",
    "dataset_config": (
        "every worker reads the whole data sets, in an order that depends only on the seed. "
        "Leave it out."
    ),
    "validation_config": (
        "Ray Train validates a checkpoint separately from the run, but raypo's loops evaluate "
        "the current weights between two steps. Set eval.every, and give held-out rows as "
        "datasets={'eval': ...} or eval.prompts."
    ),
    "metadata": "Ray Train cannot store it. Keep it next to the run folder.",
    "resume_from_checkpoint": (
        "a run resumes automatically from the last checkpoint in its folder. Give the "
        "storage_path and name of the run."
    ),
}
"""Remedies for the arguments of TorchTrainer that would have no effect, by argument."""
_FOREIGN = {
    "compute_metrics": "use callbacks, which are functions of a StepView that return metrics.",
    "data_collator": "rows are packed by raypo. Leave it out.",
    "optimizers": "the learner section configures AdamW and its schedule. Leave it out.",
    "reward_model": "give its folder or hub id in reward_funcs.",
    "reward_processing_classes": "a reward model's folder has its tokenizer. Leave it out.",
    "reward_fn": "it is called reward_funcs.",
    "rollout_func": (
        "rollout.environment and rollout.agent name classes that sample episodes "
        "(docs/environments.md)."
    ),
    "rows": "datasets takes config keys too, like {'eval.prompts': rows}.",
    "tokenizer": "it is called processing_class.",
    "value_model": "set model.critic in args to its folder or hub id.",
}
"""Remedies for arguments of TRL's trainers and of earlier raypo versions, by argument."""


def check_arguments(
    scaling: ScalingConfig | None,
    run: RunConfig | None,
    torch_trainer_arguments: Mapping[str, Any],
) -> None:
    """Refuse arguments that would have no effect. TorchTrainer itself refuses most unknown ones.

    Raises:
        ConfigError: an argument would have no effect.
    """
    for name, value in torch_trainer_arguments.items():
        if name in _REFUSED and value is not None:
            raise ConfigError(f"{name} ({type(value).__name__}): {_REFUSED[name]}")
        if name in _FOREIGN:
            raise ConfigError(f"{name}: is not an argument of raypo's trainers; {_FOREIGN[name]}")
    if scaling is not None and scaling.use_tpu:
        raise ConfigError(
            "ScalingConfig.use_tpu (True): raypo runs only on CPUs and GPUs. Leave it out."
        )
    if run is not None and run.storage_filesystem is not None:
        raise ConfigError(
            f"RunConfig.storage_filesystem ({type(run.storage_filesystem).__name__}): metrics "
            "and models of a run would not be stored with its checkpoints. Give storage_path as "
            "a URI, like s3://bucket/folder?endpoint_override=host."
        )


def check_not_started_by_import() -> None:
    """Refuse a file that starts a run when it is imported, because the run itself imports it.

    The check before the start imports the file first, so that no worker does.

    Raises:
        ConfigError: this process is importing a function or class of a config.
    """
    if (spec := current_import()) is not None:
        raise ConfigError(
            f"{spec}: a run imports this file, but the file itself starts a run. Put the code "
            'that starts the run below `if __name__ == "__main__":`.'
        )


def resolve(
    config: AnyConfig,
    scaling: ScalingConfig | None,
    run: RunConfig | None,
    reward_fn: RewardFunction | None = None,
) -> AnyConfig:
    """Merge a trainer's Python arguments into the config, and validate the result as a whole."""
    values: dict[str, Any] = config.model_dump()
    if scaling is not None:
        values["learner"]["num_workers"] = _policy_workers(scaling.max_workers, config)
        values["learner"]["min_workers"] = (
            scaling.min_workers if scaling.elasticity_enabled else None
        )
        values["learner"]["use_gpu"] = scaling.use_gpu
        if scaling.placement_strategy != ScalingConfig().placement_strategy:
            values["placement"]["strategy"] = scaling.placement_strategy
        values["placement"]["label_selector"] = _worker_labels(config, scaling)
        resources: Any = scaling.resources_per_worker or {}
        cpus = resources.get("CPU")
        values["learner"]["cpus_per_worker"] = int(cpus or values["learner"]["cpus_per_worker"])
    if run is not None:
        # Ray fills in a name and a storage path that the user does not set.
        if not str(run.name).startswith(RAY_RUN_NAME):
            values["name"] = run.name
        if run.storage_path != RunConfig().storage_path:
            values["storage_path"] = run.storage_path
        failures = (run.failure_config or FailureConfig()).max_failures
        if failures != FailureConfig().max_failures:
            values["max_failures"] = failures
        checkpoints = run.checkpoint_config or CheckpointConfig()
        if checkpoints.num_to_keep is not None:
            values["checkpoint"]["keep"] = checkpoints.num_to_keep
        if checkpoints.checkpoint_score_attribute is not None:
            values["checkpoint"]["best_by"] = checkpoints.checkpoint_score_attribute
            values["checkpoint"]["best_mode"] = checkpoints.checkpoint_score_order
    if reward_fn is not None:
        values["reward"]["function"] = _function_name(reward_fn)
    return type(config).parse(values, origin="trainer")


def _worker_labels(config: RecipeConfig, scaling: ScalingConfig) -> dict[str, Any]:
    """Return `placement.label_selector` with the labels of Ray's scaling config."""
    configured = vars(config)["placement"].label_selector
    argument = scaling.label_selector or {}
    selectors = argument if isinstance(argument, list) else [argument]
    if any(selector != selectors[0] for selector in selectors):
        raise ConfigError(
            f"ScalingConfig.label_selector ({argument}): Ray Train numbers its workers by node, so "
            "a selector cannot apply to one worker only. Give one mapping for all workers; "
            "placement.label_selector has a selector for each role."
        )
    accelerator = scaling.accelerator_type
    labels = {**selectors[0], **({ACCELERATOR_LABEL: accelerator} if accelerator else {})}
    if not labels:
        return configured
    is_by_role = any(isinstance(selector, dict) for selector in configured.values())
    return {**configured, "learner": labels} if is_by_role else labels


def _policy_workers(count: int, config: Any) -> int:
    """Return `learner.num_workers` for the total number of workers in Ray's scaling config.

    The total includes `learner.critic_workers`.
    """
    critic_workers = config.learner.total_workers - config.learner.num_workers
    if count <= critic_workers:
        raise ConfigError(
            f"ScalingConfig.num_workers ({count}): counts all learner workers, and "
            f"{critic_workers} of them hold only the critic (learner.critic_workers). Set it to "
            f"{critic_workers + 1} or more, or learner.critic_workers to 0."
        )
    return count - critic_workers


def _function_name(function: RewardFunction) -> str:
    if isinstance(
        function, WeightedSum
    ):  # a weighted sum exists only in the script that created it
        terms = zip(function.weights, function.names, strict=True)
        term_names = [name if weight == 1 else f"{weight:g} * {name}" for weight, name in terms]
        return f"__main__:{' + '.join(term_names)}"
    module = getattr(function, "__module__", "__main__")
    name = getattr(function, "__qualname__", type(function).__name__)
    return f"{module}:{name}"


def scaling_of(config: Any, scaling_config: ScalingConfig | None) -> ScalingConfig:
    """Return Ray's scaling config with the values of the resolved config."""
    learner = config.learner
    use_gpu = _has_gpus(config) if learner.use_gpu == "auto" else learner.use_gpu
    if learner.use_gpu is True and not _has_cluster(config):
        check_driver(gpus=this_machine()[0].gpus, use_gpu=True)
    count = learner.total_workers
    num_workers = (learner.min_workers, count) if learner.is_elastic else count
    scaling = scaling_config or ScalingConfig(num_workers=num_workers, use_gpu=use_gpu)
    return dataclasses.replace(
        scaling,
        resources_per_worker=scaling.resources_per_worker
        or worker_resources(config, use_gpu=use_gpu),
        placement_strategy=config.placement.strategy,
        label_selector=config.placement.labels_of("learner") or None,
        accelerator_type=None,  # replaced by the label selector, which also covers dedicated roles
    )


def _has_cluster(config: RecipeConfig) -> bool:
    """Return True if the run uses an existing Ray cluster, which may have other machines."""
    return ray.is_initialized() or cluster_address(config.cluster)[0] is not None


def _has_gpus(config: RecipeConfig) -> bool:
    """Return True if the Ray cluster has usable GPUs, or this machine if there is no cluster.

    This does not start a local Ray.
    """
    if _has_cluster(config):
        connect(config.cluster)
        resources = ray.cluster_resources()
        check_accelerators(resources)
        return resources.get("GPU", 0.0) > 0.0
    import torch

    check_driver(gpus=this_machine()[0].gpus)
    return torch.cuda.is_available()


def run_config_of(config: Any, run_config: RunConfig | None) -> RunConfig:
    """Return Ray's run config with the values of the resolved config."""
    run = run_config or RunConfig()
    failure = run.failure_config or FailureConfig()
    limit = failure.controller_failure_limit
    # For up to 20 s after a node is lost, Ray's elastic policy still counts the node's devices. A
    # start on them fails after a minute, and the next start has fewer workers. So failed starts of
    # an elastic run are not limited.
    if limit < 0 and not config.learner.is_elastic:
        limit = CONTROLLER_FAILURE_LIMIT
    return dataclasses.replace(
        run,
        name=config.name,
        storage_path=config.absolute_storage_path,
        checkpoint_config=CheckpointConfig(
            num_to_keep=config.checkpoint.keep,
            checkpoint_score_attribute=None if config.checkpoint.best_by is None else SCORE,
        ),
        failure_config=dataclasses.replace(
            failure,
            max_failures=config.max_failures,
            controller_failure_limit=limit,
        ),
    )
