"""One role of a run in a process of its own, its memory measured: `... memory_probe ROLE CONFIG`.

CONFIG is a whole run config as JSON. Prints a JSON object: resident bytes of this process, and of
those that vLLM starts for several devices, as peaks by phase, with all that a Ray worker imports.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor

from raypo.collectives import Workers
from raypo.config import PPOConfig
from raypo.types import Experience, Rollout
from raypo.weights.bucket_size import BUCKET_BYTES
from raypo.weights.buckets import as_bytes, group_by_size
from raypo.weights.manifest import checksums
from tests.stand_ins import generate, pack

SMALL_BUCKET = 16 * 1024**2
"""Of a push to one process: what lies in the object store is not the engine's."""


def peak() -> int:
    """Resident bytes at the most since `forget_peak`, of each process and summed."""
    return sum(high_water_mark(process.pid) for process in processes())


def high_water_mark(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/{pid}/status has no VmHWM.")


def processes() -> list[psutil.Process]:
    own = psutil.Process()
    return [own, *own.children(recursive=True)]


def forget_peak() -> None:
    for process in processes():
        Path(f"/proc/{process.pid}/clear_refs").write_text("5")


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


def learner(config: PPOConfig) -> dict[str, int]:
    import raypo.recipes.ppo  # noqa: F401
    from raypo.learner.deepspeed_internals import import_deepspeed
    from raypo.learner.learner import Learner

    import_deepspeed()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(LOCAL_RANK="0", RANK="0", WORLD_SIZE="1")
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    built = Learner(
        config.model,
        config.ppo,
        config.learner,
        temperature=1.0,
        max_new_tokens=config.rollout.max_new_tokens,
        num_steps=config.num_steps,
        seed=0,
        workers=Workers(),
    )
    prompt, response = config.data.max_prompt_tokens, config.rollout.max_new_tokens
    batch = experience(config.responses_per_step, prompt, response, vocabulary_of(config))

    def push() -> None:
        for group in group_by_size(built.named_weights(), bucket_bytes=BUCKET_BYTES):
            checksums([as_bytes(tensor) for _, tensor in group])

    found: dict[str, int] = {}
    evaluated, found["evaluate"] = peak_of(lambda: built.with_log_probs_and_values(batch))
    _, found["first_update"] = peak_of(lambda: built.update(evaluated, step=1))
    _, found["update"] = peak_of(lambda: built.update(evaluated, step=2))
    _, found["push"] = peak_of(push)
    dist.destroy_process_group()
    return found


def peak_of(work: Callable[[], Any]) -> tuple[Any, int]:
    forget_peak()
    result = work()
    return result, peak()


def vocabulary_of(config: PPOConfig) -> int:
    return json.loads((Path(config.model.policy) / "config.json").read_text())["vocab_size"]


def rollouts(config: PPOConfig) -> list[Rollout]:
    random = np.random.default_rng(0)
    prompt, response = config.data.max_prompt_tokens, config.rollout.max_new_tokens

    def ids(count: int) -> np.ndarray:
        return random.integers(4, vocabulary_of(config), count, dtype=np.int32)

    return [
        Rollout(
            prompt="",
            response="",
            prompt_ids=ids(prompt),
            response_ids=ids(response),
            log_probs=np.zeros(response, dtype=np.float32),
            response_mask=np.ones(response, dtype=bool),
            label=None,
            prompt_index=number,
            sample_index=0,
            finish_reason="length",
            weight_version=0,
        )
        for number in range(config.responses_per_step)
    ]


def reference(config: PPOConfig) -> dict[str, int]:
    from transformers.models.llama import modeling_llama  # noqa: F401

    from raypo.serving.frozen import ReferenceModel

    given = rollouts(config)
    built = ReferenceModel(
        config.model.policy,
        dtype=config.model.dtype,
        temperature=1.0,
        max_batch_tokens=config.learner.microbatch_tokens,
    )
    return {"score": peak_of(lambda: built.log_probs(given))[1]}


def reward_0(config: PPOConfig) -> dict[str, int]:
    from transformers.models.llama import modeling_llama  # noqa: F401

    from raypo.serving.frozen import RewardModel

    assert config.model.reward is not None
    given = rollouts(config)
    built = RewardModel(
        config.model.reward[0].path,
        policy=config.model.policy,
        dtype=config.model.dtype,
        max_batch_tokens=config.learner.microbatch_tokens,
    )
    return {"score": peak_of(lambda: built.score(given))[1]}


def engine(config: PPOConfig) -> dict[str, int]:
    from raypo.serving.engine import Engine
    from raypo.serving.requests import SamplingRequest
    from raypo.serving.vllm_settings import prepare_environment
    from raypo.weights.manifest import Manifest
    from raypo.weights.messages import PushStart

    prepare_environment(eager=True)
    import vllm  # noqa: F401

    prompt, response = config.data.max_prompt_tokens, config.rollout.max_new_tokens
    built = Engine(
        config.model.policy,
        section=config.rollout.engine,
        dtype=config.model.dtype,
        max_model_len=prompt + response,
    )
    requests = [
        SamplingRequest(each.prompt_ids, response, 1.0, seed=number)
        for number, each in enumerate(rollouts(config))
    ]

    several = config.rollout.engine.tensor_parallel > 1
    bucket_bytes = BUCKET_BYTES if several else SMALL_BUCKET

    def push(version: int) -> None:
        built.begin_push(PushStart(version))
        specs = []
        for bucket in pack(random_weights(config), bucket_bytes=bucket_bytes):
            built.load_bucket(bucket)
            specs += bucket.specs
        built.finish_push(Manifest.of(version, specs))

    found = {"start": peak()}
    push(1)
    _, found["generate"] = peak_of(lambda: generate(built, requests))
    _, found["push"] = peak_of(lambda: push(2))
    return found


def random_weights(config: PPOConfig) -> Iterator[tuple[str, Tensor]]:
    """Of the model's names and shapes; one at a time, so that none stays."""
    with safe_open(Path(config.model.policy) / "model.safetensors", "pt") as file:
        for name in sorted(file.keys()):
            shape = file.get_slice(name).get_shape()
            yield name, torch.randn(shape).to(getattr(torch, config.model.dtype)) * 0.02


ROLES = {"learner": learner, "reference": reference, "reward_0": reward_0, "engine": engine}

if __name__ == "__main__":
    import ray.train.torch  # noqa: F401

    torch.set_num_threads(2)
    print(json.dumps(ROLES[sys.argv[1]](PPOConfig.parse(json.loads(sys.argv[2])))))
