"""vLLM and DeepSpeed on one GPU, colocated: pushes agree, runs finish, in float32 and bfloat16."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.gpu.needs import needs_gpus
from tests.integration.task import read_metrics, write_task
from tests.tiny import tiny_policy

pytestmark = needs_gpus(1)

MAX_GAP = {"float32": 1e-3, "bfloat16": 0.15}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_after_a_large_change_the_engine_samples_under_the_pushed_weights(
    tmp_path: Path, dtype: str
):
    from transformers import AutoModelForCausalLM

    from raypo.config import EngineSection
    from raypo.models.loading import DTYPES
    from raypo.models.token_log_probs import response_log_probs
    from raypo.serving.engine import Engine
    from raypo.serving.requests import SamplingRequest
    from raypo.weights.buckets import pack
    from raypo.weights.transport import LocalTransport

    folder = str(tiny_policy(tmp_path))
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[dtype])
    model.cuda()
    generator = torch.Generator("cuda").manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, device="cuda")
            parameter += (0.05 * parameter.std() * noise).to(parameter.dtype)
    engine = Engine(
        folder, section=EngineSection(gpu_memory_fraction=0.2), dtype=dtype, max_model_len=64
    )
    named = model.named_parameters(remove_duplicate=False)
    engine.load_weights(LocalTransport().send(pack(named, bucket_bytes=2**20), version=1))
    prompt = np.arange(4, 12, dtype=np.int32)
    (answer,) = engine.generate([SamplingRequest(prompt, 16, temperature=1.0)])
    ids = torch.from_numpy(answer.token_ids.astype(np.int64)).cuda()[None]
    prompt_ids = torch.from_numpy(prompt.astype(np.int64)).cuda()[None]
    log_probs, _ = response_log_probs(
        model,
        prompt_ids,
        torch.ones_like(prompt_ids, dtype=torch.bool),
        ids,
        torch.ones_like(ids, dtype=torch.bool),
        temperature=1.0,
    )
    gap = np.abs(log_probs[0].detach().cpu().numpy() - answer.log_probs)
    assert (gap.max() if dtype == "float32" else gap.mean()) < MAX_GAP[dtype]
    engine.shutdown()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("zero_stage", [2, 3])
def test_a_colocated_run_finishes_and_stays_in_agreement(
    tmp_path: Path, dtype: str, zero_stage: int
):
    from raypo import PPOConfig, PPOTrainer

    config = write_task(tmp_path)
    overrides = {
        "num_steps": 2,
        "model.dtype": dtype,
        "learner.use_gpu": True,
        "learner.zero_stage": zero_stage,
        "rollout.engine.gpu_memory_fraction": 0.3,
    }
    result = PPOTrainer(PPOConfig.load(config, overrides)).fit()
    assert result.return_value == {"status": "finished", "step": 2}
    rows = read_metrics(tmp_path / "runs" / "tiny")
    assert all(row["mismatch/probe_gap_mean"] < MAX_GAP[dtype] for row in rows)
    assert all(row["ppo/skipped_updates"] == 0 for row in rows)
