"""Exported folders of learners under real DeepSpeed: every tensor, every file, and their modes."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from raypo.collectives import Workers
from raypo.config import PolicyLoraSection
from raypo.learner import export
from raypo.learner.export import WHOLE
from raypo.models.loading import load_causal_lm, load_tokenizer
from tests.every_model import CAUSAL, CLASSIFIER, MULTIMODAL, NoTokenizer, build, check, train
from tests.integration.learning import learner, save_state
from tests.tiny import tiny_policy

pytestmark = [pytest.mark.usefixtures("group"), pytest.mark.filterwarnings("ignore")]
FEW = [
    *((CAUSAL, name) for name in ("llama", "gemma", "deepseek_v3", "glm4_moe", "apertus")),
    (CLASSIFIER, "qwen3"),
    (MULTIMODAL, "gemma4"),
]
"""A few of the architectures; tests/slow/test_every_model.py has all."""


@pytest.fixture
def umask() -> Iterator[int]:
    before = os.umask(0o027)
    yield 0o666 & ~0o027
    os.umask(before)


@pytest.mark.parametrize(("kind", "architecture"), FEW)
def test_trained_and_exported_it_is_the_same_for_transformers(
    kind: str, architecture: str, tmp_path: Path
):
    check(kind, architecture, tmp_path)


def test_a_tied_head_is_written_once_and_every_file_follows_the_umask(tmp_path: Path, umask: int):
    model = str(tiny_policy(tmp_path / "base"))
    trained = learner(model, stage=0, lora=PolicyLoraSection(rank=2))
    tokenizer = load_tokenizer(model)
    trained.policy_export(tokenizer).save(tmp_path / "policy", Workers())
    trained.critic_export(tokenizer).save(tmp_path / "critic", Workers())
    trained.adapter_export().save(tmp_path / "adapter", Workers())
    (tmp_path / "state").mkdir()
    save_state(trained, tmp_path / "state")
    assert "lm_head.weight" not in load_file(tmp_path / "policy" / WHOLE)
    files = [
        path
        for folder in ("policy", "critic", "adapter", "state")
        for path in (tmp_path / folder).iterdir()
    ]
    assert len(files) > 12
    assert {path.name: path.stat().st_mode & 0o777 for path in files} == {
        path.name: umask for path in files
    }


def test_experts_larger_than_two_shards_are_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    built = build(CAUSAL, "qwen3_moe", tmp_path / "base")
    experts = built.model.layers[0].mlp.experts.gate_up_proj
    monkeypatch.setattr(export, "SHARD_BYTES", experts.nbytes // 3)
    trained = train(CAUSAL, tmp_path / "base")
    trained.model_export(NoTokenizer()).save(tmp_path / "out", Workers())
    places = json.loads((tmp_path / "out" / f"{WHOLE}.index.json").read_text())["weight_map"]
    assert len(set(places.values())) > 3
    for name, file in places.items():
        with safe_open(tmp_path / "out" / file, framework="pt") as tensors:
            assert name in tensors.keys()  # noqa: SIM118
    again = load_causal_lm(str(tmp_path / "out"), dtype="float32")
    for name, tensor in trained.task.network.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


def test_a_buffer_that_a_pass_changed_is_saved_and_restored(tmp_path: Path):
    build(CAUSAL, "deepseek_v3", tmp_path / "base")
    trained, restored = (train(CAUSAL, tmp_path / "base") for _ in range(2))
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    trained.task.network.get_buffer(name).add_(1.0)
    save_state(trained, tmp_path)
    own: Any = restored.task.network.get_buffer(name)
    assert not torch.equal(own, trained.task.network.get_buffer(name))
    restored.restore(tmp_path)
    assert torch.equal(own, trained.task.network.get_buffer(name))
    assert torch.equal(dict(trained.named_weights())[name], own)
