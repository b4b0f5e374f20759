"""Step 2: vLLM engines and frozen models, started by the learner workers beside them."""

from __future__ import annotations

import os
from dataclasses import dataclass

import ray.train
import ray.util
import torch

from raypo.cluster.deployment import Deployment, DeploymentHandle, start_replica
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
            for response in handle.__ray_ready__.on_all():
                response.result(timeout_s)


def start_deployments(
    config: PPOConfig, run_name: str, workers: Workers, *, logs_dir: str
) -> Services:
    """Start what the run needs in the workers' own placement group; all workers call it.

    Engine i belongs to worker i; reference and reward models to worker 0. All start in the
    background.
    """
    needs_reference = config.ppo.needs_reference
    frozen = [_reference(config, run_name, logs_dir)] if needs_reference else []
    num_models = len(config.model.reward or ())
    frozen += [_reward_model(config, number, run_name, logs_dir) for number in range(num_models)]
    names = _start(_engine(config, run_name, workers, logs_dir), frozen, config, workers)
    return Services(
        engine=DeploymentHandle.find(_of_role(names, "engine"), prefer=workers.rank),
        reference=DeploymentHandle.find(_of_role(names, "reference")) if needs_reference else None,
        reward_models=tuple(
            DeploymentHandle.find(_of_role(names, _reward_role(number)))
            for number in range(num_models)
        ),
    )


def start_engines(
    config: SFTConfig, run_name: str, workers: Workers, *, logs_dir: str
) -> DeploymentHandle:
    """The engines alone, as `start_deployments` starts them."""
    names = _start(_engine(config, run_name, workers, logs_dir), [], config, workers)
    return DeploymentHandle.find(_of_role(names, "engine"), prefer=workers.rank)


def _start(
    engine: Deployment, frozen: list[Deployment], config: PPOConfig | SFTConfig, workers: Workers
) -> list[str]:
    """Start this worker's replicas; the names of all workers' replicas."""
    local_rank = ray.train.get_context().get_local_rank()
    group = ray.util.get_current_placement_group()
    bundle = own_bundle(group, local_rank=local_rank) if group else 0
    names: list[str] = []
    if workers.rank < _num_engines(config, workers):
        names.append(start_replica(engine, workers.rank, group, bundle=bundle))
    if workers.rank == 0:
        names += [start_replica(each, 0, group, bundle=bundle) for each in frozen]
    return [name for share in workers.gather(names) for name in share]


def _num_engines(config: PPOConfig | SFTConfig, workers: Workers) -> int:
    return config.rollout.engine.resolved_count(
        num_workers=workers.count, use_gpu=torch.cuda.is_available()
    )


def _engine(
    config: PPOConfig | SFTConfig, run_name: str, workers: Workers, logs_dir: str
) -> Deployment:
    threads = config.learner.cpus_per_worker * workers.count // _num_engines(config, workers)
    return Deployment(
        name=f"raypo:{run_name}:engine",
        cls=Engine,
        kwargs={
            "model": config.model.policy,
            "section": config.rollout.engine,
            "dtype": config.model.dtype,
            "max_model_len": config.data.max_prompt_tokens + config.rollout.max_new_tokens,
            "seed": config.seed,
            "num_threads": threads,
        },
        env=_threads(threads),
        logs_dir=logs_dir,
    )


def _reference(config: PPOConfig, run_name: str, logs_dir: str) -> Deployment:
    threads = config.learner.cpus_per_worker
    return Deployment(
        name=f"raypo:{run_name}:reference",
        cls=ReferenceModel,
        kwargs={
            "model": config.model.reference or config.model.policy,
            "dtype": config.model.dtype,
            "temperature": config.rollout.temperature,
            "max_batch_tokens": config.learner.max_tokens_per_microbatch,
            "num_threads": threads,
        },
        env=_threads(threads),
        logs_dir=logs_dir,
    )


def _reward_model(config: PPOConfig, number: int, run_name: str, logs_dir: str) -> Deployment:
    threads = config.learner.cpus_per_worker
    assert config.model.reward is not None
    return Deployment(
        name=f"raypo:{run_name}:{_reward_role(number)}",
        cls=RewardModel,
        kwargs={
            "model": config.model.reward[number].path,
            "policy": config.model.policy,
            "dtype": config.model.dtype,
            "max_batch_tokens": config.learner.max_tokens_per_microbatch,
            "num_threads": threads,
        },
        env=_threads(threads),
        logs_dir=logs_dir,
    )


def _reward_role(number: int) -> str:
    return f"reward_{number}"


def _threads(count: int) -> dict[str, str]:
    """An actor that reserves no CPU gets one thread from Ray; it takes turns with its worker."""
    return {"OMP_NUM_THREADS": str(min(count, os.cpu_count() or count))}


def _of_role(names: list[str], role: str) -> list[str]:
    """Names of a role's replicas, by their number."""
    of_role = [name for name in names if name.split(":")[-2] == role]
    return sorted(of_role, key=lambda name: int(name.split(":")[-1]))
