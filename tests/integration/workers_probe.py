"""One of several learner workers: steps on given data, at every ZeRO stage and dtype.

Each worker's models are moved to the host and back before and after a step, which may change no
byte of what they hold. `matrix` does so with a learner of every recipe.

python -m tests.integration.workers_probe TASK.json, with RANK, WORLD_SIZE, MASTER_ADDR and
MASTER_PORT in the environment; rank 0 writes what came out.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from dataclasses import replace
from functools import cache
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
from raypo.models import chunk_sizes, host_memory
from raypo.ppo.controllers import UpdateState
from raypo.recipes.ppo import ppo_step
from raypo.rollout.sharding import deal, to_experience
from raypo.types import Images, Rollout
from tests.integration.learning import held_bytes, save_state
from tests.integration.off_load import configure_as_on_a_gpu, held_bytes_of, off_and_back
from tests.integration.recipe_learners import (
    KINDS,
    OFF_LOADS,
    Case,
    example_learner,
    example_update,
)
from tests.rollouts import plain_rollout
from tests.vision_models import made_up_images, prompt_of

GROUPS, SAMPLES, LONGEST = 12, 2, 24
PPO = PPOSection.model_validate(
    {"num_epochs": 2, "minibatch_size": 12, "clip_low": 0.01, "kl": {"coef": 0.1}}
)


def with_images(rollouts: list[Rollout], kind: str) -> list[Rollout]:
    """Give all samples of a group one prompt, for two thirds of the groups with images."""
    made: dict[int, Images | None] = {}
    for group in {rollout.group_index for rollout in rollouts}:
        sizes = [(1 + group % 2, 2), (2, 1)][: group % 3]
        made[group] = made_up_images(kind, *sizes, seed=group) if sizes else None
    return [
        replace(
            rollout,
            prompt_ids=prompt_of(kind, images, 8 + rollout.group_index, 9).astype(np.int32),
            response_ids=rollout.response_ids % 40 + 8,
            images=images,
        )
        for rollout in rollouts
        for images in [made[rollout.group_index]]
    ]


def scored_rollouts() -> list[Rollout]:
    """Every third response is long, the others short."""
    generator = np.random.default_rng(0)
    made = []
    for number in range(GROUPS * SAMPLES):
        tokens = LONGEST if number % 3 == 0 else int(generator.integers(1, 8))
        rollout = plain_rollout(
            num_response=tokens,
            prompt_ids=generator.integers(4, 60, 1 + number % 4).astype(np.int32),
            response_ids=generator.integers(4, 60, tokens).astype(np.int32),
            prompt_index=number // SAMPLES,
            sample_index=number % SAMPLES,
            group_index=number // SAMPLES,
        )
        reference = generator.normal(-4.0, 0.5, tokens).astype(np.float32)
        made.append(replace(rollout, score=float(generator.normal()), ref_log_probs=reference))
    return made


def new_learner(
    model: str,
    dtype: str,
    stage: int,
    roles: Roles,
    zero: dict[str, Any] | None = None,
    section: dict[str, Any] | None = None,
) -> Learner:
    return Learner(
        ModelSection.model_validate({"policy": model, "dtype": dtype}),
        PPO,
        LearnerSection.model_validate(
            {
                "zero_stage": stage,
                "policy_lr": 1e-3,
                "critic_lr": 1e-3,
                "max_tokens_per_microbatch": 3 * LONGEST,
                # Every weight is gathered when its module is called, even the smallest.
                "deepspeed": {
                    "zero_optimization": {"stage3_param_persistence_threshold": 0, **(zero or {})}
                },
                **(section or {}),
            }
        ),
        temperature=1.0,
        max_new_tokens=LONGEST,
        num_steps=9,
        seed=0,
        workers=roles.everyone,
        roles=roles,
    )


def one_step(
    learner: Learner, roles: Roles, *, step: int = 1, groups: int = GROUPS, images: str = ""
) -> dict[str, Any]:
    """Figures, tokens by worker, and the policy's weights afterwards.

    `images`: model type of which prompts have images.
    """
    workers = roles.everyone
    rollouts = scored_rollouts()[: groups * SAMPLES]
    hands = deal(
        with_images(rollouts, images) if images else rollouts,
        minibatch_size=PPO.minibatch_size,
        seed=(0, 1),
        num_workers=workers.count,
        teams=roles.teams,
        sequence_parallel=roles.sequence_parallel,
    )
    dealt = workers.scatter(hands)
    _, figures, _ = ppo_step(
        learner,
        to_experience(dealt),
        PPO,
        UpdateState.initial(PPO),
        roles.data,
        max_new_tokens=LONGEST,
        step=step,
        clock=Clock(),
    )
    tokens = sum(each.num_tokens for each in dealt)
    named = learner.named_weights() if roles.trains_policy else ()
    weights = {name: tensor.float().clone() for name, tensor in named}
    figures = {name: value for name, value in figures.items() if not name.startswith("perf/")}
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


def steps_of(case: Case, model: str, roles: Roles, section: dict[str, Any]) -> dict[str, Any]:
    """Update two equal learners twice; one of them is moved to the host and back before each step.

    They must report the same figures, and all bytes that they hold at the end must be equal.
    """
    workers, is_example = roles.everyone, case.kind in KINDS
    zero = {"stage3_param_persistence_threshold": 0, **OFF_LOADS[case.off_load]}
    keys = {"zero_stage": case.stage, "deepspeed": {"zero_optimization": zero}, **section}

    def make() -> Any:
        if is_example:
            return example_learner(case.kind, model, case.dtype, keys, workers)
        return new_learner(model, case.dtype, case.stage, roles, zero, section)

    def update(learner: Any, step: int) -> dict[str, float]:
        if is_example:
            return example_update(case.kind, learner, step=step)
        one_minibatch = PPO.minibatch_size // SAMPLES
        return one_step(learner, roles, step=step, groups=one_minibatch)["figures"]

    moved, stayed = make(), make()
    figures = {}
    for step in (1, 2):
        off_and_back(moved)
        figures = update(moved, step)
        assert figures == update(stayed, step), (case, step)
    mine, theirs = (held_bytes_of(each) for each in (moved, stayed))
    assert mine.keys() == theirs.keys(), case
    # The bias of the value head has one element and is the last parameter of a critic. At stage 3
    # the second worker's part of it is padding, which DeepSpeed never fills.
    padding = 4 if case.stage == 3 and not is_example else 0
    other = {}
    for name, each in mine.items():
        differs = (each != theirs[name]).nonzero().flatten()
        if len(differs) and int(differs[0]) < len(each) - padding:
            other[name] = len(each), differs[:8].tolist()
    assert not other, (case, other)
    named = moved.named_weights() if roles.trains_policy else ()
    return {"figures": figures, "weights": {n: w.float().clone() for n, w in named}}


def main() -> None:
    task = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    host_memory.HOST = "elsewhere"  # or nothing would be moved
    configure_as_on_a_gpu()
    chunk_sizes.CHUNK_ELEMENTS = {"cpu": 400}  # other numbers of chunks of logits on each worker
    dist.init_process_group("gloo")
    os.environ["LOCAL_RANK"] = os.environ["RANK"]
    workers = Workers.current()
    shares = task["learner"].get("sequence_parallel", 1)
    roles = Roles.of(workers, task["critic_workers"], shares)
    results = {}
    for dtype, stage in task["cases"]:
        case = (task["model"], dtype, stage, roles, None, task["learner"])
        before = held_bytes()
        learner = new_learner(*case)
        off_and_back(learner)
        results[dtype, stage] = result = one_step(learner, roles, images=task["images"])
        told = sum(weight.nbytes for weight in result["weights"].values())
        held = held_bytes() - before - told
        result |= {"held": held, "moved": bytes_off_the_device(learner)}
        if roles.trains_policy:
            engine = learner._policy._engine
            result["optimizer"] = type(engine.optimizer).__name__
            result["overlaps"] = engine.zero_overlap_comm()
        if folder := task["checkpoints"]:
            apart = f"_{task['critic_workers']}" if task["critic_workers"] else ""
            directory = Path(folder) / f"{dtype}_{stage}_{workers.count}{apart}"
            directory.mkdir(exist_ok=True)
            save_state(learner, directory)
            workers.barrier()
            (directory / "complete").touch()
            learner = new_learner(*case)
            learner.restore(directory)
            result["second"] = one_step(learner, roles, step=2, images=task["images"])
    for name, dtype, stage in task["resume"]:  # from a checkpoint of another number of workers
        directory = Path(task["checkpoints"]) / name
        while not (directory / "complete").exists():
            time.sleep(0.1)
        learner = new_learner(task["model"], dtype, stage, roles, None, task["learner"])
        learner.restore(directory)
        results[name] = one_step(learner, roles, step=2)
    team = cache(lambda critic_workers: Roles.of(workers, critic_workers, shares))
    for case in (Case(*each) for each in task["matrix"]):
        critic_workers = workers.count // 2 if case.kind == "apart" else 0
        results[tuple(case)] = steps_of(case, task["model"], team(critic_workers), task["learner"])
        # DeepSpeed collects garbage at each move and each start: not through what is here already.
        gc.collect()
        gc.freeze()
    if workers.rank == 0:
        torch.save(results, task["out"])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
