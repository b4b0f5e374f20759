import json
import re
import subprocess
import sys
from types import ModuleType

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from raypo.config import ConfigError, DataSection
from raypo.data.prompts import load_prompts, peek
from raypo.data.rows import read_rows
from tests.tiny import tiny_tokenizer

ROWS = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "10+10=", "answer": "20"}]
CHAT = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """One token a character."""
    return AutoTokenizer.from_pretrained(tiny_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def write(path, rows):
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows, indent=1))
    elif path.suffix == ".csv":
        lines = [",".join(rows[0]), *(",".join(map(str, row.values())) for row in rows)]
        path.write_text("\n".join(lines))
    else:
        pq.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


def section(*paths, **values):
    return DataSection(prompts=paths, **values)


def refused(call, *args, **kwargs):
    with pytest.raises(ConfigError) as error:
        call(*args, **kwargs)
    return str(error.value)


@pytest.fixture(params=[".jsonl", ".json", ".csv", ".parquet"])
def file(request, tmp_path):
    return write(tmp_path / f"prompts{request.param}", ROWS)


# Loading


def test_every_kind_of_file_gives_the_same_prompts(file, tokenizer):
    loaded = load_prompts(section(file, label_key="answer"), tokenizer)

    assert loaded.num_skipped == 0
    assert [(p.index, p.text, p.label) for p in loaded.prompts] == [
        (0, "1+1=", "2"),
        (1, "10+10=", "20"),
    ]
    assert loaded.prompts[0].token_ids.tolist() == tokenizer("1+1=")["input_ids"]
    assert loaded.prompts[0].token_ids.dtype == "int32"


def test_the_index_is_the_row_over_all_files_skipped_rows_counted(tmp_path, tokenizer):
    a = write(tmp_path / "a.jsonl", [{"prompt": "12"}, {"prompt": "12345"}])
    b = write(tmp_path / "b.csv", [{"prompt": "123456"}, {"prompt": "9"}])

    loaded = load_prompts(section(a, b, max_prompt_tokens=4), tokenizer)

    assert [(p.index, p.text) for p in loaded.prompts] == [(0, "12"), (3, "9")]
    assert loaded.num_skipped == 2


def test_a_prompt_of_just_the_limit_is_kept(tmp_path, tokenizer):
    path = write(tmp_path / "a.jsonl", [{"prompt": "1234"}])
    assert len(load_prompts(section(path, max_prompt_tokens=4), tokenizer).prompts) == 1


def test_labels_keep_their_type_and_are_none_without_a_key(tmp_path, tokenizer):
    path = write(
        tmp_path / "a.jsonl", [{"prompt": "a", "y": {"n": [1, 2]}}, {"prompt": "b", "y": None}]
    )

    labels = [p.label for p in load_prompts(section(path, label_key="y"), tokenizer).prompts]
    assert labels == [{"n": [1, 2]}, None]
    assert load_prompts(section(path), tokenizer).prompts[0].label is None


def test_csv_is_text_so_that_leading_zeros_stay(tmp_path, tokenizer):
    path = tmp_path / "a.csv"
    path.write_text('prompt,answer\n"4,\n5",007\n')

    (prompt,) = load_prompts(section(str(path), label_key="answer"), tokenizer).prompts
    assert (prompt.text, prompt.label) == ("4,\n5", "007")


@pytest.mark.parametrize("extension", [".jsonl", ".json", ".parquet"])
def test_chat_messages_go_through_the_template_with_the_generation_prompt(
    tmp_path, tokenizer, extension
):
    path = write(tmp_path / f"a{extension}", [{"prompt": CHAT}])

    (prompt,) = load_prompts(section(path), tokenizer).prompts

    assert prompt.text == "user: hi\nassistant: "
    assert (
        prompt.token_ids.tolist() == tokenizer(prompt.text, add_special_tokens=False)["input_ids"]
    )


def test_special_tokens_are_added_to_text_and_not_twice_to_chat(tmp_path, tokenizer):
    from tokenizers.processors import TemplateProcessing

    adding = AutoTokenizer.from_pretrained(tokenizer.name_or_path)
    adding.backend_tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", adding.bos_token_id)]
    )
    path = write(tmp_path / "a.jsonl", [{"prompt": CHAT}, {"prompt": "hi"}, {"prompt": CHAT}])

    chat, text, _ = load_prompts(section(path), adding).prompts

    assert text.token_ids[0] == adding.bos_token_id
    assert adding.bos_token_id not in chat.token_ids
    assert adding.decode(chat.token_ids) == "user: hi\nassistant: "
    assert adding.decode(text.token_ids[1:]) == "hi"


def test_more_rows_than_a_chunk_keep_their_order(tmp_path, tokenizer):
    path = write(tmp_path / "a.jsonl", [{"prompt": str(i)} for i in range(2500)])
    loaded = load_prompts(section(path), tokenizer)
    assert [p.text for p in loaded.prompts] == [str(i) for i in range(2500)]
    assert all(len(p.token_ids) == len(p.text) for p in loaded.prompts)


def test_blank_lines_and_a_byte_order_mark_are_harmless(tmp_path, tokenizer):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\n\n{"prompt": "b"}\n')
    assert [p.index for p in load_prompts(section(str(path)), tokenizer).prompts] == [0, 1]


# What load_prompts alone refuses


def test_too_long_can_be_an_error(tmp_path, tokenizer):
    path = write(tmp_path / "a.jsonl", [{"prompt": "1"}, {"prompt": "12345"}])
    config = section(path, max_prompt_tokens=4, too_long="error")

    assert refused(load_prompts, config, tokenizer) == (
        f"data.max_prompt_tokens (4): the prompt of {path}:2 has 5 tokens. Set "
        "data.max_prompt_tokens to at least 5, shorten the prompt, or set data.too_long to skip."
    )


def test_nothing_left_is_an_error(tmp_path, tokenizer):
    path = write(tmp_path / "a.jsonl", [{"prompt": "123456"}, {"prompt": "12345"}])

    message = refused(
        load_prompts, section(path, max_prompt_tokens=4), tokenizer, key="eval.prompts"
    )

    assert message == (
        "data.max_prompt_tokens (4): all 2 prompts of eval.prompts are longer. Set "
        "data.max_prompt_tokens to at least 5, the length of the shortest."
    )


def test_a_prompt_without_tokens_is_an_error(tmp_path, tokenizer):
    path = write(tmp_path / "a.jsonl", [{"prompt": "1"}, {"prompt": ""}])
    assert refused(load_prompts, section(path), tokenizer) == (
        f"data.prompt_key (prompt): {path}:2 has a prompt without tokens. Write a prompt there or "
        "remove the row."
    )


def test_chat_without_a_template_is_an_error(tmp_path, tokenizer):
    bare = AutoTokenizer.from_pretrained(tokenizer.name_or_path)
    bare.chat_template = None
    path = write(tmp_path / "a.jsonl", [{"prompt": CHAT}])
    assert refused(load_prompts, section(path), bare) == (
        f"data.prompt_key (prompt): {path}:1 has chat messages, and the policy's tokenizer has no "
        "chat template. Use a chat model, or prompts that are text."
    )


def test_what_the_template_says_of_messages_is_passed_on(tmp_path, tokenizer):
    strict = AutoTokenizer.from_pretrained(tokenizer.name_or_path)
    strict.chat_template = "{{ raise_exception('roles must alternate') }}"
    path = write(tmp_path / "a.jsonl", [{"prompt": CHAT}])
    assert refused(load_prompts, section(path), strict) == (
        f"data.prompt_key (prompt): the tokenizer's chat template refuses {path}:1: roles must "
        "alternate. Correct the messages."
    )


# What both refuse


@pytest.fixture(params=["peek", "load"])
def check(request, tokenizer):
    """Either way a file is looked at: (path, prompt_key, label_key)."""
    if request.param == "peek":
        return lambda path, prompt_key="prompt", label_key=None: peek([path], prompt_key, label_key)
    return lambda path, prompt_key="prompt", label_key=None: load_prompts(
        section(path, prompt_key=prompt_key, label_key=label_key), tokenizer
    )


def test_good_files_are_good(file, check):
    check(file, "prompt", "answer")


def test_a_missing_file(tmp_path, check):
    path = tmp_path / "none.jsonl"
    assert refused(check, str(path)) == (
        f"data.prompts ({path}): there is no such file in {tmp_path}."
    )


def test_a_folder(tmp_path, check):
    assert refused(check, str(tmp_path)) == (
        f"data.prompts ({tmp_path}): this is a folder. Name the files in it "
        "(jsonl, json, parquet, csv)."
    )


@pytest.mark.parametrize("name", ["prompts.txt", "prompts.tsv"])
def test_an_unknown_kind_of_file(tmp_path, monkeypatch, check, name):
    monkeypatch.chdir(tmp_path)
    assert refused(check, name) == (
        f"data.prompts ({name}): {name[-4:]} is no kind of file that raypo reads. Give a file of "
        "the kind jsonl, json, parquet, csv, or a Hugging Face data set id."
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


def test_an_empty_parquet_file(tmp_path, check):
    path = str(tmp_path / "a.parquet")
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), path)
    assert "the file has no rows" in refused(check, path)


def test_an_unreadable_line_is_named(tmp_path, check):
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "a"}\n\n{"prompt": "b"\n')
    assert refused(check, str(path)) == (
        f"data.prompts ({path}:3): cannot be read: Expecting ',' delimiter at column 1. "
        "Correct the file."
    )


@pytest.mark.parametrize(
    ("name", "content", "where", "problem"),
    [
        ("a.jsonl", b'["a"]\n', ":1", "a row must be an object, this is list."),
        ("a.jsonl", b'{"prompt": "\xff"}\n', "", "it is not UTF-8: "),
        ("a.json", b'["a"]', ", row 1", "a row must be an object, this is str."),
        ("a.csv", b"prompt,a\nx\n", ":2", "the row has not as many fields as the header (2)."),
        ("a.csv", b"prompt\nx,y\n", ":2", "the row has not as many fields as the header (1)."),
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
        f"data.prompts ({path}): a json file must hold one list of rows, this holds dict. "
        "Write a list, or one object a line in a .jsonl file."
    )


def test_a_missing_prompt_key_names_the_columns_and_the_nearest(file, check):
    assert refused(check, file, "promt") == (
        f"data.prompt_key (promt): {file} has no such column, it has prompt, answer. "
        "Set data.prompt_key to prompt."
    )


def test_a_missing_label_key_names_the_columns(file, check):
    assert refused(check, file, "prompt", "zzz") == (
        f"data.label_key (zzz): {file} has no such column, it has prompt, answer. "
        "Set data.label_key to one of them."
    )


@pytest.mark.parametrize(
    ("config_key", "row"), [("data.prompt_key", {"answer": 1}), ("data.label_key", {"prompt": "c"})]
)
def test_a_later_row_without_a_key_is_named(tmp_path, check, config_key, row):
    path = write(tmp_path / "a.jsonl", [*ROWS, row])
    (column,) = row
    name = "prompt" if config_key == "data.prompt_key" else "answer"
    assert refused(check, path, "prompt", "answer") == (
        f"{config_key} ({name}): {path}:3 has no such key, it has {column}. "
        "Correct the row or remove it."
    )


@pytest.mark.parametrize("value", [None, 5, [], ["a"], [{"role": "user"}], {"role": "user"}])
def test_a_prompt_that_is_neither_text_nor_chat(tmp_path, check, value):
    path = write(tmp_path / "a.jsonl", [{"prompt": value}])
    assert refused(check, path) == (
        f"data.prompt_key (prompt): {path}:1 has {value!r} there. A prompt is a text, or a list of "
        "chat messages with role and content. Correct the row or remove it."
    )


def test_messages_name_the_key_that_the_paths_come_from():
    assert refused(peek, ["x.jsonl"], "prompt", key="eval.prompts").startswith(
        "eval.prompts (x.jsonl)"
    )


def test_peek_looks_at_the_first_rows_only_and_loading_at_all(tmp_path, tokenizer):
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "a"}\n' * 1000 + "{broken\n")

    peek([str(path)], "prompt")
    assert f"{path}:1001" in refused(load_prompts, section(str(path)), tokenizer)


# Hugging Face data sets


@pytest.mark.parametrize("name", ["gsm8k", "openai/gsm8k", "org/set-v1.1"])
def test_a_data_set_id_needs_the_package(check, monkeypatch, name):
    monkeypatch.setattr("raypo.data.rows.find_spec", lambda _: None)
    assert refused(check, name) == (
        f"data.prompts ({name}): there is no such file, and a Hugging Face data set needs the "
        "package datasets. Correct the path, or pip install datasets."
    )


@pytest.fixture
def data_sets(monkeypatch):
    """A package `datasets` with one data set, because the real one is not required."""

    def load_dataset(name, split):
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
        "Correct the path or the name."
    )


def test_peek_downloads_nothing(data_sets):
    peek(["openai/gsm9k"], "prompt")


# Small print


def test_rows_are_read_as_they_are_asked_for(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"n": 1}\n{broken\n')
    assert next(read_rows(str(path), key="k")).values == {"n": 1}


def test_peek_imports_nothing_heavy(tmp_path):
    path = write(tmp_path / "a.jsonl", ROWS)
    code = (
        "import sys\nfrom raypo.data.prompts import peek\n"
        f"peek([{path!r}], 'prompt')\n"
        "heavy = ('torch', 'transformers', 'ray', 'vllm', 'pyarrow')\n"
        "print([m for m in heavy if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_a_message_ends_with_a_remedy(tmp_path):
    message = refused(peek, [str(tmp_path / "a.md")], "prompt")
    assert re.search(r"\. Give a file .*\.$", message)
