"""PPO runs on two sources, a file and a saved folder, each with its weight and its judge."""

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


def on_two_sources(task: Path, folder: Path) -> dict[str, Any]:
    """What makes the task's run one of two steps on two sources, in a folder of its own."""
    (folder / "judges.py").write_text(JUDGES)
    rows = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(9)]
    sums: dict[str, Any] = {
        "path": save_to_disk(folder / "sums", rows),
        "function": f"{folder}/judges.py:twos",
    }
    return {
        "storage_path": str(folder),
        "num_steps": 2,
        "checkpoint.every": 1,
        "reward.function": f"{folder}/judges.py:ones",
        "data.prompts": [
            {"path": str(task.parent / "prompts.jsonl"), "name": "plain", "weight": 1},
            {**sums, "weight": 3},
        ],
        "eval.prompts": [str(task.parent / "held_out.jsonl"), sums],
    }


@pytest.mark.usefixtures("local_ray")
def test_a_run_on_two_sources_with_judges_of_their_own(task: Path, tmp_path: Path):
    overrides = {**on_two_sources(task, tmp_path), "name": "whole"}
    PPOTrainer(PPOConfig.load(task, overrides=overrides)).fit()

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


@pytest.mark.usefixtures("local_ray")
def test_a_mix_of_sources_resumes_to_the_same_numbers(task: Path, tmp_path: Path):
    overrides = on_two_sources(task, tmp_path)
    for name, steps in (("whole", 2), ("parts", 1), ("parts", 2)):
        given = {**overrides, "name": name, "num_steps": steps}
        PPOTrainer(PPOConfig.load(task, overrides=given)).fit()

    whole, parts = (numbers(read_metrics(tmp_path / name)) for name in ("whole", "parts"))
    for one, other in zip(whole, parts, strict=True):  # the shorter one also ends by an evaluation
        assert other.items() >= {k: v for k, v in one.items() if "eval/" not in k}.items()
