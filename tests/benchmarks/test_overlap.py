"""What sampling beside the update saves: sync, one_step_off and async, engine and learner on one
core each, in turns.

    pytest -m benchmark tests/benchmarks/test_overlap.py -s

Ratios of one session, printed. What is asserted is that the modes train the same prompts.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from raypo import PPOConfig, PPOTrainer
from tests.integration.task import read_metrics
from tests.integration.test_ahead import prompts
from tests.tiny import tiny_policy

pytestmark = pytest.mark.usefixtures("local_ray")

MODES: dict[str, dict[str, Any]] = {
    "sync": {},
    "one_step_off": {"rollout.mode": "one_step_off"},
    "async": {"rollout.mode": "async", "rollout.max_staleness": 2},
}
TURNS = 2
"""Runs of each mode: the machine's speed drifts from minute to minute."""
FIRST = 3
"""Steps that warm up."""
SIZES: dict[str, tuple[int, int, int]] = {
    "grpo": (512, 6, 96),  # few long responses: sampling and update take alike
    "gae": (256, 8, 48),  # two models are updated: the longer path is the learner's
}
"""By advantage: hidden size of 8 layers, prompts of a step, most tokens of a response."""


@pytest.mark.parametrize("advantage", SIZES)
def test_sampling_beside_the_update_against_one_after_the_other(task: Path, advantage: str):
    hidden, num_prompts, max_new_tokens = SIZES[advantage]
    model = tiny_policy(task.parent / f"of_{hidden}", hidden=hidden, layers=8, head_dim=64)
    common = {
        "model.policy": str(model),
        "placement.mode": "dedicated",
        "rollout.prompts_per_step": num_prompts,
        "rollout.max_new_tokens": max_new_tokens,
        "ppo.advantage": advantage,
        "ppo.num_epochs": 1,
        "ppo.minibatch_size": 2 * num_prompts,
        "learner.policy_lr": 1e-5,
        "learner.critic_lr": 1e-5,
        "learner.max_tokens_per_microbatch": 1024,
        "eval.every": 100,
        "checkpoint.every": 100,
        "num_steps": 12,
    }
    rows: dict[str, list[dict[str, Any]]] = defaultdict(list)
    trained = []
    for turn in range(TURNS):
        for mode, overrides in MODES.items():
            name = f"overlap_{advantage}_{mode}_{turn}"
            config = PPOConfig.load(task, overrides={**common, **overrides, "name": name})
            PPOTrainer(config).fit()
            folder = task.parent / "runs" / config.name
            rows[mode] += read_metrics(folder)[FIRST:-1]  # the last step saves the policy
            trained.append(prompts(folder))
    assert trained[0]
    assert all(trained[0])
    assert all(each == trained[0] for each in trained)

    def seconds(mode: str, *names: str) -> float:
        return median(sum(row[name] for name in names) for row in rows[mode])

    sampling = seconds("sync", "time/generate_s", "time/score_s")
    step = seconds("sync", "time/step_s")
    longer = max(sampling, step - sampling)
    print(
        f"\n{advantage}, sync: {step:.2f} s a step: {sampling:.2f} s sampling and scoring, "
        f"{step - sampling:.2f} s the learner's, of it {seconds('sync', 'time/update_s'):.2f} s "
        f"updating"
    )
    for mode in ("one_step_off", "async"):
        took = seconds(mode, "time/step_s")
        waits = seconds(mode, "time/wait_for_rollouts_s", "perf/wait_for_engines_s")
        beside = seconds(mode, "perf/generate_s", "perf/score_s")
        print(
            f"{mode}: {took:.2f} s a step: {seconds(mode, 'time/update_s'):.2f} s updating beside "
            f"{beside:.2f} s sampling and scoring, {waits:.2f} s waiting; {step / took:.2f} times "
            f"as fast as sync, {took / longer:.2f} of the longer path"
        )
