"""Whole runs whose responses are episodes: an environment answers each turn of the policy."""

import json
import operator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from raypo import PPOConfig, PPOTrainer
from tests.integration.task import read_metrics

pytestmark = pytest.mark.usefixtures("local_ray")

SOURCE = """
class Digits:
    '''Asks twice for more; a turn is worth its share of digits.'''

    def __init__(self, turns):
        self.left = turns

    def reset(self, prompt, label):
        self.label = label
        return f"{prompt} "

    def step(self, action):
        self.left -= 1
        if self.label == "3" and "7" in action:
            raise ValueError("seven")
        return f" more than {self.label}? ", sum(map(str.isdigit, action)) / 8, self.left == 0
"""

OPENAI_AGENT = """
import json

import openai

class Chats:
    '''Two turns; what it is told of both goes into a file.'''

    def __init__(self, log):
        self.log = log

    def run(self, prompt, label, policy):
        with openai.OpenAI(base_url=policy.base_url, api_key=policy.api_key) as client:
            ids, log_probs, text = [], [], prompt
            for _ in range(2):
                answer = client.completions.create(
                    model="any",
                    prompt=text,
                    stop=["77"],
                    logprobs=0,
                    extra_body={"return_token_ids": True},
                )
                (choice,) = answer.choices
                ids += choice.token_ids
                log_probs += choice.logprobs.token_logprobs
                text += choice.text + "; "
        with open(self.log, "a") as file:
            file.write(json.dumps([ids, log_probs]) + "\\n")
        return sum(map(str.isdigit, text)) / 24
"""


def fit(task: Path, name: str, num_steps: int, overrides: dict[str, Any]) -> Path:
    """A run that nothing judges but its environment or agent: its folder."""
    common = {"name": name, "num_steps": num_steps, "reward.function": None, "ppo.kl.coef": 0.0}
    result = PPOTrainer(PPOConfig.load(task, overrides=common | overrides)).fit()
    assert result.return_value == {"status": "finished", "step": num_steps}
    return task.parent / "runs" / name


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """Of all steps, in order."""
    return [
        row
        for path in sorted((folder / "rollouts").glob("step_*.parquet"))
        for row in pq.read_table(path).to_pylist()
    ]


def run(task: Path, name: str, **rollout: Any) -> Path:
    environment = task.parent / "digits.py"
    environment.write_text(SOURCE)
    overrides = {
        "reward.max_failed_fraction": 0.5,
        "ppo.advantage": "grpo",
        "ppo.num_epochs": 1,
        "rollout.environment": f"{environment}:Digits",
        "rollout.environment_args": {"turns": 3},
        "rollout.max_episode_tokens": 60,
        **{f"rollout.{key}": value for key, value in rollout.items()},
    }
    return fit(task, name, 3, overrides)


def test_a_run_with_an_environment(task: Path):
    """It trains what was sampled and no more."""
    folder = run(task, "episodes")
    metrics = read_metrics(folder)
    assert [row["rollout/turns_max"] for row in metrics] == [3.0, 3.0, 3.0]
    assert all(row["mismatch/log_prob_gap_max"] < 1e-3 for row in metrics)
    assert sum(row["rollout/episodes_failed"] for row in metrics) == sum(
        row["rollout/samples_failed"] for row in metrics
    )
    rows = pq.read_table(folder / "rollouts" / "step_00003.parquet").to_pylist()
    for row in rows:
        mask, advantages = np.array(row["response_mask"]), np.array(row["advantages"])
        assert row["prompt"].endswith(" ")
        assert f"more than {row['label']}?" in row["response"]
        assert (advantages[~mask] == 0.0).all()
        assert (np.array(row["log_probs"])[~mask] == 0.0).all()
        assert sum(row["turn_rewards"]) == pytest.approx(row["score"])
        assert (np.flatnonzero(row["turn_rewards"])[:, None] == np.flatnonzero(mask)).any(1).all()
    assert "eval/score_mean" in metrics[1]


def test_a_run_with_an_agent_of_the_openai_package(task: Path):
    """It needs nothing of raypo, and id by id, what it was told is what is trained."""
    agent = task.parent / "chats.py"
    agent.write_text(OPENAI_AGENT)
    overrides = {
        "rollout.agent": f"{agent}:Chats",
        "rollout.agent_args": {"log": str(task.parent / "told.jsonl")},
        "rollout.max_episode_tokens": 60,
        "eval.prompts": None,
    }
    folder = fit(task, "openai", 2, overrides)
    for row in read_metrics(folder):
        assert (row["rollout/turns_mean"], row["rollout/episodes_failed"]) == (2.0, 0.0)
        assert row["mismatch/log_prob_gap_max"] < 1e-3
    rows = rows_of(folder)
    told = map(json.loads, (task.parent / "told.jsonl").read_text().splitlines())
    trained = [
        (
            [int(i) for i in np.array(row["response_ids"])[row["response_mask"]]],
            [pytest.approx(p) for p in np.array(row["log_probs"])[row["response_mask"]]],
        )
        for row in rows
    ]
    by_ids = operator.itemgetter(0)
    assert sorted(trained, key=by_ids) == sorted(map(tuple, told), key=by_ids)
