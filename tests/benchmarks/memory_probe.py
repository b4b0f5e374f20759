"""One role in a process of its own, its memory measured: `python -m ... memory_probe '{...}'`.

Prints a JSON object: resident bytes of this process as peaks by phase, less those of the process
when it had imported everything and loaded nothing.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from raypo.collectives import Workers
from raypo.config import LearnerSection, ModelSection, PPOSection
from raypo.types import Experience, Rollout


def resident(what: str) -> int:
    """VmRSS (now) or VmHWM (the peak since `forget_peak`), in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{what}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {what}.")


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def experience(rows: int, prompt: int, response: int, vocabulary: int) -> Experience:
    generator = torch.Generator().manual_seed(0)

    def ids(width: int) -> torch.Tensor:
        return torch.randint(4, vocabulary, (rows, width), generator=generator)

    zeros = torch.zeros(rows, response)
    return Experience(
        prompt_ids=ids(prompt),
        prompt_mask=torch.ones(rows, prompt, dtype=torch.bool),
        response_ids=ids(response),
        attention_mask=torch.ones(rows, response, dtype=torch.bool),
        response_mask=torch.ones(rows, response, dtype=torch.bool),
        rollout_log_probs=zeros,
        scores=torch.zeros(rows),
        group_index=torch.arange(rows),
        minibatch=torch.arange(rows) % 2,
        truncated=torch.zeros(rows, dtype=torch.bool),
        weight_version=torch.zeros(rows, dtype=torch.int64),
        advantages=torch.ones(rows, response),
        returns=zeros,
    )


def learner(task: dict[str, Any]) -> dict[str, int]:
    import raypo.learner.engine as engine
    from raypo.learner.learner import Learner

    engine._import_deepspeed()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(LOCAL_RANK="0", RANK="0", WORLD_SIZE="1")
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    baseline = resident("VmRSS")
    forget_peak()
    built = Learner(
        ModelSection(policy=task["model"], dtype=task["dtype"]),
        PPOSection(advantage=task["advantage"]),
        LearnerSection(
            zero_stage=task["stage"],
            policy_lr=1e-6,
            critic_lr=1e-6,
            max_tokens_per_microbatch=task["max_tokens"],
            deepspeed=task["deepspeed"],
        ),
        temperature=1.0,
        max_new_tokens=task["response"],
        seed=0,
        workers=Workers(),
    )
    found = {"baseline": baseline, "start": resident("VmHWM") - baseline}
    found["loaded"] = resident("VmRSS") - baseline
    batch = experience(task["rows"], task["prompt"], task["response"], task["vocabulary"])
    forget_peak()
    evaluated = built.evaluate(batch)
    found["evaluate"] = resident("VmHWM") - baseline
    for name in ("first_update", "update"):
        forget_peak()
        built.update(evaluated, step=1)
        found[name] = resident("VmHWM") - baseline
    found["updated"] = resident("VmRSS") - baseline
    dist.destroy_process_group()
    return found


def reference(task: dict[str, Any]) -> dict[str, int]:
    from transformers.models.llama import modeling_llama  # noqa: F401

    from raypo.serving.reference import ReferenceModel

    random = np.random.default_rng(0)
    rollouts = [
        Rollout(
            prompt="",
            response="",
            prompt_ids=random.integers(4, task["vocabulary"], task["prompt"], dtype=np.int32),
            response_ids=random.integers(4, task["vocabulary"], task["response"], dtype=np.int32),
            log_probs=np.zeros(task["response"], dtype=np.float32),
            response_mask=np.ones(task["response"], dtype=bool),
            label=None,
            prompt_index=number,
            sample_index=0,
            finish_reason="length",
            weight_version=0,
        )
        for number in range(task["rows"])
    ]
    baseline = resident("VmRSS")
    forget_peak()
    built = ReferenceModel(
        task["model"], dtype=task["dtype"], temperature=1.0, max_batch_tokens=task["max_tokens"]
    )
    found = {"baseline": baseline, "loaded": resident("VmRSS") - baseline}
    forget_peak()
    built.log_probs(rollouts)
    return found | {"forward": resident("VmHWM") - baseline}


ROLES = {"learner": learner, "reference": reference}

if __name__ == "__main__":
    task = json.loads(sys.argv[1])
    torch.set_num_threads(2)
    print(json.dumps(ROLES[task.pop("role")](task)))
