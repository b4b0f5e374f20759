"""Whole runs whose engine drafts tokens."""

from pathlib import Path
from typing import Any

import pytest

from raypo import PPOConfig, PPOTrainer
from tests.integration.task import read_metrics, write_task
from tests.tiny import tiny_policy

pytestmark = pytest.mark.usefixtures("local_ray")


@pytest.mark.parametrize("kind", ["ngram", "model"])
def test_a_run_trains_on_drafted_tokens_and_goes_on_to_the_same_numbers(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, kind: str
):
    speculation: dict[str, Any] = {"kind": kind, "num_tokens": 3}
    if kind == "model":
        drafter = tiny_policy(tmp_path_factory.mktemp("drafter"), layers=1)
        speculation["model"] = str(drafter)
    keys: dict[str, Any] = {
        "rollout.engine.speculation": speculation,
        "learner.policy_lr": 1e-2,
        "rollout.max_new_tokens": 40,
        "rollout.temperature": 0.3,  # so that n-grams recur
        "checkpoint.every": 1,
    }
    task = write_task(tmp_path)
    whole = PPOConfig.load(task, keys | {"num_steps": 3})
    PPOTrainer(whole).fit()
    at_once = read_metrics(tmp_path / "runs" / "tiny")
    assert [row["step"] for row in at_once] == [1, 2, 3]
    assert all(row["mismatch/log_prob_gap_max"] < 1e-4 for row in at_once)
    accepted = [row["perf/draft_acceptance"] for row in at_once if "perf/draft_acceptance" in row]
    assert accepted
    assert all(0 <= share <= 1 for share in accepted)
    in_two = keys | {"name": "in-two"}
    PPOTrainer(PPOConfig.load(task, in_two | {"num_steps": 1})).fit()
    PPOTrainer(PPOConfig.load(task, in_two | {"num_steps": 3})).fit()
    resumed = read_metrics(tmp_path / "runs" / "in-two")
    assert list(map(numbers, resumed)) == list(map(numbers, at_once))


def numbers(row: dict[str, float]) -> dict[str, float]:
    measured = ("time/", "perf/", "eval/")
    return {name: value for name, value in row.items() if not name.startswith(measured)}
