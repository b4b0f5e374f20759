"""Rollouts sampled while the learner updates: whole runs with engines of their own."""

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest
from ray.train import FailureConfig, RunConfig

from raypo import PPOConfig, PPOTrainer
from tests.integration.task import kill_train_workers, numbers, read_metrics
from tests.integration.test_ppo_run import wait_for_steps

pytestmark = pytest.mark.usefixtures("local_ray")

FINISHED = {"status": "finished", "step": 4}


def run(task: Path, name: str, failures: int = 0, **rollout: Any) -> Path:
    config = PPOConfig.load(
        task,
        overrides={
            "placement.mode": "dedicated",
            **{f"rollout.{key}": value for key, value in rollout.items()},
        },
    )
    run_config = RunConfig(name=name, failure_config=FailureConfig(max_failures=failures))
    result = PPOTrainer(config, run_config=run_config).fit()
    assert result.return_value == FINISHED
    return task.parent / "runs" / name


def prompts(folder: Path) -> list[list[int]]:
    """Of each step, which prompts it trains."""
    files = sorted((folder / "rollouts").glob("step_*.parquet"))
    return [pq.read_table(file)["prompt_index"].to_pylist() for file in files]


def test_async_without_staleness_is_the_synchronous_run(first: SimpleNamespace, task: Path):
    """Bit for bit, with the engine in a process group of its own, asked by another thread."""
    folder = run(task, "async_0", mode="async", max_staleness=0)
    metrics = read_metrics(folder)
    assert numbers(metrics) == numbers(first.metrics)
    assert all("time/wait_for_rollouts_s" in row for row in metrics)
    assert all(row["perf/generate_s"] > 0.0 for row in metrics)


def test_one_step_off_trains_the_same_prompts_one_version_later_also_after_a_loss(
    first: SimpleNamespace, task: Path
):
    undisturbed = run(task, "one_step_off", mode="one_step_off")
    metrics = read_metrics(undisturbed)
    staleness = [(row["rollout/staleness_mean"], row["rollout/staleness_max"]) for row in metrics]
    assert staleness == [(0.0, 0.0), (1.0, 1.0), (1.0, 1.0), (1.0, 1.0)]
    assert prompts(undisturbed) == prompts(first.folder)
    assert numbers(metrics)[0] == numbers(first.metrics)[0]
    folder = task.parent / "runs" / "one_step_off_lost"

    def kill() -> None:
        wait_for_steps(folder, 3)
        kill_train_workers()

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    run(task, "one_step_off_lost", failures=1, mode="one_step_off")
    killer.join(timeout=10)
    assert numbers(read_metrics(folder)) == numbers(metrics)


def test_async_keeps_its_bound_and_every_prompt(first: SimpleNamespace, task: Path):
    folder = run(task, "async_2", mode="async", max_staleness=2)
    metrics = read_metrics(folder)
    assert prompts(folder) == prompts(first.folder)
    for row in metrics:
        assert 0.0 <= row["rollout/staleness_mean"] <= row["rollout/staleness_max"] <= 2.0
        assert row["rollout/samples_sampled"] == row["rollout/samples_trained"]
