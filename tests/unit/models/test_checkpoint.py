"""Weights that are missing, foreign or damaged, and the sentence that a user gets for each."""

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForMaskedLM,
    CodeGenConfig,
    GPT2Config,
    GPTJConfig,
    GPTNeoConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    MixtralConfig,
    MixtralForCausalLM,
    PretrainedConfig,
)

from raypo.config import ConfigError
from raypo.models.checkpoint import check_weights
from raypo.models.critic import Critic, CriticStart
from raypo.models.loading import load_backbone, load_causal_lm, load_reward_model
from raypo.models.model_files import stored_files, weight_files

SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
HIDDEN = SIZES["hidden_size"]
Change = Callable[[dict[str, Tensor]], dict[str, Tensor]]


def saved(folder: Path, kind: Any = LlamaForCausalLM, **values: Any) -> Path:
    """A tiny Llama's folder."""
    torch.manual_seed(0)
    kind(LlamaConfig(**{**SIZES, "num_labels": 1, **values})).save_pretrained(folder)
    return folder


def changed(folder: Path, change: Change) -> str:
    """The folder, other weights in its file."""
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})
    return str(folder)


def with_prefix(prefix: str) -> Change:
    return lambda weights: {f"{prefix}{name}": each for name, each in weights.items()}


def with_head(name: str, *shape: int) -> Change:
    return lambda weights: {**weights, name: torch.ones(shape)}


def without(word: str) -> Change:
    return lambda weights: {name: each for name, each in weights.items() if word not in name}


def as_policy(path: str) -> Any:
    check_weights("model.policy", path, AutoModelForCausalLM)
    return load_causal_lm(path, dtype="float32")


def as_reward_model(path: str) -> Any:
    check_weights("model.reward", path, AutoModelForSequenceClassification)
    return load_reward_model(path, dtype="float32")


def as_new_reward_model(path: str) -> Any:
    check_weights("model.policy", path, AutoModelForSequenceClassification, new_head=True)
    return load_reward_model(path, dtype="float32", new_head=True)


def as_critic(path: str) -> Any:
    check_weights("model.critic", path, AutoModel)
    return load_backbone(path, dtype="float32")


ROLES = (as_policy, as_reward_model, as_new_reward_model, as_critic)


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("prefix", ["module.", "_orig_mod."])
def test_names_of_a_wrapper_are_refused_for_every_role(tmp_path: Path, role: Any, prefix: str):
    path = changed(saved(tmp_path), with_prefix(prefix))
    with pytest.raises(ConfigError, match=rf'which would start at random.* take "{prefix}" off'):
        role(path)


@pytest.mark.parametrize("role", ROLES)
def test_a_single_missing_weight_is_refused_for_every_role(tmp_path: Path, role: Any):
    path = changed(saved(tmp_path), without("layers.1.self_attn.k_proj"))
    with pytest.raises(ConfigError, match=r"lack .*layers\.1\.self_attn\.k_proj\.weight"):
        role(path)


@pytest.mark.parametrize("read", [load_causal_lm, load_reward_model, load_backbone])
def test_loading_alone_refuses_too(tmp_path: Path, read: Any):
    """Headers of hub ids are not read before the start."""
    path = changed(saved(tmp_path), without("layers.1.mlp"))
    with pytest.raises(ConfigError, match=r"lack .*layers\.1\.mlp\.down_proj\.weight"):
        read(path, dtype="float32")


def test_a_causal_language_model_judges_nothing(tmp_path: Path):
    path = str(saved(tmp_path))
    with pytest.raises(ConfigError) as caught:
        check_weights("model.reward", path, AutoModelForSequenceClassification)
    assert str(caught.value).startswith(
        f"model.reward ({path}), read as LlamaForSequenceClassification: its files lack "
        f"score.weight, which would start at random"
    )
    assert "recipe reward_model" in str(caught.value)
    start = CriticStart(path, reward_weight=1.0)
    with pytest.raises(ConfigError, match=r"lack score\.weight"):
        Critic.load(start, dtype="float32")  # it said "score head included"
    assert as_new_reward_model(path).score.weight.shape == (1, HIDDEN)


@pytest.mark.parametrize(
    "name", ["value_head.weight", "v_head.summary.weight", "rm_head.weight", "reward_head.weight"]
)
def test_heads_of_other_libraries_are_named_with_the_remedy(tmp_path: Path, name: str):
    path = changed(saved(tmp_path), with_head(name, 1, HIDDEN))
    for role in (as_reward_model, as_new_reward_model):
        with pytest.raises(ConfigError, match=rf"{name}, which .* to score\.weight in the fil"):
            role(path)
    for role in (as_policy, as_critic):
        with pytest.raises(ConfigError, match=rf"{name}, which the model does not have.*critic's"):
            role(path)

    def renamed(weights: dict[str, Tensor]) -> dict[str, Tensor]:
        weights["score.weight"] = weights.pop(name)
        return weights

    model = as_reward_model(changed(tmp_path, renamed))
    assert torch.equal(model.score.weight, torch.ones(1, HIDDEN))


def test_the_bias_of_a_score_head_is_to_be_left_out(tmp_path: Path):
    folder = saved(tmp_path, LlamaForSequenceClassification)
    path = changed(folder, with_head("score.bias", 1))
    for role in (as_reward_model, as_new_reward_model):
        with pytest.raises(ConfigError, match=r"score\.bias, which .* Remove score\.bias from"):
            role(path)
    as_reward_model(changed(folder, without("score.bias")))


def test_a_reward_model_is_no_policy_though_its_head_could_be_tied(tmp_path: Path):
    path = str(saved(tmp_path, LlamaForSequenceClassification, tie_word_embeddings=True))
    as_reward_model(path)
    as_critic(path)
    with pytest.raises(
        ConfigError, match=r"score\.weight, which the model does not have.*This is a r"
    ):
        as_policy(path)


def test_weights_that_the_config_leaves_no_place_for_are_refused(tmp_path: Path):
    biased = saved(tmp_path / "biased", attention_bias=True)
    shallow = saved(tmp_path / "shallow")
    for folder, values in (
        (biased, {"attention_bias": False}),
        (shallow, {"num_hidden_layers": 1}),
    ):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | values))
        with pytest.raises(ConfigError, match="which the model does not have"):
            as_policy(str(folder))


def test_another_shape_is_told_with_both(tmp_path: Path):
    path = changed(
        saved(tmp_path), lambda weights: {**weights, "lm_head.weight": torch.ones(48, 16)}
    )
    with pytest.raises(ConfigError, match=r"lm_head\.weight has the shape \[48, 16\].*\[32, 16\]"):
        as_policy(path)
    with pytest.raises(ConfigError, match=r"\[48, 16\].*\[32, 16\]"):
        load_causal_lm(path, dtype="float32")


def test_heads_that_are_tied_in_the_config_alone_are_refused(tmp_path: Path):
    path = saved(tmp_path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    with pytest.raises(ConfigError, match=r"tie_word_embeddings.*lm_head\.weight with other"):
        load_causal_lm(str(path), dtype="float32")


def test_what_is_no_fault_passes(tmp_path: Path):
    """Tied heads, old buffers, new heads, and the experts' names of before."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        as_policy(str(saved(tmp_path / "tied", tie_word_embeddings=True)))
        name = "model.layers.0.self_attn.rotary_emb.inv_freq"
        as_policy(changed(saved(tmp_path / "old"), with_head(name, 4)))
        as_critic(str(tmp_path / "old"))
        BertForMaskedLM(BertConfig(**SIZES)).save_pretrained(tmp_path / "bert")
        as_new_reward_model(str(tmp_path / "bert"))
        config = MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=2)
        MixtralForCausalLM(config).save_pretrained(tmp_path / "mixtral")
        assert any(".experts.1.w3." in each for each in load_file(tmp_path / "mixtral" / WEIGHTS))
        as_policy(str(tmp_path / "mixtral"))


GPT: dict[str, Any] = {
    "vocab_size": 32, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2, "num_labels": 1,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MASK = torch.ones(1, 1, 16, 16, dtype=torch.bool).tril()
SAVED_BUFFERS: dict[str, tuple[PretrainedConfig, dict[str, Tensor]]] = {
    "gpt2": (GPT2Config(**GPT), {"attn.bias": MASK, "attn.masked_bias": torch.tensor(-1e4)}),
    "gpt_neo": (
        GPTNeoConfig(
            vocab_size=32, max_position_embeddings=16, hidden_size=16, num_layers=2, num_heads=2,
            attention_types=[[["global", "local"], 1]], bos_token_id=1,
            eos_token_id=2,
        ),
        {"attn.attention.bias": MASK, "attn.attention.masked_bias": torch.tensor(-1e9)},
    ),
    "gptj": (
        GPTJConfig(**GPT, rotary_dim=4),
        {
            "attn.bias": MASK,
            "attn.masked_bias": torch.tensor(-1e9),
            "attn.embed_positions": torch.ones(16, 4),
        },
    ),
    "codegen": (
        CodeGenConfig(**{**GPT, "n_head": 4}, rotary_dim=4), {"attn.causal_mask": MASK},
    ),
}  # fmt: skip


@pytest.mark.parametrize("prefix", ["transformer.h", "h"])
@pytest.mark.parametrize("name", SAVED_BUFFERS)
def test_constants_that_were_saved_once_are_no_weights(tmp_path: Path, name: str, prefix: str):
    """Fine-tunes of before transformers 4.32 lie on the hub with masks and tables."""
    config, buffers = SAVED_BUFFERS[name]
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)

    def as_it_was_saved(weights: dict[str, Tensor]) -> dict[str, Tensor]:
        if prefix == "h":  # as of the bare network, like openai-community/gpt2
            weights = {n.removeprefix("transformer."): w for n, w in weights.items()}
        old = {f"{prefix}.{n}.{b}": w.clone() for n in range(2) for b, w in buffers.items()}
        return {**weights, **old}

    path = changed(tmp_path, as_it_was_saved)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        as_policy(path)
        as_critic(path)
        if name != "codegen":  # which has no classifier
            as_new_reward_model(path)
    unknown = changed(tmp_path, with_head(f"{prefix}.0.attn.other.bias", 16))
    with pytest.raises(ConfigError, match=r"attn\.other\.bias, which the model does not have"):
        as_policy(unknown)


WEIGHTS = "model.safetensors"


def test_a_part_that_the_network_does_not_have_is_told(tmp_path: Path):
    path = changed(saved(tmp_path), with_head("vision_model.patch.weight", 4, 4))
    with pytest.warns(UserWarning, match=r"LlamaForCausalLM has no vision_model"):
        check_weights("model.policy", path, AutoModelForCausalLM)


def test_an_architecture_without_such_a_network_is_refused(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba", "vocab_size": 32}))
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"no sequence classifier .reward model. .* mamba"):
        load_reward_model(str(tmp_path), dtype="float32")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "none_such"}))
    with pytest.raises(ConfigError, match=r"transformers cannot read its config.json: .*none_such"):
        load_causal_lm(str(tmp_path), dtype="float32")


def test_files_that_are_not_whole_are_named(tmp_path: Path):
    folder = tmp_path / "whole"
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(folder, max_shard_size="8KB")
    shards = weight_files(folder, "model.policy")
    assert len(shards) > 2

    absent = shutil.copytree(folder, tmp_path / "absent")
    (absent / shards[1].name).unlink()
    with pytest.raises(ConfigError, match=rf"names {shards[1].name}, but 1 of its"):
        stored_files(absent, "model.policy")

    cut = shutil.copytree(folder, tmp_path / "cut")
    (cut / shards[0].name).write_bytes(shards[0].read_bytes()[:-9])
    with pytest.raises(ConfigError, match=rf"{shards[0].name} cannot be read.* Copy the"):
        stored_files(cut, "model.policy")

    (cut / shards[0].name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    with pytest.raises(ConfigError, match=rf"{shards[0].name} is a pointer of Git LFS"):
        stored_files(cut, "model.policy")

    for file in (*absent.glob("*.safetensors*"),):
        file.unlink()
    assert stored_files(absent, "model.policy") == []
    with pytest.raises(ConfigError, match=r"no weights: no model.safetensors or .* config.json"):
        check_weights("model.policy", str(absent), AutoModelForCausalLM)


def test_weights_of_pickle_are_checked_as_well(tmp_path: Path):
    folder = saved(tmp_path)
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    as_policy(str(folder))
    torch.save(without("layers.1")(weights), folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"lack model\.layers\.1"):
        check_weights("model.policy", str(folder), AutoModelForCausalLM)


def test_a_reward_model_need_not_say_how_many_labels_it_has(tmp_path: Path):
    """transformers then takes two (OpenRLHF/OpenRLHF#1039)."""
    path = saved(tmp_path, LlamaForSequenceClassification)
    config = json.loads((path / "config.json").read_text())
    for name in ("id2label", "label2id"):
        del config[name]
    (path / "config.json").write_text(json.dumps(config))
    head = load_file(path / WEIGHTS)["score.weight"]
    assert torch.equal(as_reward_model(str(path)).score.weight, head)
    assert torch.equal(as_new_reward_model(str(path)).score.weight, head)  # trained further
    two = changed(path, with_head("score.weight", 2, HIDDEN))
    with pytest.raises(ConfigError, match=r"score\.weight has the shape \[2, 16\].* not \[1, 16\]"):
        as_reward_model(two)
