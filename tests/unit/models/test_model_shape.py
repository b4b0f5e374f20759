import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen3Config,
)

from raypo.config import ConfigError
from raypo.models.model_shape import ModelShape, from_config
from tests.tiny import tiny_experts, tiny_policy

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
CONFIGS = [
    LlamaConfig(**SIZES, tie_word_embeddings=True),
    LlamaConfig(**SIZES, tie_word_embeddings=False, head_dim=32),
    Qwen2Config(**SIZES, tie_word_embeddings=True),
    Qwen3Config(**SIZES, tie_word_embeddings=False, head_dim=32),
    MixtralConfig(**SIZES, num_local_experts=4, tie_word_embeddings=False),
    GPT2Config(vocab_size=96, n_embd=64, n_layer=3, n_head=4, n_positions=128),
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.model_type)
def test_parameters_computed_from_a_config_are_those_of_the_model(config):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shape = from_config(config.to_dict())

    router = 3 * 64 * 4 if config.model_type == "mixtral" else 0
    assert shape.parameters + router == sum(p.numel() for p in model.parameters())
    experts = 4 * 2 * 160 * 64 if config.model_type == "mixtral" else 0
    assert shape.largest_tensor == max(96 * 64, experts)
    assert not shape.is_exact


def test_parameters_are_counted_in_the_headers_where_weights_are_there(tmp_path: Path):
    folder = tiny_policy(tmp_path, tied=False)
    shape = ModelShape.read(str(folder))

    model = AutoModelForCausalLM.from_pretrained(folder)
    assert shape.is_exact
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    assert shape.backbone_parameters == sum(p.numel() for p in model.model.parameters())
    assert shape.largest_tensor == max(p.numel() for p in model.parameters())


def test_the_experts_of_a_layer_are_one_tensor_in_memory_and_several_in_files(tmp_path: Path):
    folder = tiny_experts(tmp_path, "mixtral")
    shape = ModelShape.read(str(folder))
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert shape.is_exact
    assert shape.largest_tensor == max(p.numel() for p in model.parameters()) == 4 * 2 * 32 * 64


def test_half_a_checkpoint_is_not_counted(tmp_path: Path):
    folder = tiny_policy(tmp_path)
    weights = folder / "model.safetensors"
    whole = ModelShape.read(str(folder))
    weights.write_bytes(weights.read_bytes()[:100])

    shape = ModelShape.read(str(folder))

    assert not shape.is_exact
    assert shape.parameters == whole.parameters


def test_a_config_without_sizes_is_refused(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ConfigError, match=r"model.critic .* its config.json has no hidden_size"):
        ModelShape.read(str(tmp_path), key="model.critic")


def test_keys_and_values_of_a_token(tmp_path: Path):
    shape = ModelShape.read(str(tiny_policy(tmp_path)))
    two_layers_of_two_heads_of_32 = 2 * 2 * 2 * 32
    assert shape.kv_bytes_per_token("float32") == 4 * two_layers_of_two_heads_of_32
    assert shape.kv_bytes_per_token("bfloat16") == 2 * two_layers_of_two_heads_of_32
    for size in (2, 4):  # a head is on one device, or on each
        assert shape.kv_bytes_per_token("float32", tensor_parallel=size) == 4 * 2 * 2 * 32


def test_a_hub_that_is_not_reached_is_asked_once_and_not_blamed_on_the_id(
    monkeypatch: pytest.MonkeyPatch,
):
    """Huggingface_hub itself repeats the request for 23 s."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:1")
    started = time.monotonic()
    with pytest.raises(ConfigError) as error:
        ModelShape.read("organisation/model")
    said = str(error.value)
    assert said.startswith(
        "model.policy (organisation/model): there is no such folder, and the hub"
    )
    assert "correct the hub id" not in said
    assert time.monotonic() - started < 10.0
