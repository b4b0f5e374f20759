"""What `raypo plan` times on CPUs: models cut as they should be, and rates of a sane size."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma3TextConfig, GPT2Config, LlamaConfig, Qwen3Config

from raypo.config import ModelSection
from raypo.models.flops import Groups
from raypo.models.model_shape import ModelShape
from raypo.models.packed_attention import NAME
from raypo.plan.calibration import _cut, measure
from tests.tiny import tiny_policy

SIZES: dict[str, Any] = {
    "vocab_size": 40_000,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "pad_token_id": 39_999,
}
CONFIGS = [
    LlamaConfig(**SIZES),
    Qwen3Config(**SIZES),
    Gemma3TextConfig(**SIZES),
    GPT2Config(vocab_size=40_000, n_embd=64, n_layer=4, n_head=2, n_positions=64),
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.model_type)
def test_a_cut_model_is_one_of_fewer_layers_and_a_smaller_vocabulary(config: Any, tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    section = ModelSection(policy=str(tmp_path), dtype="float32")
    one, two = (_cut(section, layers) for layers in (1, 2))
    assert one.get_output_embeddings().weight.shape == (1 << 15, 64)
    sizes = [sum(p.numel() for p in model.parameters()) for model in (one, two)]
    whole = config.to_dict() | {"vocab_size": 1 << 15, "pad_token_id": None}
    config = type(config)(**whole)
    with torch.device("meta"):
        model = type(one)(config)
    assert sum(p.numel() for p in model.parameters()) == sizes[0] + 3 * (sizes[1] - sizes[0])
    assert one.config._attn_implementation == NAME


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rates_are_of_a_sane_size(tmp_path: Path, dtype: str):
    folder = str(tiny_policy(tmp_path))
    groups = Groups(2, samples=4, prompt_tokens=8, response_tokens=16)
    section = ModelSection.model_validate({"policy": folder, "dtype": dtype})
    reached = measure(section, ModelShape.read(folder), groups, sequences=8)
    for rate in (reached.forward, reached.update, reached.decode):
        assert 1e6 < rate < 1e13
    assert reached.memory > 1e8
