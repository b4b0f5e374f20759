"""Patterns, folders of save_to_disk, several sources, and a system prompt before the messages."""

import json
from pathlib import Path

import pytest
from datasets import Dataset, DatasetDict

from raypo.config import ResponsesSection, SourceEntry
from raypo.data.examples import load_examples
from raypo.data.prompts import load_prompts
from raypo.data.rows import read_rows
from tests.tiny import CHAT_TEMPLATE
from tests.unit.data.prompt_files import CHAT, ROWS, peek, refused, save_to_disk, section, write

NUMBERED = [{"prompt": f"{number}+1=", "answer": str(number + 1)} for number in range(7)]


def texts(loaded):
    return [prompt.text for prompt in loaded.prompts]


# Patterns


def test_a_pattern_names_its_files_in_the_order_of_their_names(tmp_path, tokenizer):
    for name in ("b.jsonl", "a.jsonl", "c.csv"):
        write(tmp_path / name, [{"prompt": name}])
    (tmp_path / "d.jsonl").mkdir()
    assert texts(load_prompts(section(f"{tmp_path}/*.jsonl"), tokenizer)) == ["a.jsonl", "b.jsonl"]
    assert peek(f"{tmp_path}/[ab].jsonl") == 2


def test_a_pattern_that_nothing_matches_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert refused(peek, "data/*.jsonl") == (
        f"data.prompts (data/*.jsonl): no file matches this pattern in {tmp_path}. Correct it."
    )


def test_every_file_that_matches_must_be_of_a_known_kind(tmp_path):
    write(tmp_path / "a.jsonl", ROWS)
    (tmp_path / "b.txt").write_text("no rows")
    told = refused(peek, f"{tmp_path}/*")
    assert told.startswith(f"data.prompts ({tmp_path}/b.txt): .txt is not a file type")


def test_a_file_whose_name_looks_like_a_pattern_is_that_file(tmp_path):
    assert peek(write(tmp_path / "part[1].jsonl", ROWS)) == 2


def test_a_pattern_may_stand_in_a_uri(tmp_path):
    for name in ("b.jsonl", "a.jsonl", "c.csv"):
        write(tmp_path / name, [{"prompt": name}])
    rows = read_rows(f"file://{tmp_path}/*.jsonl", key="data.prompts")
    assert [row.values["prompt"] for row in rows] == ["a.jsonl", "b.jsonl"]
    told = refused(list, read_rows(f"file://{tmp_path}/*.json", key="eval.prompts"))
    assert told == f"eval.prompts (file://{tmp_path}/*.json): no file matches this pattern. " + (
        "Correct it."
    )


# Folders of save_to_disk


@pytest.mark.parametrize("files", [1, 3])
def test_a_saved_folder_is_read_in_order_and_at_any_place(tmp_path, tokenizer, files):
    folder = save_to_disk(tmp_path / "set", NUMBERED, files=files)
    loaded = load_prompts(section(folder, label_key="answer"), tokenizer)
    assert texts(loaded) == [row["prompt"] for row in NUMBERED]
    assert [loaded.prompts[place].label for place in (6, 0, 3)] == ["7", "1", "4"]
    assert loaded.prompts[4].index == 4
    assert loaded.prompts[4].token_ids.tolist() == tokenizer("4+1=")["input_ids"]
    assert peek(folder, "prompt", "answer") == 7


def test_of_several_splits_one_is_named(tmp_path, tokenizer):
    sets = {split: Dataset.from_list([{"prompt": split}]) for split in ("train", "test")}
    DatasetDict(**sets).save_to_disk(tmp_path / "set")
    path = str(tmp_path / "set")
    assert texts(load_prompts(section(path), tokenizer)) == ["train"]
    assert texts(load_prompts(section(SourceEntry(path=path, split="test")), tokenizer)) == ["test"]
    assert refused(peek, SourceEntry(path=path, split="valid")) == (
        f"data.prompts ({path}, valid): the folder has no split valid. It has train, test. Set "
        f"data.prompts={{path: {path}, split: train}}."
    )


def test_a_folder_of_one_data_set_has_no_splits(tmp_path):
    entry = SourceEntry(path=save_to_disk(tmp_path / "set", ROWS), split="test")
    assert refused(peek, entry).endswith(
        "a folder written by save_to_disk has no configurations, and this one has no splits. "
        "Remove what it does not have."
    )


@pytest.mark.parametrize("content", [b"", b"no arrow at all"])
def test_a_saved_folder_that_is_broken_is_named(tmp_path, content):
    path = save_to_disk(tmp_path / "set", ROWS)
    (Path(path) / "data-00000-of-00001.arrow").write_bytes(content)
    told = refused(peek, path)
    assert told.startswith(f"data.prompts ({path}): cannot be read: ")
    assert told.endswith(" Save it again.")


def test_a_saved_folder_needs_the_package(tmp_path, monkeypatch):
    path = save_to_disk(tmp_path / "set", ROWS)
    monkeypatch.setattr("raypo.data.rows.find_spec", lambda name: None)
    assert refused(peek, path) == (
        f"data.prompts ({path}): a folder of save_to_disk needs the package datasets. pip install "
        "datasets on every node."
    )


# Several sources


def test_rows_of_all_sources_are_counted_on_and_know_their_source(tmp_path, tokenizer):
    folder = save_to_disk(tmp_path / "numbers", NUMBERED[:3])
    file = write(tmp_path / "sums.jsonl", ROWS)
    entry = SourceEntry(path=file, name="more")
    loaded = load_prompts(section(folder, entry), tokenizer)
    assert loaded.sizes == (3, 2)
    assert [(p.index, p.data_source) for p in loaded.prompts] == [
        (0, "numbers"), (1, "numbers"), (2, "numbers"), (3, "more"), (4, "more"),
    ]  # fmt: skip
    with pytest.raises(IndexError):
        loaded.prompts[5]


# A system prompt


@pytest.fixture
def chat_tokenizer(tokenizer):
    tokenizer.chat_template = CHAT_TEMPLATE
    yield tokenizer
    tokenizer.chat_template = None


def test_a_system_prompt_stands_before_the_messages(tmp_path, chat_tokenizer):
    path = write(tmp_path / "a.jsonl", [{"prompt": CHAT}])
    (prompt,) = load_prompts(section(path, system_prompt="Be brief."), chat_tokenizer).prompts
    system = {"role": "system", "content": "Be brief."}
    assert prompt.messages == [system, *CHAT]
    assert prompt.text == chat_tokenizer.apply_chat_template(
        [system, *CHAT], add_generation_prompt=True, tokenize=False
    )


@pytest.mark.parametrize("messages_key", [None, "prompt"])
def test_examples_and_conversations_have_it_too(tmp_path, chat_tokenizer, messages_key):
    talk = [*CHAT, {"role": "assistant", "content": "ho"}]
    row = {"prompt": talk if messages_key else CHAT, "response": "ho"}
    path = write(tmp_path / "a.jsonl", [row])
    values = {"prompts": path, "messages_key": messages_key, "system_prompt": "Be brief."}
    (item,) = load_examples(ResponsesSection.model_validate(values), chat_tokenizer, (1,)).items
    assert chat_tokenizer.decode(item.prompt_ids).startswith(
        chat_tokenizer.apply_chat_template(
            [{"role": "system", "content": "Be brief."}], tokenize=False
        )
    )


@pytest.mark.parametrize(
    ("prompt", "told"),
    [
        ("1+1=", "has a text in data.prompt_key (prompt), to which no chat template applies. Set "
            "data.as_chat: true, then the text is a user message, or remove data.system_prompt."),
        ([{"role": "system", "content": "x"}, *CHAT], "has its own system message in "
            "data.prompt_key (prompt). Remove it there, or remove data.system_prompt."),
    ],
)  # fmt: skip
@pytest.mark.parametrize("how", ["peek", "load"])
def test_a_system_prompt_has_its_place_or_is_refused(tmp_path, chat_tokenizer, prompt, told, how):
    path = write(tmp_path / "a.jsonl", [{"prompt": prompt}])
    expected = f"data.system_prompt ('Be brief.'): {path}:1 {told}"
    if how == "peek":
        assert refused(peek, path, system_prompt="Be brief.") == expected
    else:
        given = section(path, system_prompt="Be brief.")
        assert refused(load_prompts, given, chat_tokenizer) == expected
    assert json.loads((tmp_path / "a.jsonl").read_text())["prompt"] == prompt
