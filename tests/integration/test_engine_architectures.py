"""Models whose tensors vLLM names or packs in ways of their own: biases, heads, buffers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    ApertusConfig,
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma4TextConfig,
    Glm4MoeConfig,
    LlamaConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen2Config,
)

from raypo.config import EngineSection
from raypo.models.checkpoint import stored_tensors
from raypo.serving.engine import Engine
from raypo.serving.requests import SamplingRequest
from tests.stand_ins import generate, local_push, pack

SIZES: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "initializer_range": 0.1,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
UNTIED: dict[str, Any] = SIZES | {"tie_word_embeddings": False}
EXPERTS: dict[str, Any] = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 2,
}
GEMMA_4: dict[str, Any] = UNTIED | {
    "head_dim": 32,
    "global_head_dim": 32,
    "vocab_size_per_layer_input": 100,
    "hidden_size_per_layer_input": 32,
}
CONFIGS = {
    "llama: a head of its own": LlamaConfig(**UNTIED),
    "qwen2: biases": Qwen2Config(**SIZES),
    "gemma2: the embedding is the head": Gemma2Config(**SIZES, query_pre_attn_scalar=32),
    "apertus: buffers in the activation": ApertusConfig(**UNTIED),
    "gemma4: buffers that scale the layers": Gemma4TextConfig(**GEMMA_4),
    "glm4_moe: a buffer in the router": Glm4MoeConfig(**UNTIED | EXPERTS),
    "mixtral: single experts in files": MixtralConfig(**UNTIED, num_local_experts=4),
}
PROMPTS = [np.arange(3, 40, dtype=np.int32), np.array([5], dtype=np.int32)]


@pytest.mark.parametrize("config", CONFIGS.values(), ids=list(CONFIGS))
def test_engine_and_learner_agree_after_a_large_change(tmp_path, config: PretrainedConfig) -> None:
    torch.manual_seed(0)
    learner = AutoModelForCausalLM.from_config(config).eval()
    learner.save_pretrained(tmp_path)
    engine = Engine(
        str(tmp_path),
        section=EngineSection(kv_cache_gb=0.1),
        dtype="float32",
        max_model_len=128,
    )
    try:
        for version in (1, 2):
            buckets = pack(stored_tensors(learner), bucket_bytes=1 << 20)
            engine.load_weights(local_push(buckets, version=version))
            requests = [SamplingRequest(ids, 30, temperature=1.0) for ids in PROMPTS]
            completions = generate(engine, requests)
            for prompt, completion in zip(PROMPTS, completions, strict=True):
                ids = torch.from_numpy(np.concatenate([prompt, completion.token_ids])).long()
                with torch.no_grad():
                    log_p = learner(ids[None]).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
                log_probs = log_p.gather(-1, ids[len(prompt) :, None])[:, 0].numpy()
                # vLLM rounds the activation's scalars of Apertus to bfloat16.
                most = 1e-2 if config.model_type == "apertus" else 1e-3
                assert np.abs(log_probs - completion.log_probs).max() < most
            with torch.no_grad():
                for _, tensor in stored_tensors(learner):  # buffers, too
                    tensor.add_(torch.rand_like(tensor) * 0.02 - 0.01)
    finally:
        engine.shutdown()


def test_models_that_vllm_runs_by_its_transformers_backend_take_pushes():
    """ctrl has a tied head with a bias, and dots1 has modules at several paths."""
    command = [sys.executable, "-m", "tests.every_engine", "ctrl", "dots1"]
    repository = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=True)
    assert [line.split("\t")[1] for line in done.stdout.splitlines()] == ["holds"] * 2, done.stdout
