"""Rollouts sampled while the learner updates: whole runs with engines of their own."""

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from ray.train import FailureConfig, RunConfig

from raypo import PPOConfig, PPOTrainer
from tests.integration.task import (
    kill_at_work,
    kill_train_workers,
    numbers,
    read_metrics,
    wait_for_steps,
)

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


def trained(metrics: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Their numbers, without the accounts of what is sampled ahead."""
    accounts = {f"rollout/samples_{name}" for name in ("asked", "asked_again", "carried")}
    return [{k: v for k, v in row.items() if k not in accounts} for row in numbers(metrics)]


def test_async_without_staleness_is_the_synchronous_run_also_after_losses(
    first: SimpleNamespace, task: Path
):
    """Bit for bit, with the engine in a process group of its own, asked by another thread.

    The engine is killed in the middle of a call, and the learner's worker after step 3.
    """
    folder = task.parent / "runs" / "async_0"
    done: list[str] = []

    def kill() -> None:
        kill_at_work("raypo:async_0:engine:0", folder, last_step=4)
        wait_for_steps(folder, 3)
        kill_train_workers()
        done.append("killed")

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    run(task, "async_0", failures=1, mode="async", max_staleness=0)
    killer.join(timeout=10)
    assert done
    metrics = read_metrics(folder)
    assert trained(metrics) == trained(first.metrics)
    assert all(row["rollout/samples_carried"] == 0.0 for row in metrics)
    assert all("time/wait_for_rollouts_s" in row for row in metrics)
    assert all(row["perf/generate_s"] > 0.0 for row in metrics)


def test_responses_meet_new_weights_and_every_token_keeps_the_bound(
    first: SimpleNamespace, task: Path
):
    # Two at a time: the first batches are still being sampled when the first pushes come.
    few: dict[str, Any] = {"engine.extra": {"max_num_seqs": 2}}
    folder = run(task, "async_2", max_new_tokens=100, mode="async", max_staleness=2, **few)
    metrics = read_metrics(folder)
    assert prompts(folder) == prompts(first.folder)
    several = 0
    for step, row in enumerate(metrics, start=1):
        table = pq.read_table(folder / "rollouts" / f"step_{step:05d}.parquet")
        versions = [np.array(each) for each in table["weight_versions"].to_pylist()]
        assert [v[0] for v in versions] == table["weight_version"].to_pylist()
        assert all((np.diff(v) >= 0).all() for v in versions)
        lags = step - 1 - np.concatenate(versions)
        assert lags.min() >= 0
        assert lags.max() <= 2
        means = [step - 1 - v.mean() for v in versions]
        assert row["rollout/staleness_mean"] == pytest.approx(np.mean(means))
        assert row["rollout/staleness_max"] == lags.max()
        for lag in set(lags.tolist()) if lags.max() else ():
            assert row[f"rollout/staleness_share_{lag}"] == pytest.approx((lags == lag).mean())
        assert row["rollout/samples_sampled"] == row["rollout/samples_trained"] == 32
        # All that the bound admits was asked for, and is trained by the next steps.
        assert row["rollout/samples_carried"] == 32 * min(2, 4 - step)
        assert row["rollout/samples_asked_again"] == 0
        assert row["perf/engine_running"] <= 2.5  # a probe of two joins them for four tokens
        several += sum(len(set(v.tolist())) > 1 for v in versions)
        # Tokens of the newest weights have their log-probs, whoever sampled what stands before.
        if (gap := row.get("mismatch/log_prob_gap_mean_lag_0")) is not None:
            assert gap < 1e-4
    assert several > 0, "no response met new weights"
    assert any(row.get("rollout/staleness_share_0", 1.0) < 1.0 for row in metrics)
