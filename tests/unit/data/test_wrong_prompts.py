"""Either way a file is looked at, it says the same of what is wrong with it."""

import sys
from types import ModuleType

import pytest

from raypo.config import SourceEntry
from raypo.data.prompts import load_prompts
from tests.unit.data.prompt_files import ROWS, peek, refused, section, write


@pytest.fixture(params=["peek", "load"])
def check(request, tokenizer):
    """How many prompts there are, either way a file is looked at: (path, prompt_key, label_key)."""

    def load(path, prompt_key="prompt", label_key=None):
        columns = section(path, prompt_key=prompt_key, label_key=label_key)
        return len(load_prompts(columns, tokenizer).prompts)

    return peek if request.param == "peek" else load


def test_a_missing_file(tmp_path, check):
    path = tmp_path / "none.jsonl"
    assert refused(check, str(path)) == (
        f"data.prompts ({path}): there is no such file in {tmp_path}."
    )


@pytest.mark.parametrize("path", ["data/train.parquet", "train.jsonl", "t.PARQUET"])
def test_a_missing_file_with_a_relative_path_is_no_data_set(path, check):
    assert refused(check, path).startswith(f"data.prompts ({path}): there is no such file")


def test_a_folder(tmp_path, check):
    assert refused(check, str(tmp_path)) == (
        f"data.prompts ({tmp_path}): this is a folder. Name the files in it (jsonl, json, "
        f"parquet, csv), or all files of one kind with a pattern like {tmp_path}/*.jsonl."
    )


@pytest.mark.parametrize("name", ["prompts.txt", "prompts.tsv"])
def test_an_unknown_kind_of_file(tmp_path, monkeypatch, check, name):
    monkeypatch.chdir(tmp_path)
    assert refused(check, name) == (
        f"data.prompts ({name}): {name[-4:]} is not a file type that raypo reads. Give a file "
        "of the type jsonl, json, parquet, csv, or a Hugging Face data set id."
    )


@pytest.mark.parametrize(
    ("name", "content"),
    [("a.jsonl", ""), ("a.jsonl", "\n\n"), ("a.json", "[]"), ("a.json", ""), ("a.csv", "prompt\n")],
)
def test_an_empty_file(tmp_path, check, name, content):
    (tmp_path / name).write_text(content)
    path = str(tmp_path / name)
    assert refused(check, path) == (
        f"data.prompts ({path}): the file has no rows. Write prompts into it."
    )


@pytest.mark.parametrize(
    ("name", "content", "where", "problem"),
    [
        ("a.jsonl", b'["a"]\n', ":1", "a row must be an object, but this is list."),
        ("a.jsonl", b'{"prompt": "\xff"}\n', "", "it is not UTF-8: "),
        ("a.json", b'["a"]', ", row 1", "a row must be an object, but this is str."),
        (
            "a.csv",
            b"prompt,a\nx\n",
            ":2",
            "the row does not have as many fields as the header (2).",
        ),
        (
            "a.csv",
            b"prompt\nx,y\n",
            ":2",
            "the row does not have as many fields as the header (1).",
        ),
        ("a.csv", b'prompt\n"x', ", after line 1", "unexpected end of data."),
        ("a.parquet", b"PAR1", "", ""),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path, check, name, content, where, problem):
    path = tmp_path / name
    path.write_bytes(content)
    message = refused(check, str(path))
    assert message.startswith(f"data.prompts ({path}{where}): cannot be read: {problem}")
    assert message.endswith(" Correct the file.")


def test_a_json_file_that_is_no_list(tmp_path, check):
    path = tmp_path / "a.json"
    path.write_text('{"prompt": "a"}')
    assert refused(check, str(path)) == (
        f"data.prompts ({path}): a json file must hold one list of rows, but this one holds "
        "dict. Write a list, or one object a line in a .jsonl file."
    )


def test_a_missing_prompt_key_names_the_columns_and_the_nearest(file, check):
    assert refused(check, file, "promt") == (
        f"data.prompt_key (promt): {file} has no such column. It has prompt, answer. "
        "Set data.prompt_key to prompt."
    )


@pytest.mark.parametrize(
    ("config_key", "row"), [("data.prompt_key", {"answer": 1}), ("data.label_key", {"prompt": "c"})]
)
def test_a_later_row_without_a_key_is_named(tmp_path, check, config_key, row):
    path = write(tmp_path / "a.jsonl", [*ROWS, row])
    (column,) = row
    name = "prompt" if config_key == "data.prompt_key" else "answer"
    assert refused(check, path, "prompt", "answer") == (
        f"{config_key} ({name}): {path}:3 has no such key. It has {column}. Correct the row or "
        "remove it."
    )


@pytest.mark.parametrize("value", [None, 5, [], ["a"], [{"role": "user"}], {"role": "user"}])
def test_a_prompt_that_is_neither_text_nor_chat(tmp_path, check, value):
    path = write(tmp_path / "a.jsonl", [{"prompt": value}])
    assert refused(check, path) == (
        f"data.prompt_key (prompt): {path}:1 has {value!r} there. A prompt must be a text, or a "
        "list of chat messages with role and content. Correct the row or remove it."
    )


def test_peek_looks_at_the_first_rows_only_and_loading_at_all(tmp_path, tokenizer):
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "a"}\n' * 1000 + "{broken\n")

    peek(str(path))
    assert f"{path}:1001" in refused(load_prompts, section(str(path)), tokenizer)


# Chat messages as text


@pytest.mark.parametrize("ending", [".jsonl", ".csv", ".parquet"])
@pytest.mark.parametrize(
    "text",
    [
        str([{"role": "user", "content": "hi"}]),  # what pandas writes of a list
        '[{"role": "user"}]',
        str([{"content": "hi", "role": "user"}]),
        '[{"content": "hi", "role": "us',
    ],
)
def test_a_text_that_looks_like_chat_messages_and_is_none(tmp_path, check, ending, text):
    path = tmp_path / f"a{ending}"
    if ending == ".csv":
        path.write_text('prompt\n"' + text.replace('"', '""') + '"\n')
    else:
        write(path, [{"prompt": text}])
    where = f"{path}, row 1" if ending == ".parquet" else f"{path}:{2 if ending == '.csv' else 1}"
    assert refused(check, str(path)) == (
        f"data.prompt_key (prompt): {where} has {text!r} there: chat messages as text, but not "
        "a JSON list of objects with role and content. Write it as json.dumps does, or write "
        "lists of messages to a jsonl or parquet file."
    )


@pytest.mark.parametrize(
    "text", ['{"role": "user", "content": "hi"}', '[{"content": 1}]', "[1]", "[{role: x}]", "[ {"]
)
def test_other_json_is_a_prompt_like_any_other_text(tmp_path, check, text):
    assert check(write(tmp_path / "a.jsonl", [{"prompt": text}])) == 1


# Hugging Face data sets


@pytest.mark.parametrize("name", ["gsm8k", "openai/gsm8k", "org/set-v1.1"])
def test_a_data_set_id_needs_the_package(check, monkeypatch, name):
    monkeypatch.setattr("raypo.data.rows.find_spec", lambda _: None)
    assert refused(check, name) == (
        f"data.prompts ({name}): there is no such file, and a Hugging Face data set needs the "
        "package datasets. Correct the path, or pip install datasets on every node."
    )


@pytest.fixture
def data_sets(monkeypatch):
    """A package `datasets` with one data set, because the real one is not required."""

    def load_dataset(path, config, split):
        name = path
        if name != "openai/gsm8k":
            raise FileNotFoundError(f"Couldn't find any data file at {name}.")
        return {"train": ROWS}[split]

    module = ModuleType("datasets")
    module.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)
    monkeypatch.setattr("raypo.data.rows.find_spec", lambda _: object())


def test_the_train_split_of_a_data_set_is_read(data_sets, tokenizer):
    loaded = load_prompts(section("openai/gsm8k", label_key="answer"), tokenizer)
    assert [(p.index, p.text, p.label) for p in loaded.prompts] == [
        (0, "1+1=", "2"),
        (1, "10+10=", "20"),
    ]


def test_a_data_set_that_is_not_there(data_sets, tokenizer):
    assert refused(load_prompts, section("openai/gsm9k"), tokenizer) == (
        "data.prompts (openai/gsm9k): there is no such file, and the train split of a Hugging Face "
        "data set of this name cannot be loaded: Couldn't find any data file at openai/gsm9k.. "
        "Correct the path or the name; another split or a configuration is named by "
        "data.prompts={path: openai/gsm9k, config: NAME, split: NAME}."
    )
    assert peek("openai/gsm9k") is None, "the check before the start downloads nothing"


def test_a_data_set_entry_needs_the_package(check, monkeypatch):
    monkeypatch.setattr("raypo.data.rows.find_spec", lambda _: None)
    assert refused(check, SourceEntry(path="openai/gsm8k", config="main")) == (
        "data.prompts (openai/gsm8k, main, train): a Hugging Face data set needs the package "
        "datasets. pip install datasets on every node."
    )
