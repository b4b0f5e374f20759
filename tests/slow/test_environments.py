"""Whole runs with environments in processes or ahead, and agents with several conversations."""

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from tests.integration.task import numbers, read_metrics
from tests.integration.test_environments import fit, rows_of, run

pytestmark = pytest.mark.usefixtures("local_ray")

AGENT = """
import asyncio

class Drafts:
    '''Two drafts at a time, one of which is gone on with, and a question of its own.'''

    async def run(self, prompt, label, policy):
        first, _ = await asyncio.gather(policy.generate(prompt), policy.generate(prompt))
        second = await policy.generate(prompt + first.text + "; ")
        other = await policy.generate("1+1=")
        return sum(map(str.isdigit, first.text + second.text + other.text)) / 24
"""


SLOW = """
import asyncio

class Thinks:
    '''Some episodes have more turns, and some take their time for each.'''

    async def reset(self, prompt, label):
        self.turns, self.thinks_s = 1 + int(label) % 4, 0.3 * (int(label) % 3 == 0)

    async def step(self, action):
        await asyncio.sleep(self.thinks_s)
        self.turns -= 1
        return " more? ", sum(map(str.isdigit, action)) / 8, self.turns == 0
"""


def test_a_run_with_an_environment_repeats_bit_for_bit_in_threads_or_processes(task: Path):
    threads, processes = (
        read_metrics(run(task, f"episodes_in_{number}", environment_processes=number))
        for number in (0, 2)
    )
    assert numbers(threads) == numbers(processes)


def test_a_run_with_an_agent_and_a_critic(task: Path):
    """Each episode is three rows with one score, and one sample."""
    agent = task.parent / "drafts.py"
    agent.write_text(AGENT)
    overrides = {
        "ppo.gamma": 0.9,
        "ppo.discount_by": "turn",
        "rollout.agent": f"{agent}:Drafts",
        "rollout.max_episode_tokens": 40,
        "rollout.max_turns": 4,
        "eval.prompts": None,
    }
    folder = fit(task, "agent", 2, overrides)
    for row in read_metrics(folder):
        assert (row["rollout/turns_mean"], row["rollout/samples_trained"]) == (4.0, 32.0)
        assert row["mismatch/log_prob_gap_max"] < 1e-3
    rows = pq.read_table(folder / "rollouts" / "step_00002.parquet").to_pylist()
    assert [row["row_index"] for row in rows] == [0, 1, 2] * 32
    for each in zip(rows[::3], rows[1::3], rows[2::3], strict=True):
        assert len({(row["sample_index"], row["score"]) for row in each}) == 1
        assert each[2]["prompt"] == "1+1="


def test_a_run_whose_episodes_go_on_while_weights_arrive(task: Path):
    """Each by itself: some of them think long, none is lost, and all tokens know their weights."""
    environment = task.parent / "slow.py"
    environment.write_text(SLOW)
    overrides = {
        "ppo.advantage": "grpo",
        "ppo.num_epochs": 1,
        "placement.mode": {"engine": "dedicated"},
        "rollout.mode": "async",
        "rollout.max_staleness": 2,
        "rollout.environment": f"{environment}:Thinks",
        "rollout.max_episode_tokens": 60,
        "eval.prompts": None,
    }
    folder = fit(task, "in_flight", 6, overrides)
    for row in read_metrics(folder):
        assert row["rollout/samples_sampled"] == row["rollout/samples_trained"] == 32
        assert row["rollout/staleness_max"] <= 2
    rows = rows_of(folder)
    assert [row["group_index"] for row in rows] == [g for g in range(8 * 6) for _ in range(4)]
    num_changed = 0
    for row in rows:
        versions = np.array(row["weight_versions"])[np.array(row["turn_index"]) >= 0]
        assert (np.diff(versions) >= 0).all()
        assert 1 <= row["episode"]["num_turns"] <= 4
        num_changed += len(set(versions)) > 1
    assert num_changed > 0
