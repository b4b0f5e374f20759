"""Runs on eight GPUs that Ray only believes in; prints as JSON which of them each process is shown.

A program of its own, because it is a driver. Trainer, bundles, options and environment variables
are raypo's. Only the classes of engines and frozen models are replaced: nothing computes here.

`python -m tests.integration.on_fake_gpus FOLDER RUN...`
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
import ray.train
from ray.train.torch import TorchConfig

from raypo import PPOConfig, PPOTrainer
from raypo.cluster.hardware import parse_cluster
from raypo.plan.fit import make_plan
from tests.integration.task import write_task

GPUS = 8
RUNS: dict[str, dict[str, Any]] = {
    "colocated": {},
    "tensor_parallel_and_a_critic_apart": {
        "learner.num_workers": 2,
        "learner.critic_workers": 1,
        "rollout.engine.tensor_parallel": 2,
    },
    "two_engines_on_one_gpu": {
        "placement.mode": "dedicated",
        "placement.gpus.engine": 0.5,
        "rollout.engine.count": 2,
        "rollout.engine.gpu_memory_fraction": 0.4,
    },
    "a_dedicated_engine_over_two_gpus": {
        "placement.mode": {"engine": "dedicated"},
        "rollout.engine.tensor_parallel": 2,
    },
}


class Gloo(TorchConfig):
    """A user's own kind of torch config, which raypo leaves as it is: no NCCL is here."""


class StandIn:
    """Takes the place of an engine or a frozen model, and reports its process's devices."""

    def __init__(self, **_: Any) -> None:
        pass

    def devices(self) -> list[str]:
        return os.environ["CUDA_VISIBLE_DEVICES"].split(",")

    def sleep(self) -> None:
        pass


def stand_in(*_: Any) -> tuple[type, dict[str, Any]]:
    """Replace `served_roles.class_and_arguments`."""
    return StandIn, {}


def show_devices(setup: dict[str, Any]) -> dict[str, Any]:
    """Train loop: start the services of a run, and return what each process is shown."""
    import torch

    from raypo.collectives import Workers
    from raypo.run import served_roles, services
    from raypo.run.setup import open_setup

    workers = Workers.current()
    torch.cuda.is_available = lambda: True
    served_roles.class_and_arguments = stand_in
    config, runtime = open_setup(setup)
    made = services.start_deployments(
        config,
        runtime.name,
        workers,
        logs_dir=str(Path(runtime.storage_path) / runtime.name / "logs"),
        dedicated=runtime.dedicated,
    )
    # Ray Train shows a worker the GPUs of all workers on its node; its own is at its local rank.
    shown = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
    own = shown[ray.train.get_context().get_local_rank()]
    seen = {f"worker {rank}": [gpu] for rank, gpu in enumerate(workers.gather(own))}
    granted = workers.gather(ray.get_runtime_context().get_accelerator_ids()["GPU"])
    if workers.rank == 0:
        handles = {"engine": made.engine.handle} | {n: each.handle for n, each in made.frozen}
        for role, handle in handles.items():
            for index, answer in enumerate(handle.call_all(StandIn.devices)):
                seen[f"{role}:{index}"] = answer.result()
    workers.barrier()
    return {"status": "finished", "step": 0, "seen": seen, "granted": granted}


def main(folder: Path, names: Sequence[str]) -> dict[str, Any]:
    from raypo.run import served_roles
    from raypo.trainer import trainer as of_trainers
    from tests.integration.test_vllm_frozen import tiny_reward_model

    of_trainers._loop = lambda recipe: show_devices
    task = write_task(folder)
    reward = tiny_reward_model(folder / "reward", folder / "policy")
    served_roles.class_and_arguments = stand_in  # for the roles that the driver starts
    ray.init(num_cpus=16, num_gpus=GPUS, include_dashboard=False, log_to_driver=False)
    found: dict[str, Any] = {}
    for name in names:
        usual = {"name": name, "model.reward": str(reward), "learner.use_gpu": True}
        trainer = PPOTrainer(
            PPOConfig.load(task, usual | RUNS[name]), torch_config=Gloo(backend="gloo")
        )
        value = trainer.fit().return_value
        assert value is not None
        plan = make_plan(trainer.config, parse_cluster(f"{GPUS}xGPU80G,16xCPU"))
        planned = [list(each.roles) for each in plan.bundles for _ in each.gpus]
        found[name] = {"seen": value["seen"], "granted": value["granted"], "planned": planned}
    return found


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), sys.argv[2:])), flush=True)
    ray.shutdown()
