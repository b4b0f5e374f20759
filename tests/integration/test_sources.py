"""A PPO run on two sources, a file and a saved folder, each with its weight and its judge."""

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from raypo import PPOConfig, PPOTrainer
from tests.integration.task import numbers, read_metrics
from tests.unit.data.prompt_files import save_to_disk

JUDGES = """
def ones(rollouts):
    return [1.0] * len(rollouts)

def twos(rollouts):
    assert all(each.data_source == "sums" for each in rollouts)
    return [2.0] * len(rollouts)
"""


@pytest.mark.usefixtures("local_ray")
def test_a_run_on_two_sources_with_judges_of_their_own(task: Path, tmp_path: Path):
    (tmp_path / "judges.py").write_text(JUDGES)
    folder = save_to_disk(
        tmp_path / "sums", [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(9)]
    )
    sums: dict[str, Any] = {"path": folder, "function": f"{tmp_path}/judges.py:twos"}
    overrides = {
        "storage_path": str(tmp_path),
        "num_steps": 2,
        "checkpoint.every": 1,
        "reward.function": f"{tmp_path}/judges.py:ones",
        "data.prompts": [
            {"path": str(task.parent / "prompts.jsonl"), "name": "plain", "weight": 1},
            {**sums, "weight": 3},
        ],
        "eval.prompts": [str(task.parent / "held_out.jsonl"), sums],
        "learner.policy_lr": 1e-4,
    }
    PPOTrainer(PPOConfig.load(task, overrides={**overrides, "name": "whole"})).fit()

    rows = read_metrics(tmp_path / "whole")
    for row in rows:
        assert row["rollout/score_mean/plain"] == 1.0
        assert row["rollout/score_mean/sums"] == 2.0
        assert row["rollout/score_mean"] == (2 * 1.0 + 6 * 2.0) / 8
    assert rows[-1]["eval/score_mean/held_out"] == 1.0
    assert rows[-1]["eval/score_mean/sums"] == 2.0
    assert rows[-1]["eval/score_mean"] == pytest.approx((6 * 1.0 + 9 * 2.0) / 15)
    samples = pd.read_parquet(tmp_path / "whole" / "rollouts" / "step_00001.parquet")
    assert samples["data_source"].value_counts().to_dict() == {"sums": 24, "plain": 8}
    by_source = set(zip(samples["data_source"], samples["score"], strict=True))
    assert by_source == {("plain", 1.0), ("sums", 2.0)}

    # One step, and then the other one: the same draws, and the same numbers.
    parts = {**overrides, "name": "parts"}
    PPOTrainer(PPOConfig.load(task, overrides={**parts, "num_steps": 1})).fit()
    PPOTrainer(PPOConfig.load(task, overrides=parts)).fit()
    resumed = read_metrics(tmp_path / "parts")
    for whole, part in zip(numbers(rows), numbers(resumed), strict=True):
        assert part.items() >= {k: v for k, v in whole.items() if "eval/" not in k}.items()
