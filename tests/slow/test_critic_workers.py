"""A critic on a worker of its own: real Ray Train, vLLM and DeepSpeed give the shared numbers."""

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from raypo import PPOConfig, PPOTrainer
from tests.integration.task import numbers, read_metrics, write_task

pytestmark = pytest.mark.usefixtures("local_ray")


def run(folder: Path, name: str, num_steps: int, **learner: Any) -> Path:
    config = PPOConfig.load(
        folder / "ppo.yaml",
        [f"name={name}", f"num_steps={num_steps}", "ppo.kl.coef=0.1", "learner.save_critic=true"]
        + ["checkpoint.best_by=rollout/score_mean"]
        + [f"learner.{key}={value}" for key, value in learner.items()],
    )
    result = PPOTrainer(config).fit()
    assert result.return_value == {"status": "finished", "step": num_steps}
    return folder / "runs" / name


def test_the_critic_apart_learns_the_same_and_goes_on_from_its_checkpoint(tmp_path: Path):
    write_task(tmp_path)
    together = run(tmp_path, "together", 3)
    apart = {"num_workers": 1, "critic_workers": 1}
    run(tmp_path, "apart", 2, **apart)
    folder = run(tmp_path, "apart", 3, **apart)

    rows = numbers(read_metrics(folder))
    assert [row["step"] for row in rows] == [1, 2, 3]
    # DeepSpeed does not tell the gradient norm of several workers at stage 0 alone.
    for mine, theirs in zip(rows, numbers(read_metrics(together)), strict=True):
        assert mine.keys() == theirs.keys()
        for name, value in theirs.items():
            assert mine[name] == pytest.approx(value, rel=1e-2, abs=1e-3), name
    for model in ("policy", "critic", "best/policy", "best/critic"):
        assert (folder / model / "config.json").exists(), model
    samples = pd.read_parquet(folder / "rollouts" / "step_00001.parquet")
    assert len(samples) == 32  # each of them once
