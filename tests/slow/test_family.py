"""The family in whole runs: GRPO with its KL in the loss, DAPO with groups that are filtered."""

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from raypo import PPOConfig, PPOTrainer, Rollout
from raypo.storage.run_files import RunFiles
from tests.integration.task import digit_share, read_metrics, write_task

pytestmark = pytest.mark.usefixtures("local_ray")


def test_grpo_and_dapo_run_as_published(tmp_path: Path):
    task = write_task(tmp_path)
    common = {"num_steps": 2, "eval.prompts": None}

    PPOTrainer(PPOConfig.load(task, {**common, "name": "grpo", "ppo.preset": "grpo"})).fit()

    grpo = read_metrics(tmp_path / "runs" / "grpo")
    assert [row["step"] for row in grpo] == [1, 2]
    assert all("ppo/value_loss" not in row for row in grpo)  # no critic
    assert [row["kl/coef"] for row in grpo] == [0.05, 0.05]  # the file's key, not the preset's
    assert grpo[0]["kl/ref_mean"] == pytest.approx(0.0, abs=1e-5)
    assert all(row["ppo/kl_loss"] > 0.0 for row in grpo)  # the update itself leaves the reference
    assert all(row["ppo/policy_updates"] == 4 for row in grpo)

    def alike_at_first(rollouts: list[Rollout]) -> list[float]:
        return [
            score if rollout.weight_version else 1.0
            for rollout, score in zip(rollouts, digit_share(rollouts), strict=True)
        ]

    keys = {**common, "name": "dapo", "ppo.preset": "dapo", "ppo.filter.max_refills": 1}
    dapo = PPOTrainer(PPOConfig.load(task, keys), reward_funcs=alike_at_first)
    dapo.fit()

    folder = tmp_path / "runs" / "dapo"
    first, second = read_metrics(folder)
    assert first["rollout/samples_filtered"] == first["rollout/samples_sampled"] == 64
    assert first["ppo/policy_updates"] == 0  # nothing to learn from: the run goes on
    assert first["rollout/groups_missing"] == 8
    assert second["rollout/groups_missing"] <= 7
    assert second["ppo/policy_updates"] > 0
    fates = ("trained", "filtered", "failed")
    for row in (first, second):
        total = sum(row[f"rollout/samples_{fate}"] for fate in fates)
        assert total == row["rollout/samples_sampled"]
    rows = pq.read_table(folder / "rollouts" / "step_00002.parquet").to_pylist()
    assert len(rows) == second["rollout/samples_trained"]
    assert min(row["group_index"] for row in rows) >= 16  # the first step's draws are spent
    config = RunFiles(str(tmp_path / "runs"), "dapo").config()
    assert config is not None
    assert PPOConfig.parse(config) == dapo.config
    assert config["ppo"]["clip_high"] == 0.28
