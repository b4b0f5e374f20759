"""A Ray cluster of several nodes on this machine; run as a program, for it is a driver of its own.

`placement`: which bundle, node and GPUs each replica was given, under each strategy; the GPUs are
declared, not real. `ppo CONFIG`: a run with everything in a dedicated group, on three nodes; its
engine and its learner worker are killed on the way. Both print JSON as their last line.
"""

import json
import os
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import ray
from ray._common.utils import reset_ray_address
from ray.cluster_utils import Cluster
from ray.util.placement_group import remove_placement_group

STRATEGIES = ("PACK", "STRICT_PACK", "SPREAD", "STRICT_SPREAD")


def cluster(nodes: list[dict[str, Any]]) -> Cluster:
    head, *others = nodes
    made = Cluster(initialize_head=True, head_node_args={"include_dashboard": False, **head})
    for node in others:
        made.add_node(**node)
    return made


def placement() -> dict[str, Any]:
    from raypo.cluster.deployment import Deployment, start_deployment
    from raypo.cluster.placement import PlacementError
    from raypo.cluster.reserve import nodes_of, reserve
    from raypo.config import PPOConfig
    from raypo.plan.dedicated import dedicated_bundles
    from raypo.recipes.dedicated import places_in
    from tests.integration.deployments import Doubler

    made = cluster([{"num_cpus": 0}, *[{"num_cpus": 4, "num_gpus": 4}] * 3])
    ray.init(address=made.address, namespace="raypo", log_to_driver=False)
    config = PPOConfig.parse(
        {
            "name": "run",
            "model": {"policy": "p", "reward": "r"},
            "data": {"prompts": "d.jsonl"},
            "rollout": {"engine": {"count": 2, "tensor_parallel": 2}},
            "placement": {"mode": "dedicated"},
        }
    )
    bundles = dedicated_bundles(config, use_gpu=True)
    guests = [", ".join(map(str, bundle.guests)) for bundle in bundles]
    resources = [bundle.resources for bundle in bundles]
    found: dict[str, Any] = {"bundles": list(map(str, bundles))}
    for strategy in STRATEGIES:
        try:
            group = reserve(resources, name=strategy, strategy=strategy, timeout_s=5, guests=guests)
        except PlacementError as error:
            found[strategy] = str(error)
            continue
        found[strategy] = [nodes_of(group).index(node) for node in nodes_of(group)]
        if strategy == "SPREAD":
            found["replicas"] = {}
            for role, places in places_in(group, bundles).items():
                kwargs = {"folder": sys.argv[2]}
                deployment = Deployment(f"raypo:run:{role}", Doubler, kwargs)
                handle = start_deployment(deployment, places)
                handle.wait(120)
                answers = handle.environment.on_all("CUDA_VISIBLE_DEVICES")
                replicas = handle.status().replicas
                found["replicas"][role] = [
                    (replica.bundle, nodes_of(group)[replica.bundle] == replica.node_id, answer)
                    for replica, answer in zip(
                        replicas, [answer.result() for answer in answers], strict=True
                    )
                ]
                handle.shutdown()
        remove_placement_group(group)
    return found


def ppo(path: str) -> dict[str, Any]:
    from ray.train import FailureConfig, RunConfig

    from raypo import PPOConfig, PPOTrainer
    from raypo.cluster.handle import DeploymentHandle
    from tests.integration.task import kill_train_workers, read_metrics
    from tests.integration.test_ppo_run import kill_at_work, wait_for_steps

    made = cluster([{"num_cpus": 1}] * 3)
    folder = Path(path).parent / "runs" / "dedicated"
    overrides = {"placement.mode": "dedicated", "cluster.address": made.address}
    killed: list[int] = []
    pids: list[int] = []

    def kill() -> None:
        wait_for_steps(folder, 1)
        killed.append(kill_at_work("raypo:dedicated:engine"))
        wait_for_steps(folder, 3)
        pids.extend(reference_pids())
        kill_train_workers()
        while len(read_metrics(folder)) > 2:  # its successor takes back what no checkpoint has
            time.sleep(0.02)
        wait_for_steps(folder, 3)
        pids.extend(reference_pids())

    def reference_pids() -> list[int]:
        handle = DeploymentHandle("raypo:dedicated:reference", "raypo")
        return [replica.pid for replica in handle.status().replicas]

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    run_config = RunConfig(name="dedicated", failure_config=FailureConfig(max_failures=1))
    trainer = PPOTrainer(PPOConfig.load(path, overrides), run_config=run_config)
    result = trainer.fit()
    killer.join(timeout=10)
    return {"return": result.return_value, "killed": len(killed), "reference_pids": pids}


if __name__ == "__main__":
    os.environ["RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"] = "0.5"
    answer = placement() if sys.argv[1] == "placement" else ppo(sys.argv[2])
    print(json.dumps(answer), flush=True)
    reset_ray_address()  # it would lead others to this cluster, which is gone in a moment
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # some end with those that started them
            process.kill()
    os._exit(0)
