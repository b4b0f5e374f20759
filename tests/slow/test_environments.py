"""Environments in processes, and agents with several conversations: whole runs."""

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.integration.task import numbers, read_metrics
from tests.integration.test_environments import fit, run

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
