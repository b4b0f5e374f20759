"""One of several learner workers: a whole step on given rollouts, at every ZeRO stage and dtype.

Where the task says so, each worker's models are moved to the host and back before and after the
step, which may change no byte of what they hold.

python -m tests.integration.workers_probe TASK.json, with RANK, WORLD_SIZE, MASTER_ADDR and
MASTER_PORT in the environment; rank 0 writes what came out.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from raypo.collectives import Workers
from raypo.config import LearnerSection, ModelSection, PPOSection
from raypo.learner.learner import Learner
from raypo.learner.roles import Roles
from raypo.metrics.clock import Clock
from raypo.models import host_memory, token_log_probs
from raypo.ppo.controllers import UpdateState
from raypo.recipes.ppo import ppo_step
from raypo.rollout.sharding import shard, to_experience
from raypo.types import Rollout, ScoredRollout
from tests.integration.learning import held_bytes
from tests.integration.off_load import configure_as_on_a_gpu, off_and_back

GROUPS, SAMPLES, LONGEST = 12, 2, 24
PPO = PPOSection.model_validate(
    {"num_epochs": 2, "minibatch_size": 12, "clip_low": 0.01, "kl": {"coef": 0.1}}
)


def scored_rollouts() -> list[ScoredRollout]:
    """Every third response is long, the others short."""
    generator = np.random.default_rng(0)
    made = []
    for number in range(GROUPS * SAMPLES):
        tokens = LONGEST if number % 3 == 0 else int(generator.integers(1, 8))
        rollout = Rollout(
            prompt="",
            response="",
            prompt_ids=generator.integers(4, 60, 1 + number % 4).astype(np.int32),
            response_ids=generator.integers(4, 60, tokens).astype(np.int32),
            log_probs=np.zeros(tokens, np.float32),
            response_mask=np.ones(tokens, bool),
            label=None,
            prompt_index=number // SAMPLES,
            sample_index=number % SAMPLES,
            finish_reason="stop",
            weight_version=0,
            group_index=number // SAMPLES,
        )
        reference = generator.normal(-4.0, 0.5, tokens).astype(np.float32)
        made.append(ScoredRollout(rollout, float(generator.normal()), {}, reference))
    return made


def new_learner(
    model: str, dtype: str, stage: int, lora: Any, zero: dict[str, Any], roles: Roles
) -> Learner:
    return Learner(
        ModelSection.model_validate({"policy": model, "dtype": dtype, "lora": lora}),
        PPO,
        LearnerSection.model_validate(
            {
                "zero_stage": stage,
                "policy_lr": 1e-3,
                "critic_lr": 1e-3,
                "max_tokens_per_microbatch": 3 * LONGEST,
                # Every weight is gathered when its module is called, even the smallest.
                "deepspeed": {
                    "zero_optimization": {"stage3_param_persistence_threshold": 0, **zero}
                },
            }
        ),
        temperature=1.0,
        max_new_tokens=LONGEST,
        num_steps=9,
        seed=0,
        workers=roles.everyone,
        roles=roles,
    )


def one_step(learner: Learner, roles: Roles, *, step: int = 1) -> dict[str, Any]:
    """Figures, tokens by worker, and the policy's weights afterwards.

    Rank 0 holds all rollouts, as if the groups of every other worker had been filtered.
    """
    workers = roles.everyone
    mine = scored_rollouts() if workers.rank == 0 else []
    dealt = shard(
        mine, minibatch_size=PPO.minibatch_size, seed=(0, 1), workers=workers, teams=roles.teams
    )
    _, figures, _ = ppo_step(
        learner,
        to_experience(dealt),
        PPO,
        UpdateState.initial(PPO),
        roles.own,
        max_new_tokens=LONGEST,
        step=step,
        clock=Clock(),
    )
    tokens = sum(each.rollout.num_tokens for each in dealt)
    named = learner.named_weights() if roles.trains_policy else ()
    weights = {name: tensor.float().clone() for name, tensor in named}
    return {"figures": figures, "tokens": workers.gather(tokens), "weights": weights}


def bytes_off_the_device(learner: Learner) -> int:
    """Move the learner to the host and back; return the bytes that left the device meanwhile."""
    off_and_back(learner)
    before = held_bytes()
    learner.offload_training_state()
    learner.offload_parameters()
    moved = before - held_bytes()
    learner.reload()
    return moved


def main() -> None:
    task = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    host_memory.HOST = "elsewhere"  # or nothing would be moved
    if task["on_gpu"]:
        configure_as_on_a_gpu()
    token_log_probs.CHUNK_ELEMENTS = {
        "cpu": 400
    }  # other numbers of chunks of logits on each worker
    dist.init_process_group("gloo")
    os.environ["LOCAL_RANK"] = os.environ["RANK"]
    workers = Workers.current()
    roles = Roles.of(workers, task["critic_workers"])
    results = {}
    for dtype, stage in task["cases"]:
        case = (task["model"], dtype, stage, task["lora"], task["zero"], roles)
        before = held_bytes()
        learner = new_learner(*case)
        if task["moves"]:
            off_and_back(learner)
        results[dtype, stage] = result = one_step(learner, roles)
        told = sum(weight.nbytes for weight in result["weights"].values())
        if task["moves"]:
            held = held_bytes() - before - told
            result |= {"held": held, "moved": bytes_off_the_device(learner)}
        if roles.trains_policy:
            engine = learner._policy._engine
            result["optimizer"] = type(engine.optimizer).__name__
            result["overlaps"] = engine.zero_overlap_comm()
        if folder := task["checkpoints"]:
            directory = Path(folder) / f"{dtype}_{stage}_{workers.count}"
            directory.mkdir(exist_ok=True)
            learner.save(directory)
            learner = new_learner(*case)
            learner.restore(directory)
            result["second"] = one_step(learner, roles, step=2)
    if workers.rank == 0:
        torch.save(results, task["out"])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
