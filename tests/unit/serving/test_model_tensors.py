from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Glm4MoeConfig, HrmTextConfig, MixtralConfig

from raypo.models.checkpoint import stored_tensors
from raypo.serving.model_tensors import ModelTensors, as_in_files
from raypo.weights.manifest import Manifest, WeightError
from tests.stand_ins import local_push, pack
from tests.tiny import tiny_policy


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return str(tiny_policy(tmp_path_factory.mktemp("tied")))


@pytest.fixture(scope="module")
def tensors(folder: str) -> dict:
    return dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters())


def manifest(tensors: dict) -> Manifest:
    return local_push(pack(tensors.items(), bucket_bytes=1 << 20), version=4).manifest


def test_a_tied_head_may_come_or_not(folder: str, tensors: dict) -> None:
    known = ModelTensors.of(folder)
    known.check(manifest(tensors))
    assert "lm_head.weight" not in tensors
    head = tensors["model.embed_tokens.weight"]
    known.check(manifest({**tensors, "lm_head.weight": head}))
    with pytest.raises(WeightError, match=r"lm_head.weight has shape \(3, 64\)"):
        known.check(manifest({**tensors, "lm_head.weight": head[:3]}))
    alone = {name: each for name, each in tensors.items() if name != "model.embed_tokens.weight"}
    with pytest.raises(WeightError, match=r"embed_tokens.weight is missing"):
        known.check(manifest({**alone, "lm_head.weight": head}))


def test_buffers_of_the_files_belong_to_a_push(tmp_path: Path) -> None:
    Glm4MoeConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        n_routed_experts=4,
    ).save_pretrained(tmp_path)
    known = ModelTensors.of(str(tmp_path))
    assert known.required["model.layers.1.mlp.gate.e_score_correction_bias"] == (4,)
    assert not known.optional


def test_an_engine_loads_the_tensors_of_the_models_files(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 1}
    heads: dict[str, Any] = {
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "num_local_experts": 2,
    }
    model = AutoModelForCausalLM.from_config(MixtralConfig(**sizes, **heads, vocab_size=16))
    model.save_pretrained(tmp_path)
    conversions = pickle.loads(pickle.dumps(ModelTensors.of(str(tmp_path)).conversions))
    loaded = dict(as_in_files(conversions, stored_tensors(model)))
    files = load_file(tmp_path / "model.safetensors")
    assert loaded.keys() == files.keys()
    assert "model.layers.0.block_sparse_moe.experts.1.w2.weight" in files
    assert all(torch.equal(loaded[name], tensor) for name, tensor in files.items())


def test_tensors_that_files_have_in_one_keep_their_names(tmp_path: Path) -> None:
    HrmTextConfig(hidden_size=32, num_attention_heads=2, num_hidden_layers=1).save_pretrained(
        tmp_path
    )
    assert ModelTensors.of(str(tmp_path)).conversions is None


def test_every_mistake_is_named(folder: str, tensors: dict) -> None:
    wrong = dict(tensors)
    wrong["model.extra.weight"] = wrong.pop("model.layers.1.self_attn.k_proj.weight")
    wrong["model.norm.weight"] = wrong["model.norm.weight"][:3]

    with pytest.raises(WeightError) as refused:
        ModelTensors.of(folder).check(manifest(wrong))

    assert str(refused.value).startswith("the weights of version 4 are not those of")
    assert "model.layers.1.self_attn.k_proj.weight is missing" in str(refused.value)
    assert "model.extra.weight is unknown" in str(refused.value)
    assert "model.norm.weight has shape (3,) instead of (64,)" in str(refused.value)
