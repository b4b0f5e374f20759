"""`data.on_error`: one bad row of many ends the run, or is dropped, counted and named."""

import json
from typing import Any

import pytest

from raypo.config import PairsSection, PreferencesSection, ResponsesSection
from raypo.data.examples import load_examples, load_pairs, load_verdicts
from raypo.data.prompts import load_prompts
from tests.tiny import CHAT_TEMPLATE
from tests.unit.data.prompt_files import CHAT, peek, refused, save_to_disk, section, write

END = (2,)
ANSWER = {"role": "assistant", "content": "yo"}
BAD_LINES = {
    "broken JSON": ('{"prompt": "b"', "cannot be read: "),
    "no object": ('["b"]', "cannot be read: a row must be an object"),
    "no prompt": ('{"answer": "b"}', "has no such key"),
    "a number": ('{"prompt": 3}', "has 3 there"),
    "a huge number": ('{"prompt": ' + "1" * 5000 + "}", "cannot be read: "),
    "deep nesting": ("[" * 100_000, "cannot be read: "),
    "null content": ('{"prompt": [{"role": "user", "content": null}]}', "messages.0.content"),
    "an unknown role": ('{"prompt": [{"role": "human", "content": "b"}]}', "knows no role 'human'"),
    "no tokens": ('{"prompt": ""}', "has a prompt without tokens"),
    "half a character": ('{"prompt": "a\\ud83d"}', "has '\\ud83d' at character 1"),
    "half a character in a chat": (
        '{"prompt": [{"role": "user", "content": "\\udc00"}]}',
        "which is half of a character (a lone surrogate)",
    ),
}


@pytest.fixture(autouse=True)
def template(tokenizer):
    known = "{% for message in messages if message.role in ['system', 'user', 'assistant'] %}"
    tokenizer.chat_template = CHAT_TEMPLATE.replace("{% for message in messages %}", known)
    assert known in tokenizer.chat_template


@pytest.mark.parametrize("bad", BAD_LINES)
def test_a_bad_line_is_refused_or_dropped_with_its_place(tmp_path, tokenizer, bad):
    line, problem = BAD_LINES[bad]
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"prompt": "a"}}\n{line}\n{{"prompt": "c"}}\n')
    told = refused(load_prompts, section(str(path)), tokenizer)
    assert f"{path}:2" in told
    assert problem in told
    loaded = load_prompts(section(str(path), on_error="drop"), tokenizer)
    assert [each.text for each in loaded.prompts] == ["a", "c"]
    (note,) = loaded.notes("data.prompts")
    assert note == (
        f"1 bad rows of data.prompts are dropped (data.on_error). The first found: {told}"
    )
    assert peek(str(path), on_error="drop") in (2, 3), "what takes a tokenizer is seen later"


def test_a_bad_row_keeps_its_number(tmp_path, tokenizer):
    a = write(tmp_path / "a.jsonl", [{"prompt": "a"}, {"prompt": 3}])
    b = save_to_disk(tmp_path / "set", [{"prompt": p} for p in ("", "b", "", "c")])
    loaded = load_prompts(section(a, b, on_error="drop"), tokenizer)
    assert [(each.index, each.text) for each in loaded.prompts] == [(0, "a"), (3, "b"), (5, "c")]
    assert (loaded.sizes, loaded.bad.count) == ((1, 2), 3)


def test_a_csv_line_with_too_many_fields_is_dropped(tmp_path, tokenizer):
    path = tmp_path / "a.csv"
    path.write_text("prompt\na\nb,c\nd\n")
    loaded = load_prompts(section(str(path), on_error="drop"), tokenizer)
    assert [each.text for each in loaded.prompts] == ["a", "d"]
    assert f"{path}:3" in loaded.bad.first


@pytest.mark.parametrize("line", ["{", '{"prompt": 3}', '{"prompt": ""}'])
def test_where_no_row_is_left_the_first_is_shown(tmp_path, tokenizer, line):
    path = tmp_path / "a.jsonl"
    path.write_text(f"{line}\n{line}\n")
    told = refused(load_prompts, section(str(path), on_error="drop"), tokenizer)
    assert told.startswith(
        "data.prompts: none of its rows is left, and 2 are bad. The first found: "
    )
    assert f"{path}:1" in told
    if line != '{"prompt": ""}':
        assert refused(peek, str(path), on_error="drop") == told


def test_the_first_rows_say_nothing_of_the_rest(tmp_path, tokenizer):
    path = write(tmp_path / "a.jsonl", [{"prompt": 3}] * 1000 + [{"prompt": "a"}])
    assert peek(path, on_error="drop") is None
    assert len(load_prompts(section(path, on_error="drop"), tokenizer).prompts) == 1
    path = write(tmp_path / "b.jsonl", [{"prompt": 3}] * 1000)
    assert "none of its rows is left, and 1000 are bad" in refused(peek, path, on_error="drop")


def test_a_column_that_no_row_has_is_the_configs_error(tmp_path, tokenizer):
    path = write(tmp_path / "a.jsonl", [{"promt": "a"}, {"promt": "b"}])
    told = refused(load_prompts, section(path, on_error="drop"), tokenizer)
    assert told.endswith("Set data.prompt_key to promt.")


GOOD = {"prompt": CHAT, "response": "yo", "chosen": "a", "rejected": "b", "chat": [*CHAT, ANSWER]}
CASES: list[tuple[Any, Any, dict[str, Any], dict[str, Any], str]] = [
    (load_examples, ResponsesSection, {}, {"response": 3}, "A response must be a text"),
    (load_examples, ResponsesSection, {}, {"response": "The <eos> token"}, "<eos> inside"),
    (load_examples, ResponsesSection, {}, {"prompt": "q", "response": "a<eos>b"}, "<eos> inside"),
    (load_examples, ResponsesSection, {}, {"response": "\ud800"}, "lone surrogate"),
    (load_pairs, PairsSection, {}, {"chosen": "a<eos>b", "rejected": "a<eos>c"}, "<eos> inside"),
    (load_pairs, PairsSection, {"margin_key": "m"}, {"m": "x"}, "must be a finite number"),
    (load_pairs, PairsSection, {"margin_key": "m"}, {"m": float("nan")}, "must be a finite number"),
    (load_pairs, PreferencesSection, {}, {"rejected": None}, "A response must be a text"),
    (load_verdicts, PreferencesSection, {"desirable_key": "m"}, {"m": "x"}, "true or false"),
    (
        load_examples,
        ResponsesSection,
        {"messages_key": "chat"},
        {"chat": CHAT},
        "assistant answers",
    ),
    (
        load_examples,
        ResponsesSection,
        {"messages_key": "chat"},
        {"chat": [*CHAT, ANSWER | {"content": "a <eos> b"}, *CHAT, ANSWER]},
        "the stop token <eos> inside an answer",
    ),
    (
        load_examples,
        ResponsesSection,
        {"messages_key": "chat"},
        {"chat": [{"role": "human", "content": "hi"}, ANSWER]},
        "knows no role 'human'",
    ),
]


@pytest.mark.parametrize(("load", "kind", "keys", "wrong", "problem"), CASES)
def test_rows_to_learn_from_are_refused_or_dropped(
    tmp_path, tokenizer, load, kind, keys, wrong, problem
):
    good = [GOOD | {"m": True}, GOOD | {"m": False, "prompt": [CHAT[0] | {"content": "ho"}]}]
    if keys.get("margin_key"):
        good = [row | {"m": 1.0} for row in good]
    path = tmp_path / "a.jsonl"
    rows = [good[0], good[0] | wrong, good[1]]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = {"prompts": str(path)} | keys
    told = refused(load, kind.model_validate(values), tokenizer, END)
    assert f"{path}:2" in told
    assert problem in told
    loaded = load(kind.model_validate(values | {"on_error": "drop"}), tokenizer, END)
    assert (len(loaded.items), loaded.num_skipped, loaded.num_unusable) == (2, 0, 0)
    note, ignored = loaded.notes("eval.prompts")
    assert note.endswith(told)
    assert ignored.startswith("ignored in eval.prompts: ")


@pytest.mark.parametrize("before", [[], [{"role": "system", "content": "Be brief."}]])
def test_a_response_that_the_template_refuses_is_its_rows_error(tmp_path, tokenizer, before):
    tokenizer.chat_template = (
        "{% for m in messages if m.tool_calls %}{{ raise_exception('no calls') }}{% endfor %}"
        + CHAT_TEMPLATE
    )
    call = [ANSWER | {"tool_calls": [{"name": "f", "arguments": {}}]}]
    rows = [{"prompt": [*before, *CHAT], "response": each} for each in ("a", call, "b")]
    path = write(tmp_path / "a.jsonl", rows)
    told = refused(
        load_examples, ResponsesSection.model_validate({"prompts": path}), tokenizer, END
    )
    assert told == (
        f"data.response_key (response): the tokenizer's chat template refuses {path}:2: no calls. "
        "Correct the messages."
    )
    dropping = ResponsesSection.model_validate({"prompts": path, "on_error": "drop"})
    loaded = load_examples(dropping, tokenizer, END)
    assert (len(loaded.items), loaded.bad.count) == (2, 1)


def test_json_lines_in_a_json_file_are_told_their_ending(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    assert refused(peek, str(path)) == (
        f"data.prompts ({path}): cannot be read: Extra data at line 2, column 1. It has one object "
        "a line, as .jsonl files do: rename it to .jsonl."
    )
