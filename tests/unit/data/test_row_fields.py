"""Every column and field of a row is used, refused or named as ignored."""

from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError
from transformers import AutoTokenizer

from raypo.config import PairsSection, ResponsesSection
from raypo.data.chat_messages import ChatFormat
from raypo.data.examples import LoadedExamples, load_examples, load_pairs
from raypo.data.prompts import load_prompts
from raypo.data.turns import TurnTokens
from tests.chat_templates import family_tokenizer, stop_ids
from tests.tiny import tiny_tokenizer
from tests.unit.data.prompt_files import refused, section, write

SCHEMA = {
    "type": "function",
    "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}},
}
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}\n{% endif %}{% for m in messages %}<bos>{{ m.role }}\n"
    "{% if m.note %}({{ m.note }}){% endif %}{{ m.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<bos>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}-{% endif %}{% endif %}"
)
MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<bos>assistant\n{% generation %}"
    "{{ m.content }}<eos>{% endgeneration %}{% else %}<bos>{{ m.role }}\n{{ m.content }}<eos>"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<bos>assistant\n{% endif %}"
)
END = (2,)


@pytest.fixture
def chat(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(tiny_tokenizer(tmp_path / "tokenizer"))
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def talk(**fields: Any) -> list[dict[str, Any]]:
    """A conversation of two answers; the fields are those of the first one."""
    return [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "no", **fields},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "yes"},
    ]


def learned(tmp_path, tokenizer, row: dict[str, Any], stops=END) -> list[str]:
    path = write(tmp_path / "a.jsonl", [row])
    values = ResponsesSection.model_validate({"prompts": path, "messages_key": "messages"})
    (example,) = load_examples(values, tokenizer, stops).items
    mask = [True] * len(example.response_ids) if example.mask is None else list(example.mask)
    end = tokenizer.convert_ids_to_tokens(stops[0])
    return tokenizer.decode(example.response_ids[mask]).split(end)[:-1]


@pytest.mark.parametrize("template", [TEMPLATE, MARKED], ids=["prefixes", "marked"])
@pytest.mark.parametrize(
    "fields",
    [
        {"weight": 0},
        {"weight": 0.0, "train": False},
        {"train": False},
        {"trainable": False},
        {"training": 0},
        {"learn": False},
        {"loss": False},
        {"loss_mask": 0},
    ],
    ids=str,
)
def test_an_answer_that_is_excluded_is_not_learned(tmp_path, chat, template, fields):
    chat.chat_template = template
    assert learned(tmp_path, chat, {"messages": talk()}) == ["no", "yes"]
    assert learned(tmp_path, chat, {"messages": talk(**fields)}) == ["yes"]
    included = {name: True for name in fields}
    assert learned(tmp_path, chat, {"messages": talk(**included)}) == ["no", "yes"]


@pytest.mark.parametrize("name", ["Llama 3", "GLM 4"])
def test_what_follows_the_last_answer_that_is_learned_is_left_out(tmp_path, name):
    tokenizer = family_tokenizer(name, tmp_path / "t")
    stops = stop_ids(name, tokenizer)
    messages = talk()
    messages[3]["weight"] = 0
    path = write(tmp_path / "a.jsonl", [{"messages": messages}, {"messages": messages[:2]}])
    values = ResponsesSection.model_validate({"prompts": path, "messages_key": "messages"})
    whole, short = load_examples(values, tokenizer, stops).items
    assert whole.response_ids.tolist() == short.response_ids.tolist()
    assert whole.prompt_ids.tolist() == short.prompt_ids.tolist()


def test_a_rows_mask_counts_for_its_messages(tmp_path, chat):
    row = {"messages": talk(), "loss_mask": [0, 0, 0, 1]}
    assert learned(tmp_path, chat, row) == ["yes"]
    path = write(tmp_path / "b.jsonl", [{"messages": talk(weight=0)[:2]}, {"messages": talk()}])
    values = ResponsesSection.model_validate({"prompts": path, "messages_key": "messages"})
    assert load_examples(values, chat, END).num_unusable == 1


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"messages": talk(weight=0.5)}, "messages.1.weight (0.5): a message counts"),
        ({"messages": talk(weight="0")}, "messages.1.weight ('0'): a message counts"),
        ({"messages": talk(weight=1, train=False)}, "weight, train contradict each other"),
        ({"messages": talk(), "loss_mask": [0, 1]}, "has [0, 1] in its column loss_mask"),
        ({"messages": talk(), "loss_mask": [1, 1, 0, 1]}, "on a message of the role user"),
        ({"messages": talk(), "images": ["cat.png"]}, "has images, which the policy would not get"),
        ({"messages": talk(), "system": "Hi", "chat_template_kwargs": 1}, "has 1 in its column"),
    ],
    ids=str,
)  # fmt: skip
def test_what_cannot_be_obeyed_is_refused(tmp_path, chat, row, told):
    path = write(tmp_path / "a.jsonl", [row])
    values = {"prompts": path, "messages_key": "messages"}
    assert told in refused(load_examples, ResponsesSection.model_validate(values), chat, END)
    kept = ResponsesSection.model_validate(values | {"on_error": "drop"})
    write(tmp_path / "a.jsonl", [row, {"messages": talk()}])
    assert load_examples(kept, chat, END).bad.count == 1


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"response": [{"role": "assistant", "content": "b", "weight": 0}]}, "of the response"),
        ({"prompt": talk(train=True)[:3]}, "of the prompt"),
        ({"loss_mask": [0, 1]}, "applies to whole conversations"),
        ({"audio": "a.wav"}, "has audio"),
    ],
    ids=str,
)
def test_fields_of_prompts_and_responses_that_say_otherwise_are_refused(tmp_path, chat, row, told):
    path = write(tmp_path / "a.jsonl", [{"prompt": talk()[:1], "response": "b"} | row])
    values = ResponsesSection.model_validate({"prompts": path})
    assert told in refused(load_examples, values, chat, END)
    if "audio" in row:
        assert told in refused(load_prompts, section(path), chat)


def loaded(tmp_path, chat, *rows: Any, **keys: Any) -> LoadedExamples[Any]:
    path = write(tmp_path / "a.jsonl", list(rows))
    return load_examples(ResponsesSection.model_validate({"prompts": path} | keys), chat, END)


def test_columns_that_say_what_the_model_reads_are_used(tmp_path, chat):
    row = {"prompt": talk()[:1], "response": "b"}
    plain, system, tools, kwargs, strange = loaded(
        tmp_path,
        chat,
        row,
        row | {"system": "Be brief."},
        row | {"tools": [SCHEMA]},
        row | {"chat_template_kwargs": {"enable_thinking": False}},
        row | {"tools": ["a hammer"]},
    ).items
    text = "<bos>user\na<eos><bos>assistant\n"
    assert chat.decode(plain.prompt_ids) == text
    assert chat.decode(system.prompt_ids) == f"<bos>system\nBe brief.<eos>{text}"
    assert chat.decode(tools.prompt_ids).startswith('[{"type": "function"')
    assert chat.decode(kwargs.prompt_ids) == f"{text}-"
    assert chat.decode(strange.prompt_ids) == text
    for wrong in ({"system": ["x"]}, {"system": "x", "prompt": [{"role": "system", "content": "y"},
                                                                 *talk()[:1]]}):  # fmt: skip
        path = write(tmp_path / "b.jsonl", [row | wrong])
        values = ResponsesSection.model_validate({"prompts": path})
        assert "system" in refused(load_examples, values, chat, END)


def test_variables_of_the_template_reach_rows_and_turns_or_are_refused(tmp_path, chat):
    text, variables = "<bos>user\na<eos><bos>assistant\n", {"enable_thinking": False}
    (item,) = loaded(
        tmp_path, chat, {"prompt": "a", "response": "b"}, chat_template_kwargs=variables,
        as_chat=True,
    ).items  # fmt: skip
    assert chat.decode(item.prompt_ids) == f"{text}-"
    turns = TurnTokens(chat, END, ChatFormat(kwargs=variables))
    assert turns.first("a", chat=True)[0] == f"{text}-"
    assert turns.with_variables({"enable_thinking": True}).first("a", chat=True)[0] == text
    between = turns.between(np.array([9, 2]), "so", chat=True)
    assert chat.decode(between) == "<bos>user\nso<eos><bos>assistant\n-"
    messages = ResponsesSection.model_validate(
        {"prompts": write(tmp_path / "b.jsonl", [{"messages": talk()}]), "messages_key": "messages"}
    )
    for template in (TEMPLATE, MARKED):
        chat.chat_template = template
        unknown = messages.model_copy(update={"chat_template_kwargs": {"enable_thoughts": True}})
        told = refused(load_examples, unknown, chat, END)
        assert "chat_template_kwargs.enable_thoughts: the chat template does not read" in told
        assert ("It reads enable_thinking" in told) == (template == TEMPLATE)
    with pytest.raises(ValidationError, match="raypo itself sets tools"):
        section("a", chat_template_kwargs={"tools": []})


def test_tools_of_rows_that_the_template_ignores_are_refused(tmp_path, chat):
    chat.chat_template = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    path = write(tmp_path / "a.jsonl", [{"prompt": talk()[:1], "tools": [SCHEMA]}])
    told = refused(load_prompts, section(path), chat)
    assert "tools: the chat template does not describe tools" in told
    for template in (chat.chat_template, MARKED):
        chat.chat_template = template
        path = write(tmp_path / "b.jsonl", [{"messages": talk(), "tools": [SCHEMA]}])
        values = ResponsesSection.model_validate({"prompts": path, "messages_key": "messages"})
        assert "does not describe tools" in refused(load_examples, values, chat, END)


def test_what_nothing_reads_is_named_in_one_line(tmp_path, chat):
    first = {"role": "user", "content": "a", "id": 7, "note": "hm", "name": None}
    row = {"prompt": [first], "response": "b", "source": "web", "level": None, "tools": ["saw"]}
    (note,) = loaded(tmp_path, chat, row).notes("data.prompts")
    assert note == (
        "ignored in data.prompts: message field id, column source, column tools"
    )  # the template reads `note`
    path = write(tmp_path / "p.jsonl", [{"prompt": "a", "chosen": "b", "rejected": "c", "by": 1}])
    pairs = load_pairs(PairsSection(prompts=path), chat, END)  # type: ignore[arg-type]
    assert pairs.notes("data.prompts") == ["ignored in data.prompts: column by"]
    assert load_prompts(section(path), chat).notes("data.prompts") == [], "`rollout.row` has it"


@pytest.mark.parametrize("kind", [".jsonl", ".csv", "gym"])
def test_a_text_of_any_source_becomes_a_chat(tmp_path, chat, kind):
    if kind == "gym":
        pytest.importorskip("reasoning_gym", reason="the package is optional")
        path = "reasoning_gym://chain_sum?size=1&seed=0"
    else:
        path = write(tmp_path / f"a{kind}", [{"prompt": "1+1=", "answer": "2"}])
    keys = {"as_chat": True, "system_prompt": "Be brief."}
    (prompt,) = load_prompts(section(path, **keys), chat).prompts
    assert prompt.messages is not None
    system, user = prompt.messages
    assert (system["content"], user["role"]) == ("Be brief.", "user")
    assert prompt.text == (
        f"<bos>system\nBe brief.<eos><bos>user\n{user['content']}<eos><bos>assistant\n"
    )
    told = refused(load_prompts, section(path, system_prompt="Be brief."), chat)
    assert "Set data.as_chat: true" in told
    messages = write(tmp_path / "m.jsonl", [{"prompt": talk()[:1]}])
    (same,) = load_prompts(section(messages, as_chat=True), chat).prompts
    assert same.messages == talk()[:1]
