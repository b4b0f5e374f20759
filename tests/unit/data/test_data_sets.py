"""A Hugging Face data set made on disk, read by the real package where it is installed."""

import json

import pytest

from raypo.config import SourceEntry
from raypo.data.prompts import load_prompts
from tests.unit.data.prompt_files import refused, section

pytest.importorskip("datasets", reason="the package datasets is optional")

CARD = """---
configs:
- config_name: main
  data_files:
  - {split: train, path: main_train.jsonl}
  - {split: test, path: main_test.jsonl}
- config_name: socratic
  data_files: [{split: train, path: socratic.jsonl}]
---
"""


@pytest.fixture
def data_set(tmp_path, monkeypatch):
    """A folder with two configurations; the prompts of each file have its name."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "README.md").write_text(CARD)
    for name in ("main_train", "main_test", "socratic"):
        rows = [{"prompt": f"{name} {number}"} for number in range(3)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder)


@pytest.mark.parametrize(
    ("config", "split", "texts"),
    [
        ("main", "train", ["main_train 0", "main_train 1", "main_train 2"]),
        ("main", "test[:1]", ["main_test 0"]),
        ("main", "train[2:]+test[:1]", ["main_train 2", "main_test 0"]),
        ("socratic", "train", ["socratic 0", "socratic 1", "socratic 2"]),
    ],
)
def test_configuration_and_split_are_those_of_load_dataset(
    data_set, tokenizer, config, split, texts
):
    entry = SourceEntry(path=data_set, config=config, split=split)
    loaded = load_prompts(section(entry), tokenizer)
    assert [prompt.text for prompt in loaded.prompts] == texts


@pytest.mark.parametrize(
    ("config", "split", "known"), [("mian", "train", "socratic"), ("main", "valid", "test")]
)
def test_what_a_data_set_lacks_is_told_with_what_it_has(data_set, tokenizer, config, split, known):
    entry = SourceEntry(path=data_set, config=config, split=split)
    told = refused(load_prompts, section(entry), tokenizer, key="eval.prompts")
    assert told.startswith(
        f"eval.prompts ({data_set}, {config}, {split}): this Hugging Face data set cannot be loaded"
    )
    assert known in told
    assert told.endswith("Correct its path, config or split.")
