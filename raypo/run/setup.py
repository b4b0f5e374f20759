"""What a worker is handed besides the config, and how both are unpacked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.fs
import ray.train
import torch
from ray.actor import ActorHandle

from raypo.collectives import Workers, as_tensor
from raypo.config import ConfigError, OnlineConfig, parse_run_config
from raypo.deployment.handle import DeploymentHandle
from raypo.plan.fit import cautious, decided_for_gpus
from raypo.ray_internals import kept_runs

RUNTIME_KEY = "raypo_runtime"
"""Key of the driver's additions in the setup of `train_loop_per_worker`."""


@dataclass(frozen=True)
class Shared:
    """What a sweep has started for all of its trials."""

    config: OnlineConfig
    """What it was started for: a trial that needs something else starts its own."""
    handles: Mapping[str, DeploymentHandle] = field(default_factory=dict)
    """Handles by role, which all trials ask."""
    lender: ActorHandle | None = None
    """Lends engines: a trial has one for itself until it ends, or a seat in the pool."""
    pool: bool = False
    """Whether all trials use the same engines, each with an adapter of its own."""
    share_batches: bool = False
    """Whether they then sample in the same batches."""


@dataclass(frozen=True)
class Runtime:
    """What no file can hold: where the run lives and who watches it."""

    name: str
    storage_path: str
    """An absolute path or a URI."""
    working_dir: str
    """The driver's folder; relative paths of the config start there."""
    monitor: ActorHandle | None = None
    reward_fn: Callable[..., Any] | None = None
    dedicated: Mapping[str, DeploymentHandle] = field(default_factory=dict)
    """What the driver has started in a placement group of its own, by role."""
    janitor: ActorHandle | None = None
    """Removes the workers' placement group once the monitor is dead. None if Ray does it."""
    shared: Shared | None = None
    """Deployments that the trials of a sweep have in common."""
    resume_from: str | None = None
    """Another trial's checkpoint (pbt), for as long as the run has none of its own."""


def open_setup(setup: dict[str, Any]) -> tuple[Any, Runtime]:
    """The config of any recipe, its paths made absolute, and the driver's additions.

    Without a driver of ours (a bare TorchTrainer) the run lives where Ray Train put it.
    """
    values = dict(setup)
    runtime = values.pop(RUNTIME_KEY, None) or _bare_runtime()
    config = parse_run_config(values, origin="train_loop_config")
    config = config.with_dtype(use_gpu=torch.cuda.is_available())  # decided where we have a driver
    return config.with_absolute_paths(runtime.working_dir), runtime


def decided_together(
    config: Any, workers: Workers, *, gpu_bytes: int, tell: Callable[[str], None]
) -> Any:
    """Decide by the plan what `auto` is on these GPUs; all workers call it and get the same config.

    Args:
        gpu_bytes: Memory of this worker's GPU; the smallest counts.
        tell: Gets a line about each decision, on rank 0.
    """
    smallest = -int(workers.max(as_tensor(-gpu_bytes)))
    decided = config
    if workers.rank == 0:
        try:
            plan = decided_for_gpus(config, smallest)
            decided = plan.config
            for decision in plan.decisions:
                tell(f"raypo: {decision}")
        except ConfigError as error:  # models that the plan cannot read may still run
            decided = cautious(config)
            tell(f"raypo: what is auto is as if memory were short, for there is no plan: {error}")
    return workers.broadcast(decided)


def _bare_runtime() -> Runtime:
    context = ray.train.get_context()
    system, folder = kept_runs(context.get_storage())
    if not isinstance(system, pyarrow.fs.LocalFileSystem):
        raise ConfigError(
            f"RunConfig.storage_path: the bare train_loop_per_worker writes to a local or shared "
            f"folder, this is {system.type_name}. "
            f"Use raypo.PPOTrainer for a URI."
        )
    return Runtime(
        name=context.get_experiment_name(),
        storage_path=folder,
        working_dir=str(Path.cwd()),
    )
