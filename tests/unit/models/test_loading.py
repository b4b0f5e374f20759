"""What is loaded from a folder: one function, whatever dropout its config asks for."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models
from transformers import (
    AutoModelForCausalLM,
    CTRLConfig,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    OPTConfig,
    PretrainedConfig,
    PreTrainedTokenizerFast,
)

from raypo.config import ConfigError
from raypo.models.loading import (
    check_trainable,
    load_backbone,
    load_causal_lm,
    load_reward_model,
    load_tokenizer,
    stop_token_ids,
)
from raypo.models.model_files import max_positions
from raypo.models.packed_attention import NAME, hidden_states
from raypo.models.packing import pack
from tests.tiny import tiny_policy, tiny_tokenizer

SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
CONFIGS = {
    "opt": OPTConfig(
        **SIZES, ffn_dim=16, word_embed_proj_dim=16, dropout=0.5, attention_dropout=0.5,
        layerdrop=0.5,
    ),
    "llama": LlamaConfig(**SIZES, intermediate_size=16, attention_dropout=0.5),
    "mixtral": MixtralConfig(
        **SIZES, intermediate_size=16, num_key_value_heads=2, num_local_experts=4,
        router_jitter_noise=0.5,
    ),
    "gpt2": GPT2Config(
        vocab_size=32, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0.5, embd_pdrop=0.5,
        attn_pdrop=0.5,
    ),
}  # fmt: skip
IDS = torch.arange(3, 19)[None]


def differs(model) -> bool:
    """Whether two passes in training mode give different numbers."""
    assert model.training
    with torch.no_grad():
        first, second = (model(IDS)[0] for _ in range(2))
    return not torch.equal(first, second)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=list(CONFIGS))
def test_dropout_is_off_in_training_mode_wherever_a_model_keeps_it(
    tmp_path: Path, config: PretrainedConfig
):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).train()
    assert differs(model), "dropout shows nothing: this test neither"
    model.save_pretrained(tmp_path)

    assert not differs(load_causal_lm(str(tmp_path), dtype="float32"))
    assert not differs(load_backbone(str(tmp_path), dtype="float32"))


def test_another_attention_than_our_own_reads_padded_rows_and_says_the_same(tmp_path: Path):
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(CONFIGS["llama"]).save_pretrained(tmp_path)
    auto = load_causal_lm(str(tmp_path), dtype="float32")
    packed = pack([IDS[0, :3].numpy()] * 2, [IDS[0, 3:8].numpy(), IDS[0, 5:6].numpy()])
    with torch.no_grad():
        expected = hidden_states(auto.model, packed)
        for name in ("eager", "sdpa"):
            model = load_causal_lm(str(tmp_path), dtype="float32", attention=name)
            assert model.config._attn_implementation == name
            torch.testing.assert_close(hidden_states(model.model, packed), expected)
    assert auto.config._attn_implementation == NAME


def test_an_attention_that_is_not_installed_is_refused_with_its_key(tmp_path: Path):
    AutoModelForCausalLM.from_config(CONFIGS["llama"]).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"model\.attention \(flash_attention_3\).*to auto"):
        load_causal_lm(str(tmp_path), dtype="bfloat16", attention="flash_attention_3")


@pytest.mark.parametrize("kind", ["mllama", "phimoe", "reformer"])
def test_an_architecture_that_transformers_loads_and_raypo_cannot_train_is_refused(
    kind: str, tmp_path: Path
):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    with pytest.raises(ConfigError, match=f"of the architecture {kind}, and transformers "):
        check_trainable("model.policy", str(tmp_path))


def test_a_classifier_that_would_be_scored_on_padding_is_refused(tmp_path: Path):
    CTRLConfig().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="ctrl read their score from the last token"):
        load_reward_model(str(tmp_path), dtype="float32")


def test_a_model_whose_responses_cannot_end_is_refused(tmp_path: Path):
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))
    with pytest.raises(ConfigError, match=r"model\.policy .* names an end-of-sequence token"):
        stop_token_ids(str(tmp_path), tokenizer)


def test_a_model_with_an_adapter_beside_it_is_refused(tmp_path: Path):
    """Files of hub ids are not read before the start; all its own weights would be frozen."""
    base = AutoModelForCausalLM.from_config(CONFIGS["llama"])
    base.save_pretrained(tmp_path)
    adapted = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"]))
    adapted.save_pretrained(str(tmp_path))
    with pytest.raises(ConfigError, match=r"\): .*an adapter.* Merge it .*merge_and_unload"):
        load_causal_lm(str(tmp_path), dtype="float32")


def test_a_model_with_code_of_its_own_is_refused_without_a_question(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked on the terminal"))
    code = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    values = {"model_type": "own", "auto_map": code}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=r"cannot read its config.json: .* custom code"):
        load_causal_lm(str(tmp_path), dtype="float32")


@pytest.mark.parametrize("dtype", ["float16", "float64", "int8"])
def test_the_dtype_of_the_folder_does_not_matter(tmp_path: Path, dtype: str):
    AutoModelForCausalLM.from_config(CONFIGS["llama"]).save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text()) | {"dtype": dtype}
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert load_causal_lm(str(tmp_path), dtype="float32").dtype == torch.float32


@pytest.mark.parametrize("ids", [[], -1, [2, 999], [2, -1], "2"])
def test_stop_tokens_that_are_no_tokens_are_refused(tmp_path: Path, ids: Any):
    tokenizer = load_tokenizer(str(tiny_tokenizer(tmp_path)))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    with pytest.raises(ConfigError, match=rf"model\.policy \({tmp_path}\): .*eos_token_id"):
        stop_token_ids(str(tmp_path), tokenizer)


def test_every_stop_token_of_the_generation_config_counts(tmp_path: Path):
    tokenizer = load_tokenizer(str(tiny_tokenizer(tmp_path)))
    for given, found in ((1, (1,)), ([2, 1], (2, 1))):
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": given}))
        assert stop_token_ids(str(tmp_path), tokenizer) == found


@pytest.mark.skipif(find_spec("optimum") is not None, reason="optimum is installed")
def test_what_a_quantised_model_needs_is_told(tmp_path: Path):
    AutoModelForCausalLM.from_config(CONFIGS["llama"]).save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    values["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=r"cannot load it: .*optimum.* or give another model"):
        load_causal_lm(str(tmp_path), dtype="float32")


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        {"rope_type": "linear", "factor": 4.0},
    ],
)
def test_scaled_positions_of_a_config_are_read_packed_beyond_the_original_length(
    tmp_path: Path, scaling: dict[str, Any]
):
    """The packed rows of 100 tokens are those of transformers, and the export keeps the scaling."""
    folder = tiny_policy(tmp_path / "policy", max_position_embeddings=32)
    prompt, responses = np.arange(4, 44), [np.arange(10, 70), np.arange(30, 50)]
    plain = load_causal_lm(str(folder), dtype="float32")
    file = folder / "config.json"
    values = json.loads(file.read_text())
    values["rope_parameters"] = {**values["rope_parameters"], **scaling}
    file.write_text(json.dumps(values))
    assert max_positions(values) == 128
    model = load_causal_lm(str(folder), dtype="float32")
    assert model.config._attn_implementation == NAME
    packed = pack([prompt] * 2, responses, with_last=True)
    with torch.no_grad():
        states = hidden_states(model.base_model, packed)
        unscaled = hidden_states(plain.base_model, packed)
    separate = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).base_model
    with torch.no_grad():
        rows = [torch.from_numpy(np.concatenate([prompt, each]))[None] for each in responses]
        expected = torch.cat([separate(row).last_hidden_state[0, 39:] for row in rows])
    torch.testing.assert_close(states, expected, rtol=1e-4, atol=1e-4)
    assert (states - unscaled).abs().max() > 0.01
    model.raypo_folder.for_saving(model).save_pretrained(tmp_path / "export")
    exported = json.loads((tmp_path / "export" / "config.json").read_text())
    assert exported["rope_parameters"] == values["rope_parameters"]
