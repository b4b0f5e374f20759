"""Chat messages: normalised or refused by one function, wherever they come from."""

import json
from typing import Any

import pytest
from jinja2 import TemplateError
from transformers import AutoTokenizer

from raypo.config import ConfigError, ResponsesSection
from raypo.data.chat_messages import MessageError, chat_messages, check_roles, render
from raypo.data.examples import load_examples
from raypo.data.prompts import load_prompts
from raypo.data.turns import TurnTokens
from tests.tiny import tiny_tokenizer
from tests.unit.data.prompt_files import CHAT, peek, refused, section, write

END = (2,)
ANSWER = {"role": "assistant", "content": "yo"}
PARTS = [{"type": "text", "text": "h", "image_url": None}, {"type": "text", "text": "i"}]
IMAGE = [{"type": "text", "text": "hi"}, {"type": "image_url", "image_url": {"url": "x"}}]
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"role": "user", "content": None}, "0.content: must be a text, but this is null"),
    ({"role": "assistant", "content": None}, "0.content: must be a text, but this is null"),
    ({"role": "user", "content": 3}, "messages.0.content: must be a text, but this is int"),
    ({"role": "user", "content": {"a": 1}}, "messages.0.content: must be a text, but this is dict"),
    ({"role": "user", "content": IMAGE}, "has a part of type image_url, but only text parts"),
    ({"role": "user", "content": ["hi"]}, "has a part of type None, but only text parts"),
    ({"role": "user", "content": [{"type": "text", "text": 3}]}, "only text parts are supported"),
    ({"role": 3, "content": "hi"}, "messages.0.role: a message must have a role, which is a text"),
    ({"role": "assistant", "content": "", "tool_calls": [{}]}, "these are not tool calls"),
    (
        {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": "{"}]},
        "these are not tool calls",
    ),
    (
        {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": [1]}]},
        "these are not tool calls",
    ),
]  # fmt: skip


def test_contents_become_text_and_what_is_null_is_not_there():
    call = {"id": None, "function": {"arguments": {"a": 1, "b": None}, "name": "f"}, "x": None}
    chat = [
        {"role": "user", "content": PARTS, "name": None, "tool_calls": None},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": None},
        {"role": "assistant", "content": "yo", "tool_calls": []},
        {"role": "assistant", "content": None, "reasoning_content": "hm"},
    ]
    assert chat_messages(chat) == [
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}],
        },
        ANSWER,
        {"role": "assistant", "content": "", "reasoning_content": "hm"},
    ]


@pytest.mark.parametrize("wrapped", [True, False])
def test_arguments_are_objects_and_a_null_in_their_text_stays(wrapped):
    """Arrow fills objects, and never text; OpenAI writes arguments as text."""
    function = {"name": "f", "arguments": '{"unit": null, "b": 1}'}
    call = {"type": "function", "function": function} if wrapped else function
    (message,) = chat_messages([{"role": "assistant", "tool_calls": [call]}])
    assert message["content"] == ""
    assert message["tool_calls"] == [
        {"type": "function", "function": {"name": "f", "arguments": {"unit": None, "b": 1}}}
    ]


@pytest.mark.parametrize(("message", "told"), WRONG)
def test_a_wrong_message_is_refused_wherever_it_comes_from(tmp_path, tokenizer, message, told):
    with pytest.raises(MessageError, match=told):
        chat_messages([message])
    with pytest.raises(ValueError, match=told):
        TurnTokens(tokenizer, END).first([message], chat=True)
    path = write(tmp_path / "a.jsonl", [{"prompt": CHAT}, {"prompt": [message]}])
    of_prompt = refused(load_prompts, section(path), tokenizer)
    assert of_prompt.startswith(f"data.prompt_key (prompt): {path}:2, messages.0")
    assert told in of_prompt
    chat = {"chat": [message, *CHAT, ANSWER]}
    path = write(tmp_path / "b.jsonl", [chat])
    values = ResponsesSection.model_validate({"prompts": path, "messages_key": "chat"})
    of_chat = refused(load_examples, values, tokenizer, END)
    assert of_chat.startswith(f"data.messages_key (chat): {path}:1, messages.0")
    assert told in of_chat


@pytest.mark.parametrize(
    ("response", "told"),
    [
        ([{"role": "assistant", "content": None}], "messages.0.content: must be a text"),
        ([{"role": "assistant", "content": IMAGE}], "has a part of type image_url"),
        ([{"role": "user", "content": "yo"}], "has a message of the role user there"),
        (3, "has 3 there. A response must be a text"),
        ([ANSWER, ANSWER], "or a list of one chat message"),
    ],
)
def test_a_wrong_response_is_refused_by_its_row(tmp_path, tokenizer, response, told):
    path = write(tmp_path / "a.jsonl", [{"prompt": CHAT, "response": response}])
    values = ResponsesSection.model_validate({"prompts": path})
    message = refused(load_examples, values, tokenizer, END)
    assert message.startswith(f"data.response_key (response): {path}:1")
    assert told in message


def test_calls_behind_a_text_prompt_are_refused(tmp_path, tokenizer):
    call = {"name": "f", "arguments": {}}
    response = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    path = write(tmp_path / "a.jsonl", [{"prompt": "q", "response": response}])
    values = ResponsesSection.model_validate({"prompts": path})
    assert "only a chat template can" in refused(load_examples, values, tokenizer, END)


@pytest.mark.parametrize("role", ["human", "gpt", "User"])
def test_a_role_that_the_template_ignores_is_refused(tmp_path, tokenizer, role):
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "{% for m in messages %}", "{% for m in messages if m.role in ['user', 'assistant'] %}"
    )
    path = write(tmp_path / "a.jsonl", [{"prompt": [{"role": role, "content": "hi"}]}])
    told = refused(load_prompts, section(path), tokenizer)
    assert f"refuses {path}:1: messages.0.role: the template knows no role '{role}'." in told
    chat = [{"role": role, "content": "hi"}, ANSWER]
    path = write(tmp_path / "b.jsonl", [{"chat": chat}])
    values = ResponsesSection.model_validate({"prompts": path, "messages_key": "chat"})
    assert f"knows no role '{role}'" in refused(load_examples, values, tokenizer, END)


def test_a_role_that_the_template_names_is_its_own(tokenizer):
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'critic' %}!{% endif %}{{ m.content }}{% endfor %}"
    )
    assert render(tokenizer, [{"role": "critic", "content": "no"}]) == "!no"


def test_a_printed_role_is_known_if_the_tokenizer_has_a_token_for_it(tmp_path, tokenizer):
    """GLM-4 has `<|observation|>`; ChatML templates would print ShareGPT's `human` as well."""
    tokenizer.chat_template = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    seen = {"role": "observation", "content": ""}
    with pytest.raises(MessageError, match="knows no role 'observation'"):
        check_roles(tokenizer, [*CHAT, seen])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|observation|>"]})
    assert render(tokenizer, [*CHAT, seen]) == "<|user|>hi<|observation|>"
    path = write(tmp_path / "a.jsonl", [{"chat": [*CHAT, seen, ANSWER]}])
    values = ResponsesSection.model_validate({"prompts": path, "messages_key": "chat"})
    assert len(load_examples(values, tokenizer, END).items) == 1


# Arguments of calls as text

AS_TEXT = (  # as DeepSeek's
    "{% for m in messages %}{{ m.role + ': ' + m.content }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.name + '\\n' + c.function.arguments }}{% endfor %}<eos>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.mark.parametrize("arguments", [{"at": "Gründau"}, '{"at": "Gründau"}', "", {}])
def test_arguments_are_text_for_a_template_that_refuses_objects(tmp_path, tokenizer, arguments):
    objects = AS_TEXT.replace("+ c.function.arguments", "~ (c.function.arguments | tojson)")
    called = [ANSWER | {"tool_calls": [{"name": "f", "arguments": arguments}]}]
    found = {"role": "tool", "content": "7"}
    row = {
        "prompt": [*CHAT, *called, found],
        "response": called,
        "chat": [*CHAT, *called, found, ANSWER],
    }
    path = write(tmp_path / "a.jsonl", [row])
    texts = []
    for tokenizer.chat_template in (AS_TEXT, objects):
        (prompt,) = load_prompts(section(path), tokenizer).prompts
        texts.append([prompt.text])
        for more in ({}, {"messages_key": "chat"}):
            values = ResponsesSection.model_validate({"prompts": path} | more)
            (example,) = load_examples(values, tokenizer, END).items
            texts[-1].append(tokenizer.decode(example.response_ids))
    assert texts[0] == texts[1]
    written = '{"at": "Gründau"}' if arguments else "{}"
    assert f"assistant: yof\n{written}<eos>tool: 7" in texts[0][0]


def test_a_template_that_refuses_calls_in_any_form_says_so(tokenizer):
    tokenizer.chat_template = (
        "{% if messages[1].tool_calls %}{{ raise_exception('no') }}{% endif %}"
    )
    call = {"function": {"name": "f", "arguments": {}}}
    with pytest.raises(TemplateError, match="no"):
        render(tokenizer, [*CHAT, {"role": "assistant", "content": "", "tool_calls": [call]}])


PARTS_ONLY = (  # as SmolVLM's
    "{% for m in messages %}{{ m.role }}{% if m.content[0].type == 'image' %}:{% else %}: "
    "{% endif %}{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}"
    "{% endfor %}<eos>\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.mark.parametrize("last", [[], [{"role": "assistant", "content": "The sum is"}]])
def test_texts_become_parts_for_a_template_that_shows_only_parts(tmp_path, tokenizer, last):
    """It would write `user: ` of a text, and the policy would never see the question."""
    messages = [{"role": "system", "content": ""}, *CHAT]
    chat = [*messages, {"role": "assistant", "content": "4"}]
    path = write(
        tmp_path / "a.jsonl", [{"prompt": [*messages, *last], "response": "4", "chat": chat}]
    )
    usual, texts = tokenizer.chat_template, []
    for tokenizer.chat_template in (usual, PARTS_ONLY):
        (prompt,) = load_prompts(section(path), tokenizer).prompts
        text, _ = TurnTokens(tokenizer, END).first([*messages, *last], chat=True)
        texts.append([prompt.text, text])
        for more in ({}, {"messages_key": "chat"}):
            values = ResponsesSection.model_validate({"prompts": path} | more)
            (example,) = load_examples(values, tokenizer, END).items
            texts[-1].append(tokenizer.decode(example.response_ids))
    assert texts[0] == texts[1]
    assert texts[0][0].startswith("system: <eos>\nuser: hi<eos>\n")
    with pytest.raises(MessageError, match="can continue it only if it is a text"):
        render(tokenizer, [*CHAT, {"role": "assistant", "content": ""}], prompting=True)


# An answer that a prompt begins

BEGUN = [*CHAT, {"role": "assistant", "content": "The sum is"}]


@pytest.fixture
def tokenizer(tmp_path):
    made = AutoTokenizer.from_pretrained(tiny_tokenizer(tmp_path / "tokenizer"))
    made.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}<eos>\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    return made


def test_an_answer_that_the_prompt_begins_is_continued(tmp_path, tokenizer):
    """And not closed: `The sum is<eos>` would be answered by a second message."""
    row = {"prompt": BEGUN, "response": " 4"}
    path = write(tmp_path / "a.jsonl", [row])
    (prompt,) = load_prompts(section(path), tokenizer).prompts
    assert prompt.text == "user: hi<eos>\nassistant: The sum is"
    values = ResponsesSection.model_validate({"prompts": path})
    (example,) = load_examples(values, tokenizer, END).items
    assert tokenizer.decode(example.prompt_ids) == prompt.text
    assert tokenizer.decode(example.response_ids) == " 4<eos>"
    text, _ = TurnTokens(tokenizer, END).first(BEGUN, chat=True)
    assert text == prompt.text


@pytest.mark.parametrize("last", [{"content": ""}, {"content": "a", "tool_calls": [{"name": "f"}]}])
def test_an_answer_that_cannot_be_continued_is_refused(tmp_path, tokenizer, last):
    path = write(tmp_path / "a.jsonl", [{"prompt": [*CHAT, {"role": "assistant"} | last]}])
    told = refused(load_prompts, section(path), tokenizer)
    assert (
        "messages.1: the last message is the assistant's, and a response can continue it only"
        in told
    )


# A system message that the template refuses


@pytest.mark.parametrize("key", ["prompt", "chat"])
def test_the_system_prompt_is_blamed_where_the_template_refuses_it(tmp_path, tokenizer, key):
    tokenizer.chat_template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
        + tokenizer.chat_template
    )
    row = {"prompt": CHAT, "response": "yo", "chat": [*CHAT, ANSWER]}
    keys = {"messages_key": "chat"} if key == "chat" else {}

    def load(row: dict[str, Any], **more: Any) -> None:
        values = {"prompts": write(tmp_path / "a.jsonl", [row])} | keys | more
        load_examples(ResponsesSection.model_validate(values), tokenizer, END)

    load(row)
    assert refused(load, row, system_prompt="Be kind.") == (
        "data.system_prompt ('Be kind.'): the tokenizer's chat template refuses a system message: "
        "no system role. Remove it, or write it into the messages of the user."
    )
    own = {"role": "system", "content": "Be kind."}
    told = refused(load, row | {key: [own, *row[key]]})
    assert f"{tmp_path}/a.jsonl:1 begins with a" in told
    assert told.endswith("Write it into the first message of the user.")


def test_tools_are_json_schemas_of_a_chat(tmp_path, tokenizer):
    schema = {"type": "function", "function": {"name": "f"}}
    tokenizer.chat_template = "{{ tools | tojson }}" + tokenizer.chat_template
    rows = [{"prompt": CHAT, "tools": t} for t in ([schema], json.dumps([schema]), None, [])]
    path = write(tmp_path / "a.jsonl", rows)
    one, same, none, empty = load_prompts(section(path, tools_key="tools"), tokenizer).prompts
    assert one.text == same.text
    assert one.text.startswith(json.dumps([schema]))
    assert none.text == empty.text
    for wrong, told in [("{", "is not JSON"), ([3], "Tools must be a list of JSON schemas")]:
        path = write(tmp_path / "b.jsonl", [{"prompt": CHAT, "tools": wrong}])
        assert told in refused(load_prompts, section(path, tools_key="tools"), tokenizer)
    path = write(tmp_path / "c.jsonl", [{"prompt": "q", "tools": [schema]}])
    with pytest.raises(ConfigError, match="cannot describe them"):
        load_prompts(section(path, tools_key="tools"), tokenizer)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_row_without_tools_has_none(tmp_path, tokenizer, kind):
    schema = {"type": "function", "function": {"name": "f"}}
    tokenizer.chat_template = "{{ tools | tojson }}" + tokenizer.chat_template
    row = {"prompt": CHAT, "response": "yo", "chat": [*CHAT, ANSWER]}
    path = write(tmp_path / f"a.{kind}", [row, row | {"tools": [schema]}, row][kind == "parquet" :])
    values: dict[str, Any] = {"prompts": path, "tools_key": "tools"}
    assert peek(path, tools_key="tools")
    texts = [
        each.text for each in load_prompts(section(path, tools_key="tools"), tokenizer).prompts
    ]
    assert [text.startswith("null") for text in texts] == [True, False, True][kind == "parquet" :]
    for more in ({}, {"messages_key": "chat"}):
        given = ResponsesSection.model_validate(values | more)
        assert len(load_examples(given, tokenizer, END).items) == len(texts)


def test_tools_that_no_row_has_are_the_configs_error(tmp_path, tokenizer):
    row = {"prompt": CHAT, "response": "yo", "chat": [*CHAT, ANSWER], "tool": None}
    path = write(tmp_path / "a.jsonl", [row] * 3)
    told = (
        f"data.tools_key (tools): {path} has no such column. It has prompt, response, chat, tool. "
        "Set data.tools_key to tool."
    )
    assert refused(peek, path, tools_key="tools", on_error="drop") == told
    assert refused(load_prompts, section(path, tools_key="tools"), tokenizer) == told
    for more in ({}, {"messages_key": "chat"}):
        values = {"prompts": path, "tools_key": "tools"} | more
        given = ResponsesSection.model_validate(values)
        assert refused(load_examples, given, tokenizer, END) == told
