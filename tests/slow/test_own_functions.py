"""A run whose loss, advantage, shaping, reward and callback are a user's own."""

import json
from pathlib import Path

import pandas as pd
import pytest

from raypo import PPOConfig, PPOTrainer
from tests.integration.task import REPOSITORY, read_metrics

SOURCE = """
from examples.own_functions.functions import distinct, over_the_median, ranks, right_digits, spo

def right(rollouts):
    print("judging", len(rollouts))
    return right_digits(rollouts)
"""


@pytest.mark.usefixtures("local_ray")
def test_a_run_of_ones_own_functions(task: Path, capsys: pytest.CaptureFixture[str]):
    own = task.parent / "own.py"
    own.write_text(SOURCE)
    overrides = {
        "name": "own",
        "num_steps": 1,
        "reward.function": f"{own}:right",
        "ppo.policy_loss": f"{own}:spo",
        "ppo.advantage": f"{own}:over_the_median",
        "ppo.shaping.function": f"{own}:ranks",
        "callbacks": f"{own}:distinct",
        "checkpoint.best_by": "mine/distinct",
    }
    PPOTrainer(PPOConfig.load(task, overrides=overrides)).fit()

    run = task.parent / "runs" / "own"
    (row,) = read_metrics(run)
    assert 0.0 < row["mine/distinct"] <= 1.0
    assert row["reward/exact"] <= row["reward/length"] <= 1.0
    expected = row["reward/exact"] + 0.2 * row["reward/length"]
    assert row["rollout/score_mean"] == pytest.approx(expected)
    assert "eval/reward/exact" in row
    assert row["ppo/policy_updates"] == 4.0
    samples = pd.read_parquet(run / "rollouts" / "step_00001.parquet")
    assert samples["reward/exact"].mean() == row["reward/exact"]
    assert samples["reward/length"].mean() == row["reward/length"]
    assert json.loads((run / "best" / "best.json").read_text())["metric"] == "mine/distinct"

    log = run / "logs" / "worker_0.log"
    assert f"printed: judging 6 (this and what follows: {log})" in capsys.readouterr().out
    assert "judging 32" in log.read_text()
    assert REPOSITORY.joinpath("examples/own_functions/ppo.yaml").exists()
