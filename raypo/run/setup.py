"""Setup of a learner worker: the config, and the values that the driver adds to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.fs
import ray.train
import torch
from ray.actor import ActorHandle

from raypo.collectives import Workers, as_tensor
from raypo.config import ConfigError, OnlineConfig, parse_run_config
from raypo.config.auto_values import least_memory
from raypo.deployment.handle import DeploymentHandle
from raypo.ray_internals import run_storage

RUNTIME_KEY = "raypo_runtime"
"""Key of the driver's additions in the setup of `train_loop_per_worker`."""

Decide = Callable[[Any, int], tuple[Any, Sequence[str]]]
"""Function of the config and the memory of the smallest GPU in bytes. It returns the config with
all `auto` values replaced, and a message for each decision."""


@dataclass(frozen=True)
class Shared:
    """Deployments that a sweep has started for all of its trials."""

    config: OnlineConfig
    """Config of the deployments. A trial that needs different deployments starts its own."""
    handles: Mapping[str, DeploymentHandle] = field(default_factory=dict)
    """Handles by role, which all trials use at the same time."""
    engine_pool: ActorHandle | None = None
    """Actor that leases engines to trials. A trial gets engines of its own until it ends, or a slot
    of a shared pool."""
    pool: bool = False
    """True if all trials use the same engines, each with its own adapter."""


@dataclass(frozen=True)
class Runtime:
    """Values that a config file cannot hold, such as the run's storage and actor handles."""

    name: str
    storage_path: str
    """An absolute path or a URI."""
    working_dir: str
    """The driver's working directory. Relative paths in the config are relative to it."""
    monitor: ActorHandle | None = None
    reward_fn: Callable[..., Any] | None = None
    callbacks: tuple[Callable[..., Any], ...] = ()
    """Callbacks that were passed in Python, besides those of the config."""
    decide: Decide = least_memory
    """Function that replaces the `auto` values of the config once workers know their GPUs. A raypo
    trainer passes the plan's function. A bare TorchTrainer uses the values that need the least
    memory."""
    dedicated: Mapping[str, DeploymentHandle] = field(default_factory=dict)
    """Deployments that the driver has started in their own placement group, by role."""
    group_gc: ActorHandle | None = None
    """Actor that removes the workers' placement group once the monitor is dead. None means that Ray
    removes the group."""
    shared: Shared | None = None
    """Deployments that the trials of a sweep share."""
    is_trial: bool = False
    """True for a trial of a sweep. Tune decides after each report whether the trial goes on."""
    resume_from: str | None = None
    """Checkpoint of another trial (population-based training). It is used until the run has its own
    checkpoint."""


def open_setup(setup: dict[str, Any]) -> tuple[Any, Runtime]:
    """Return the recipe's config with absolute paths, and the driver's additions.

    Without a raypo driver (a bare TorchTrainer) the run uses Ray Train's storage path.

    Args:
        setup: `config.model_dump()`, with the driver's additions under `RUNTIME_KEY`.
    """
    values = dict(setup)
    runtime = values.pop(RUNTIME_KEY, None) or _bare_runtime()
    config = parse_run_config(values, origin="train_loop_config")
    # A driver, if there is one, has already decided the dtype.
    config = config.with_dtype(use_gpu=torch.cuda.is_available())
    return config.with_absolute_paths(runtime.working_dir), runtime


def decided_together(
    config: Any, workers: Workers, decide: Decide, *, gpu_bytes: int, tell: Callable[[str], None]
) -> Any:
    """Replace `auto` values, given the workers' GPUs. All workers call this and get one config.

    Args:
        config: The config.
        workers: The learner workers.
        decide: Function that replaces the values. It is called on rank 0.
        gpu_bytes: Memory of this worker's GPU in bytes. The smallest value of all workers is used.
        tell: Callback for a message about each decision, on rank 0.
    """
    smallest = -int(workers.max(as_tensor(-gpu_bytes)))
    decided = config
    if workers.rank == 0:
        decided, messages = decide(config, smallest)
        for message in messages:
            tell(f"raypo: {message}")
    return workers.broadcast(decided)


def _bare_runtime() -> Runtime:
    context = ray.train.get_context()
    system, folder = run_storage(context.get_storage())
    if not isinstance(system, pyarrow.fs.LocalFileSystem):
        raise ConfigError(
            "RunConfig.storage_path: the bare train_loop_per_worker writes to a local or shared "
            f"folder, but this is {system.type_name}. Use raypo.PPOTrainer for a URI."
        )
    return Runtime(
        name=context.get_experiment_name(),
        storage_path=folder,
        working_dir=str(Path.cwd()),
    )
