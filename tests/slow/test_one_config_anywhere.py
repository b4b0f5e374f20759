"""One config wherever its models run, with losses on the way: the same account of prompts."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.integration.on_a_cluster import USERS_VARIABLES, Task
from tests.integration.task import numbers, on_a_cluster, read_metrics
from tests.integration.test_vllm_frozen import tiny_reward_model

ONE_NODE = [{"num_cpus": 6}]
THREE_NODES = [{"num_cpus": 2}] * 3
THREE_WORKERS = {
    "learner.num_workers": 3,
    "rollout.engine.count": 2,
    "placement.strategy": "SPREAD",
}
OURS = {"NCCL_DEBUG": "WARN", "NCCL_CUMEM_ENABLE": "0", "TOKENIZERS_PARALLELISM": "false"}
FINISHED = {"status": "finished", "step": 4}


def run(task: Path, name: str, nodes: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    return on_a_cluster("ppo", json.dumps(asdict(Task(str(task), name, nodes=nodes, **more))))


def account(folder: Path) -> list[tuple[dict[str, float], list[int]]]:
    """Of each step, what became of its samples and which prompts they answer."""
    files = sorted((folder / "rollouts").glob("step_*.parquet"))
    prompts = [sorted(pq.read_table(file)["prompt_index"].to_pylist()) for file in files]
    rows = [
        {name: value for name, value in row.items() if name.startswith("rollout/samples_")}
        for row in read_metrics(folder)
    ]
    return list(zip(rows, prompts, strict=True))


def test_a_dedicated_run_on_three_nodes_that_loses_engine_and_worker_has_the_same_numbers(
    first: SimpleNamespace, task: Path
):
    """As the colocated run on one node; what the driver started outlives the worker."""
    told = run(
        task,
        "dedicated",
        [{"num_cpus": 1}] * 3,
        overrides={"placement.mode": "dedicated"},
        kill_workers=True,
    )
    assert told["return"] == FINISHED
    before, after = told["processes"]
    assert before == after
    assert told["killed"] not in before["engine"]
    folder = task.parent / "runs" / "dedicated"
    assert numbers(read_metrics(folder)) == numbers(first.metrics)
    assert account(folder) == account(first.folder)


@pytest.mark.parametrize("mode", ["colocated", "dedicated"])
@pytest.mark.parametrize("nodes", [ONE_NODE, THREE_NODES], ids=["one_node", "three_nodes"])
def test_three_workers_and_two_engines_of_which_one_dies_account_for_every_prompt(
    first: SimpleNamespace, task: Path, mode: str, nodes: list[dict[str, Any]]
):
    """As one worker with one engine: which prompts a step draws depends on neither."""
    name = f"{mode}_{len(nodes)}"
    overrides = {**THREE_WORKERS, "placement.mode": mode}
    told = run(task, name, nodes, overrides=overrides, is_users_ray=len(nodes) == 1)
    assert told["return"] == FINISHED
    assert told["killed"]
    assert len(set(told["nodes"]["engine"])) == min(2, len(nodes))
    assert account(task.parent / "runs" / name) == account(first.folder)
    expected = OURS | (USERS_VARIABLES if len(nodes) == 1 else {})
    num_references = len(nodes) if mode == "colocated" else 1
    assert len(set(told["nodes"]["reference"])) == num_references
    assert told["environments"] == [expected] * (3 + 2 + num_references)


def shared_by_vllm() -> set[Path]:
    memory = Path("/dev/shm")
    return {*memory.glob("psm_*"), *memory.glob("vllm_dist_*")}


def test_tensor_parallel_engine_and_reference_in_a_run_that_loses_the_engine(
    first: SimpleNamespace, task: Path, tmp_path: Path
):
    """On two workers' bundles, in as many processes; the reward model in a group of its own."""
    overrides = {
        "cluster.namespace": "elsewhere",
        "learner.num_workers": 2,
        "model.reward": str(tiny_reward_model(tmp_path / "reward", task.parent / "policy")),
        "rollout.engine.tensor_parallel": 2,
        "placement.mode": {"reward": "dedicated"},
        "placement.frozen.reference": {"backend": "vllm", "tensor_parallel": 2},
    }
    before = shared_by_vllm()
    told = run(task, "tensor_parallel", [{"num_cpus": 4}], overrides=overrides)
    assert shared_by_vllm() <= before
    assert told["return"] == FINISHED
    assert told["namespace"] == "elsewhere"
    assert told["processes_of_lost"] >= 2
    assert told["orphans"] == 0
    folder = task.parent / "runs" / "tensor_parallel"
    assert account(folder) == account(first.folder)
    (start, *_, after) = read_metrics(folder)
    assert start["kl/ref_mean"] == pytest.approx(0.0, abs=1e-6)  # the policy is the reference
    assert after["kl/ref_mean"] > 1e-3
    assert after["mismatch/probe_gap_max"] < 1e-3
