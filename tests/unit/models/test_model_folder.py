"""Files beside a model's weights: read and saved once at the start, written at the export."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, GenerationConfig, GPT2Config, GPT2LMHeadModel

from raypo.config import ConfigError
from raypo.models.loading import load_causal_lm, load_tokenizer, stop_token_ids
from raypo.models.model_folder import COPIED, check_saveable
from tests.tiny import tiny_policy

UNSAVED: list[dict[str, Any]] = [
    {"early_stopping": True},
    {"use_cache": False, "cache_implementation": "static"},
    {"pad_token_id": -1},
    {"temperature": 0.6, "top_p": 0.9, "top_h": 0.3, "eta_cutoff": 0.1, "length_penalty": 2.0},
    {"output_scores": True},
]
"""Generation configs that transformers loads, and does not save."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_policy(tmp_path / "model")


def change(file: Path, values: dict[str, Any]) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


@pytest.mark.parametrize("values", UNSAVED, ids=str)
def test_a_generation_config_that_is_not_saved_is_mended_in_the_copy(
    folder: Path, values: dict[str, Any], tmp_path: Path
):
    change(folder / "generation_config.json", values)
    with pytest.raises(ValueError, match="is invalid"):
        GenerationConfig.from_pretrained(folder).save_pretrained(tmp_path)
    wrong = {name: value for name, value in values.items() if name != "use_cache"}
    with pytest.warns(UserWarning, match=r"model\.policy .*: exports leave out ") as told:
        check_saveable("model.policy", str(folder), load_tokenizer(str(folder)))
    for name, value in wrong.items():
        assert f"{name} ({value})" in str(told[0].message)

    model = load_causal_lm(str(folder), dtype="float32")
    assert model.raypo_folder.left_out == wrong
    model.raypo_folder.for_saving(model).save_pretrained(tmp_path / "out")
    saved = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert saved["eos_token_id"] == 2
    assert not wrong.items() & saved.items()


def test_settings_of_generation_in_config_json_do_not_end_an_export(folder: Path, tmp_path: Path):
    change(folder / "config.json", {"pad_token_id": -1})
    (folder / "generation_config.json").unlink()
    model = load_causal_lm(str(folder), dtype="float32")
    model.raypo_folder.for_saving(model).save_pretrained(tmp_path / "out")
    assert model.raypo_folder.left_out == {"pad_token_id": -1}


def test_a_generation_config_that_cannot_be_read_is_named(folder: Path):
    change(folder / "generation_config.json", {"max_new_tokens": 0})
    with pytest.raises(ConfigError, match=r"generation_config\.json: `max_new_tokens`"):
        stop_token_ids(str(folder), load_tokenizer(str(folder)))


def test_a_tokenizer_that_cannot_be_saved_is_refused_at_the_start(folder: Path):
    tokenizer = load_tokenizer(str(folder))
    tokenizer.init_kwargs["extra"] = object()  # no JSON
    with pytest.raises(ConfigError, match=r"model\.policy .*: its tokenizer cannot be saved again"):
        check_saveable("model.policy", str(folder), tokenizer)


def test_the_exports_dropout_is_the_bases(tmp_path: Path):
    config = GPT2Config(vocab_size=40, n_embd=32, n_layer=1, n_head=2, resid_pdrop=0.3)
    config.bos_token_id = config.eos_token_id = 0
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "base")
    model = load_causal_lm(str(tmp_path / "base"), dtype="float32")
    assert model.config.resid_pdrop == model.transformer.h[0].mlp.dropout.p == 0.0
    saving = model.raypo_folder.for_saving(model)
    assert model.config.resid_pdrop == 0.0, "a pass beside the saving reads it"
    saving.save_pretrained(tmp_path / "out")
    saved = AutoConfig.from_pretrained(tmp_path / "out")
    assert (saved.resid_pdrop, saved.attn_pdrop) == (0.3, 0.1)
    assert model.config.resid_pdrop == 0.0


def test_the_files_of_a_processor_come_along(folder: Path, tmp_path: Path):
    for name in COPIED:
        (folder / name).write_text(json.dumps({"of": name}))
    model = load_causal_lm(str(folder), dtype="float32")
    for name in COPIED:  # the base may be gone when the run ends
        (folder / name).unlink()
    model.raypo_folder.write_others(tmp_path)
    assert {path.name for path in tmp_path.glob("*.json")} == set(COPIED)
    assert json.loads((tmp_path / COPIED[0]).read_text()) == {"of": COPIED[0]}
