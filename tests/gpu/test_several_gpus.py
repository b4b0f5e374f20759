"""Across GPUs: stages of ZeRO, IPC of several workers, an engine over two, NCCL to other GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.gpu.needs import needs_gpus
from tests.gpu.test_transports import MAX_GAP, run
from tests.tiny import tiny_policy

pytestmark = needs_gpus(2)

RUNS: dict[str, dict[str, Any]] = {
    "stage 2, an engine beside each worker, by IPC": {
        "learner.num_workers": 2,
        "learner.zero_stage": 2,
        "rollout.engine.transport": "ipc",
    },
    "stage 3, one engine over both workers' GPUs": {
        "learner.num_workers": 2,
        "learner.zero_stage": 3,
        "rollout.engine.tensor_parallel": 2,
    },
    "stage 3, two workers that share the tokens of their rows": {
        "learner.num_workers": 2,
        "learner.zero_stage": 3,
        "learner.sequence_parallel": 2,
    },
    "stage 3, policy and critic on a worker each": {
        "learner.num_workers": 1,
        "learner.critic_workers": 1,
        "learner.zero_stage": 3,
    },
    "an adapter beside its base, of two workers at stage 3": {
        "learner.num_workers": 2,
        "learner.zero_stage": 3,
        "model.lora": {"rank": 4, "push": "adapter"},
        "rollout.engine.transport": "object",  # which the base goes by
    },
    "an engine on a GPU of its own, by NCCL": {
        "placement.mode": {"engine": "dedicated"},
        "rollout.engine.transport": "nccl",
    },
    "the same, sampled ahead and pushed to while it samples": {
        "placement.mode": {"engine": "dedicated"},
        "rollout.engine.transport": "nccl",
        "rollout.mode": "async",
    },
}


@pytest.mark.parametrize("keys", RUNS.values(), ids=list(RUNS))
def test_a_run_agrees(tmp_path: Path, keys: dict[str, Any]):
    run(tmp_path, **keys)


def test_overlapping_the_reduction_of_gradients_changes_no_number(tmp_path: Path):
    """Stage 2 reduces them in streams of its own, while compiled attention computes the next."""
    figures = []
    for name, keys in {
        "one worker": {"learner.num_workers": 1},
        "overlap": {"learner.num_workers": 2},
        "no overlap": {
            "learner.num_workers": 2,
            "learner.deepspeed": {"zero_optimization": {"overlap_comm": False}},
        },
    }.items():
        folder = tmp_path / name.replace(" ", "_")
        folder.mkdir()
        first = run(folder, **{"learner.zero_stage": 2, **keys})[0]
        figures.append([first["ppo/policy_loss"], first["ppo/policy_grad_norm"]])
    one, overlapped, in_order = figures
    assert overlapped == pytest.approx(in_order, rel=1e-3, abs=1e-5)
    assert overlapped == pytest.approx(one, rel=0.05, abs=0.01)  # bfloat16 rounds anew


def test_nccl_reaches_an_engine_on_another_gpu_and_survives_its_replacement(tmp_path: Path):
    import ray
    import torch
    from transformers import AutoModelForCausalLM

    from raypo.collectives import Workers
    from raypo.weight_sync.broadcast import BroadcastTransport
    from tests.integration.plain_handle import plain_client
    from tests.integration.test_engine import (
        MAX_MODEL_LEN,
        PROMPTS,
        SECTION,
        disturb,
        gaps,
        probes,
        weights,
    )
    from tests.slow.test_weight_transports import Replica

    folder = str(tiny_policy(tmp_path))
    learner: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    learner.cuda().eval()
    ray.init(num_gpus=2, include_dashboard=False)
    transport = BroadcastTransport(
        backend="nccl", device="cuda:0", host=ray.util.get_node_ip_address(), timeout_s=60.0
    )
    environment = {"env_vars": {"CUDA_VISIBLE_DEVICES": "1"}}
    try:
        for version in (1, 2):  # the second time to a process that knows nothing of the first
            actor: Any = ray.remote(Replica).options(runtime_env=environment).remote(
                folder, section=SECTION, dtype="bfloat16", max_model_len=MAX_MODEL_LEN
            )  # fmt: skip
            disturb(learner)
            transport.push(
                weights(learner).items,
                plain_client({"engine": actor}),
                version=version,
                workers=Workers(),
            )
            answers = ray.get(actor.generate.remote(probes(PROMPTS, 40)))
            assert gaps(learner, answers).mean() < MAX_GAP
            ray.kill(actor)
    finally:
        ray.shutdown()
