"""Step 2: vLLM engines and the frozen reference, started by the learner workers beside them."""

from __future__ import annotations

import os
from dataclasses import dataclass

import ray.train
import ray.util
import torch

from raypo.cluster.deployment import Deployment, DeploymentHandle, start_replica
from raypo.cluster.placement import own_bundle
from raypo.collectives import Workers
from raypo.config import PPOConfig
from raypo.serving.engine import Engine
from raypo.serving.reference import ReferenceModel


@dataclass(frozen=True)
class Services:
    """Handles to what samples and judges."""

    engine: DeploymentHandle
    reference: DeploymentHandle | None

    def wait(self, timeout_s: float) -> None:
        """Wait until every replica has started.

        Raises:
            DeploymentError: one failed to start, with its error, or took too long.
        """
        for handle in filter(None, (self.engine, self.reference)):
            for response in handle.__ray_ready__.on_all():
                response.result(timeout_s)


def start_deployments(
    config: PPOConfig, run_name: str, workers: Workers, *, logs_dir: str
) -> Services:
    """Start what the run needs in the workers' own placement group; all workers call it.

    Engine i belongs to worker i; the reference to worker 0. Both start in the background.
    """
    names: list[str] = []
    local_rank = ray.train.get_context().get_local_rank()
    group = ray.util.get_current_placement_group()
    bundle = own_bundle(group, local_rank=local_rank) if group else 0
    num_engines = config.rollout.engine.resolved_count(
        num_workers=workers.count, use_gpu=torch.cuda.is_available()
    )
    if workers.rank < num_engines:
        names.append(
            start_replica(
                _engine(config, run_name, workers, num_engines, logs_dir),
                workers.rank,
                group,
                bundle=bundle,
            )
        )
    if workers.rank == 0 and config.ppo.needs_reference:
        names.append(start_replica(_reference(config, run_name, logs_dir), 0, group, bundle=bundle))
    everyone = [name for share in workers.gather(names) for name in share]
    return Services(
        engine=DeploymentHandle.find(_of_role(everyone, "engine"), prefer=workers.rank),
        reference=DeploymentHandle.find(_of_role(everyone, "reference"))
        if config.ppo.needs_reference
        else None,
    )


def _engine(
    config: PPOConfig, run_name: str, workers: Workers, num_engines: int, logs_dir: str
) -> Deployment:
    threads = config.learner.cpus_per_worker * workers.count // num_engines
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


def _threads(count: int) -> dict[str, str]:
    """An actor that reserves no CPU gets one thread from Ray; it takes turns with its worker."""
    return {"OMP_NUM_THREADS": str(min(count, os.cpu_count() or count))}


def _of_role(names: list[str], role: str) -> list[str]:
    """Names of a role's replicas, by their number."""
    of_role = [name for name in names if name.split(":")[-2] == role]
    return sorted(of_role, key=lambda name: int(name.split(":")[-1]))
