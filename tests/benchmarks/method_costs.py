"""Cost of a step's update with each newer method, beside the same step with its base.

    python -m tests.benchmarks.method_costs [--rounds 10] [--only gigpo vespo]

A real learner under DeepSpeed, in one process on one core. Methods take turns with their base, and
processor time is counted, so that neither a busy machine nor a warm cache favours one. The step is
all of PPO's part: old log-probs, advantages, corrections and one update. Prints the ratio of the
fastest step to the base's fastest step; the row `grpo` is the base against itself, the noise.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from raypo.collectives import Workers
from raypo.config import LearnerSection, ModelSection, PPOSection
from raypo.learner.learner import Learner
from raypo.metrics.clock import Clock
from raypo.ppo.controllers import UpdateState
from raypo.recipes.ppo import ppo_step
from raypo.rewards.scoring import ScoreOfParts
from raypo.rollout.sharding import to_experience
from raypo.types import Rollout
from tests.benchmarks.bench_pieces import one_process
from tests.tiny import tiny_policy

PROMPTS, SAMPLES, PROMPT_TOKENS, NEW_TOKENS, TURNS = 12, 8, 32, 64, 4
BASE: dict[str, Any] = {
    "advantage": "grpo",
    "minibatch_size": PROMPTS * SAMPLES,
    "num_epochs": 1,
    "kl": {"coef": 0.0},
}
METHODS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "opo": {"advantage": "opo"},
    "maxrl": {"advantage": "maxrl"},
    "pass_at_k": {"advantage": "pass_at_k", "pass_k": 4},
    "gdpo": {"advantage": "gdpo", "part_weights": {"right": 1.0, "form": 0.5}},
    "gigpo": {"advantage": "gigpo"},
    "dppo_tv": {"policy_loss": "dppo_tv"},
    "dppo_kl": {"policy_loss": "dppo_kl"},
    "vespo": {"policy_loss": "vespo"},
}


def rollouts() -> list[Rollout]:
    """Responses of several turns with equal states, and scores of two parts."""
    generator = np.random.default_rng(0)
    made = []
    turn = np.repeat(np.arange(TURNS), NEW_TOKENS // TURNS).astype(np.int32)
    rewards = np.zeros(NEW_TOKENS, np.float32)
    rewards[NEW_TOKENS // TURNS - 1 :: NEW_TOKENS // TURNS] = 0.25
    for group in range(PROMPTS):
        prompt = generator.integers(4, 60, PROMPT_TOKENS).astype(np.int32)
        for sample in range(SAMPLES):
            score = float(generator.random() < 0.5)
            rollout = Rollout(
                prompt="",
                response="",
                prompt_ids=prompt,
                response_ids=generator.integers(4, 60, NEW_TOKENS).astype(np.int32),
                log_probs=np.full(NEW_TOKENS, -4.0, np.float32),
                response_mask=np.ones(NEW_TOKENS, bool),
                label=None,
                prompt_index=group,
                sample_index=sample,
                finish_reason="stop",
                weight_version=0,
                group_index=group,
                turn_rewards=rewards * score,
                turn_index=turn,
            )
            parts = ScoreOfParts(score, {"right": score, "form": float(generator.random())})
            made.append(replace(rollout, score=score, scores_by_source={"function": parts}))
    return made


def learner_of(ppo: PPOSection, policy: str) -> Learner:
    return Learner(
        ModelSection(policy=policy, dtype="float32"),
        ppo,
        LearnerSection(policy_lr=1e-6),
        temperature=1.0,
        max_new_tokens=NEW_TOKENS,
        num_steps=1_000_000,
        seed=0,
        workers=Workers(),
    )


def seconds(learner: Learner, ppo: PPOSection, scored: list[Rollout], step: int) -> float:
    """Processor time of a step's update."""
    experience = to_experience(scored, parts=ppo.part_names)
    begin = time.process_time()
    ppo_step(
        learner,
        experience,
        ppo,
        UpdateState.initial(ppo),
        Workers(),
        max_new_tokens=NEW_TOKENS,
        step=step,
        clock=Clock(),
    )
    return time.process_time() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--only", nargs="+", choices=list(METHODS), default=list(METHODS))
    arguments = parser.parse_args()
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    torch.set_num_threads(1)
    one_process()
    scored = rollouts()
    print("method      ratio to grpo   seconds of grpo")
    with tempfile.TemporaryDirectory() as folder:
        policy = str(tiny_policy(folder, hidden=256, layers=4))
        sections = {
            name: PPOSection.model_validate(BASE | METHODS[name]) for name in arguments.only
        }
        base = PPOSection.model_validate(BASE)
        beside = learner_of(base, policy)
        for name, ppo in sections.items():
            tried = learner_of(ppo, policy)
            took: dict[int, list[float]] = {id(tried): [], id(beside): []}
            for step in range(1, arguments.rounds + 2):
                pair = [(tried, ppo), (beside, base)]
                order = pair if step % 2 else pair[::-1]
                for each, section in order:
                    took[id(each)].append(seconds(each, section, scored, step))
            fastest, base_fastest = min(took[id(tried)]), min(took[id(beside)])
            print(f"{name:<11} {fastest / base_fastest:>12.4f} {base_fastest:>17.3f}", flush=True)


if __name__ == "__main__":
    main()
