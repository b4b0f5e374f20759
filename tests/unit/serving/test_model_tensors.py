from __future__ import annotations

import pytest
from transformers import AutoModelForCausalLM

from raypo.serving.model_tensors import ModelTensors
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
