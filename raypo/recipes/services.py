"""Step 2: vLLM engines and frozen models, started by the learner workers beside them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray.train
import ray.util
import torch

from raypo.cluster.deployment import (
    Deployment,
    DeploymentHandle,
    Place,
    own_devices,
    start_deployment,
)
from raypo.cluster.placement import own_bundle
from raypo.collectives import Workers
from raypo.config import PPOConfig, SFTConfig
from raypo.serving.engine import Engine
from raypo.serving.reference import ReferenceModel
from raypo.serving.reward_model import RewardModel


@dataclass(frozen=True)
class Services:
    """Handles to what samples and judges."""

    engine: DeploymentHandle
    reference: DeploymentHandle | None
    reward_models: tuple[DeploymentHandle, ...] = ()
    """One deployment a model, in the order of `model.reward`."""

    def wait(self, timeout_s: float) -> None:
        """Wait until every replica has started.

        Raises:
            DeploymentError: one failed to start, with its error, or took too long.
        """
        for handle in filter(None, (self.engine, self.reference, *self.reward_models)):
            handle.wait(timeout_s)


def start_deployments(
    config: PPOConfig, run_name: str, workers: Workers, *, logs_dir: str
) -> Services:
    """Start what the run needs in the workers' own placement group; all workers call it.

    Engine i lives beside worker i; reference and reward models beside worker 0. All start in the
    background.
    """
    num_engines = _num_engines(config, workers)
    roles = [_engine(config, num_threads=_engine_threads(config, workers))]
    roles += [_reference(config)] if config.ppo.needs_reference else []
    roles += [_reward_model(config, number) for number in range(len(config.model.reward or ()))]
    counts = [num_engines, *[1] * (len(roles) - 1)]
    engine, *frozen = _start(
        [_settled(role, config, run_name, logs_dir) for role in roles], counts, workers
    )
    return Services(
        engine=engine.preferring(workers.rank % num_engines),
        reference=frozen.pop(0) if config.ppo.needs_reference else None,
        reward_models=tuple(frozen),
    )


def start_engines(
    config: SFTConfig, run_name: str, workers: Workers, *, logs_dir: str
) -> DeploymentHandle:
    """The engines alone, as `start_deployments` starts them."""
    num_engines = _num_engines(config, workers)
    role = _engine(config, num_threads=_engine_threads(config, workers))
    (engine,) = _start([_settled(role, config, run_name, logs_dir)], [num_engines], workers)
    return engine.preferring(workers.rank % num_engines)


def _start(
    deployments: Sequence[Deployment], counts: Sequence[int], workers: Workers
) -> list[DeploymentHandle]:
    """Each deployment with so many replicas, one beside each of the first workers."""
    places = workers.gather(_own_place())
    handles = []
    if workers.rank == 0:
        handles = [
            start_deployment(deployment, places[:count])
            for deployment, count in zip(deployments, counts, strict=True)
        ]
    return workers.broadcast(handles)


def _own_place() -> Place:
    """Beside this worker: it takes nothing of the bundle, which is the worker's, and its devices.

    The two take turns.
    """
    group = ray.util.get_current_placement_group()
    if group is None:
        return Place(env=own_devices())
    local_rank = ray.train.get_context().get_local_rank()
    return Place(group, own_bundle(group, local_rank=local_rank), env=own_devices())


def _num_engines(config: PPOConfig | SFTConfig, workers: Workers) -> int:
    return config.rollout.engine.resolved_count(
        num_workers=workers.count, use_gpu=torch.cuda.is_available()
    )


def _engine_threads(config: PPOConfig | SFTConfig, workers: Workers) -> int:
    return config.learner.cpus_per_worker * workers.count // _num_engines(config, workers)


@dataclass(frozen=True)
class _Role:
    """A deployment without what all of a run have in common."""

    name: str
    cls: type
    kwargs: dict[str, Any]
    num_threads: int


def _settled(
    role: _Role, config: PPOConfig | SFTConfig, run_name: str, logs_dir: str
) -> Deployment:
    # An actor that reserves no CPU gets one thread from Ray; it takes turns with its worker.
    threads = min(role.num_threads, os.cpu_count() or role.num_threads)
    return Deployment(
        name=f"raypo:{run_name}:{role.name}",
        cls=role.cls,
        kwargs={**role.kwargs, "num_threads": role.num_threads},
        env={"OMP_NUM_THREADS": str(threads)},
        logs_dir=logs_dir,
        **config.placement.deployment.model_dump(),
    )


def _engine(config: PPOConfig | SFTConfig, *, num_threads: int) -> _Role:
    kwargs = {
        "model": config.model.policy,
        "section": config.rollout.engine,
        "dtype": config.model.dtype,
        "max_model_len": config.data.max_prompt_tokens + config.rollout.max_new_tokens,
        "seed": config.seed,
    }
    return _Role("engine", Engine, kwargs, num_threads)


def _reference(config: PPOConfig) -> _Role:
    kwargs = {
        "model": config.model.reference or config.model.policy,
        "dtype": config.model.dtype,
        "temperature": config.rollout.temperature,
        "max_batch_tokens": config.learner.max_tokens_per_microbatch,
    }
    return _Role("reference", ReferenceModel, kwargs, config.learner.cpus_per_worker)


def _reward_model(config: PPOConfig, number: int) -> _Role:
    assert config.model.reward is not None
    kwargs = {
        "model": config.model.reward[number].path,
        "policy": config.model.policy,
        "dtype": config.model.dtype,
        "max_batch_tokens": config.learner.max_tokens_per_microbatch,
    }
    return _Role(f"reward_{number}", RewardModel, kwargs, config.learner.cpus_per_worker)
