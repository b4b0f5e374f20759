import copy
import json
import subprocess
import sys

import pytest
from transformers import AutoTokenizer

from raypo.data.prompts import load_prompts
from tests.unit.data.prompt_files import CHAT, ROWS, refused, section, write


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
    told = "2 of the 4 prompts of eval.prompts are longer than data.max_prompt_tokens and skipped"
    assert loaded.notes("eval.prompts") == [told]


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


def test_chat_without_a_template_is_an_error(tmp_path, tokenizer):
    bare = AutoTokenizer.from_pretrained(tokenizer.name_or_path)
    bare.chat_template = None
    path = write(tmp_path / "a.jsonl", [{"prompt": CHAT}])
    assert refused(load_prompts, section(path), bare) == (
        f"data.prompt_key (prompt): {path}:1 has chat messages, but the policy's tokenizer has "
        "no chat template. Use a chat model, or prompts that are text."
    )


def test_peek_imports_nothing_heavy(tmp_path):
    path = write(tmp_path / "a.jsonl", ROWS)
    code = (
        "import sys\nfrom raypo.config import DataSection\nfrom raypo.data.prompts import peek\n"
        f"peek(DataSection(prompts=[{path!r}]))\n"
        "heavy = ('torch', 'transformers', 'ray', 'vllm', 'pyarrow')\n"
        "print([m for m in heavy if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("ending", [".csv", ".jsonl"])
def test_chat_messages_as_json_text_are_chat_and_a_label_stays_text(tmp_path, tokenizer, ending):
    """A cell of a csv file can hold nothing but text."""
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}="
    chat, path = json.dumps(CHAT), tmp_path / f"chat{ending}"
    if ending == ".csv":
        cell = '"' + chat.replace('"', '""') + '"'
        path.write_text(f"prompt,answer\n{cell},{cell}\n[1] plain,x\n")
    else:
        rows = [{"prompt": chat, "answer": chat}, {"prompt": "[1] plain", "answer": "x"}]
        write(path, rows)

    read, plain = load_prompts(section(str(path), label_key="answer"), tokenizer).prompts

    assert (read.messages, read.text, read.label) == (CHAT, "hi=", chat)
    assert (plain.messages, plain.text) == (None, "[1] plain")
