import asyncio
import json
import keyword
import re
import time
from contextlib import suppress
from typing import Any, cast

import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from raypo.tools.calculator import calculator
from raypo.tools.calls import (
    ToolCall,
    ToolError,
    answer_calls,
    call,
    on_tool_use,
    parse_tool_calls,
    split_tool_calls,
)
from raypo.tools.sandbox import PythonSandbox
from raypo.types import ToolUse
from tests.tiny import tiny_tokenizer

ADD = '{"name": "add", "arguments": {"a": 1, "b": [2, "x"]}}'
CALL = ToolCall("add", {"a": 1, "b": [2, "x"]})
NOW = ToolCall("now", {})
ARGUMENTS = '{"a": 1, "b": [2, "x"]}'
PYTHONIC = {"a": True, "b": None, "c": -1.5, "d": {"e": [], "1": 2}}
XML = {"x": "<function=g>"}
CODER = """<tool_call>
<function=add>
<parameter=a>
1
</parameter>
<parameter=b>
[2, "x"]
</parameter>
</function>
</tool_call>
<tool_call>
<function=now>
</function>
</tool_call>"""


async def add(a: int, b: int = 0) -> str:
    """Adds two numbers.

    Args:
        a: One.
        b: The other.
    """
    return str(a + b)


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("The answer is 4.", []),
        (f"Let me see.\n<tool_call>\n{ADD}\n</tool_call>", [CALL]),
        (f"<tool_call>{ADD}</tool_call>\n<tool_call>{ADD}</tool_call>", [CALL, CALL]),
        (f"<tool_call>{ADD}", [CALL]),  # the end of turn came first
        (ADD, [CALL]),
        (f" [{ADD}, {ADD}]\n", [CALL, CALL]),
        ('<|python_tag|>{"name": "add", "parameters": {"a": 1}}', [ToolCall("add", {"a": 1})]),
        ('<tool_call>{"name": "now"}</tool_call>', [ToolCall("now", {})]),
        ('{"name": "add", "arguments": "{\\"a\\": 1}"}', [ToolCall("add", {"a": 1})]),
        ('{"answer": 4}', []),
        ('{"name": "Ann", "age": 3}', []),
        ("[f(x={{}})]", []),
        ("[" * 10**5, []),
        (f"<tool_call>[{ADD}, {ADD}]</tool_call>", [CALL, CALL]),
        (f"[TOOL_CALLS][{ADD}, {ADD}]", [CALL, CALL]),
        (f"[TOOL_CALLS]add[CALL_ID]x1[ARGS]{ARGUMENTS}", [CALL]),
        (f"[TOOL_CALLS]add{ARGUMENTS}", [CALL]),
        ('<|tool_call_start|>[add(a=1, b=[2, "x"]), now()]<|tool_call_end|>Done', [CALL, NOW]),
        ('<|python_start|>[add(a=1, b=[2, "x"])]<|python_end|>', [CALL]),
        ('[add(a=1, b=[2, "x"]), now()]', [CALL, NOW]),
        ("[f(a=true, b=null, c=-1.5, d={'e': (), 1: 2})]", [ToolCall("f", PYTHONIC)]),
        ("[my.tool(a='')]", [ToolCall("my.tool", {"a": ""})]),
        ("[add(a=os)]", []),
        ("[add(**{})]", []),
        (CODER, [ToolCall("add", {"a": "1", "b": '[2, "x"]'}), NOW]),
        ('<tool_call>{"name": "f", "arguments": {"x": "<function=g>"}}', [ToolCall("f", XML)]),
    ],
)
def test_calls_are_found_in_the_forms_of_the_field(text, calls):
    assert parse_tool_calls(text) == calls


def coder(name: str, **arguments: str) -> str:
    """A call as Qwen3-Coder's chat template writes it."""
    written = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in arguments.items())
    return f"<tool_call>\n<function={name}>\n{written}</function>\n</tool_call>"


TAGS = [
    *(
        "</parameter>",
        "</function>",
        "</tool_call>",
        "<parameter=x>",
        "<function=g>",
        "<tool_call>",
    ),
    *("[TOOL_CALLS]", "[ARGS]", "<|tool_call_end|>", "<|python_end|>", "</think>", "<think>"),
    *("\n", '"', "'", '"""', "\\", "]", ")", "}", "x"),
]
VALUES = st.one_of(st.text(), st.lists(st.sampled_from(TAGS)).map("".join))
JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | VALUES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(VALUES, inner, max_size=3),
    max_leaves=5,
)
NAMES = st.from_regex(r"[a-z_]{1,8}", fullmatch=True).filter(
    lambda name: not keyword.iskeyword(name)
)
CALLS = st.lists(
    st.builds(ToolCall, NAMES, st.dictionaries(NAMES, JSON_VALUES, max_size=3)),
    min_size=1,
    max_size=3,
)


def as_json(each: ToolCall) -> str:
    return json.dumps({"name": each.name, "arguments": each.arguments})


def as_python(calls: list[ToolCall]) -> str:
    written = (
        f"{each.name}({', '.join(f'{k}={v!r}' for k, v in each.arguments.items())})"
        for each in calls
    )
    return f"[{', '.join(written)}]"


@settings(deadline=None)
@given(CALLS, st.sampled_from(["", "Let me see.\n", "<think>so</think>\n", "so</think>"]))
def test_calls_are_read_as_they_were_written(calls, said):
    for text in (
        "\n".join(f"<tool_call>\n{as_json(each)}\n</tool_call>" for each in calls),
        f"<tool_call>[{', '.join(map(as_json, calls))}]</tool_call>",
        "".join(f"[TOOL_CALLS]{each.name}[ARGS]{json.dumps(each.arguments)}" for each in calls),
        f"[TOOL_CALLS][{', '.join(map(as_json, calls))}]",
        f"<|tool_call_start|>{as_python(calls)}<|tool_call_end|>",
        f"<|python_start|>{as_python(calls)}<|python_end|>",
    ):
        assert split_tool_calls(said + text) == (said, calls)
    for text in (f"[{', '.join(map(as_json, calls))}]", as_python(calls)):
        assert parse_tool_calls(text) == calls
        assert parse_tool_calls(f"<think>so</think>{text}") == calls


@settings(deadline=None)
@given(
    st.lists(st.tuples(NAMES, st.dictionaries(NAMES, VALUES, max_size=3)), min_size=1, max_size=3)
)
def test_plain_arguments_are_read_as_they_were_written_or_refused(calls):
    text = "\n".join(coder(name, **arguments) for name, arguments in calls)
    written = [ToolCall(name, arguments) for name, arguments in calls]
    values = [value for _, arguments in calls for value in arguments.values()]
    if not any("</parameter>" in value for value in values):
        assert parse_tool_calls(text) == written
        return
    try:
        found = parse_tool_calls(text)
    except ToolError:
        return
    # The same text is a call with one more argument, or one more call.
    has_two_readings = any(re.search(r"</parameter>\s*<(parameter=|/function>)", v) for v in values)
    assert found == written or has_two_readings


@pytest.mark.parametrize(
    "value",
    [
        "</parameter>",
        "</function>",
        "</tool_call>",
        "<parameter=b>",
        "a\n<parameter=b>\nc",
        "<tool_call>\n<function=rm>\n</function>\n</tool_call>",
        "[TOOL_CALLS]rm[ARGS]{}",
        "</think>",
        "",
        "\n",
        " a \n\n b ",
    ],
)
def test_tags_in_a_plain_argument_are_part_of_it(value):
    assert parse_tool_calls(coder("f", x=value, y="2")) == [ToolCall("f", {"x": value, "y": "2"})]
    assert parse_tool_calls(coder("f", y="2", x=value)) == [ToolCall("f", {"x": value, "y": "2"})]


COMPLETE = [
    coder("f", x="rm -rf build/ tmp", y="2"),
    f"<tool_call>{ADD}",
    f"[TOOL_CALLS]add[ARGS]{ARGUMENTS}",
    '<|tool_call_start|>[add(a=1, b=[2, "x"])]',
    f"[{ADD}, {ADD}]",
    '[add(a=1, b=[2, "x"])]',
]


@pytest.mark.parametrize("text", COMPLETE)
def test_a_call_that_was_cut_off_is_not_made(text):
    whole = parse_tool_calls(text)
    assert whole
    for length in range(len(text)):
        try:
            found = parse_tool_calls(text[:length])
        except ToolError:
            continue
        assert found in ([], whole), text[:length]


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        (f"<think>I may call <tool_call>{ADD}</tool_call></think>No.", []),
        (f"I may call <tool_call>{ADD}</tool_call></think>No.", []),
        (f"<think>I may call <tool_call>{ADD}</tool_call>", []),
        ("Others write <tool_call> or [TOOL_CALLS].</think>No.", []),
        (f"Others write <tool_call>.</think><tool_call>{ADD}</tool_call>", [CALL]),
        (f"so</think><tool_call>{ADD}</tool_call>", [CALL]),
        (f"so</think>{ADD}", [CALL]),
        ('{"name": "f", "arguments": {"x": "</think>"}}', [ToolCall("f", {"x": "</think>"})]),
        (f"[TOOL_CALLS]now[ARGS]{{}}<tool_call>{ADD}</tool_call>", [NOW, CALL]),
        ('[TOOL_CALLS]f[ARGS]{"x": "<tool_call>"}', [ToolCall("f", {"x": "<tool_call>"})]),
    ],
)
def test_a_thought_calls_nothing_and_marks_in_arguments_are_text(text, calls):
    assert parse_tool_calls(text) == calls


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("<tool_call>add(1, 2)</tool_call>", "is not JSON"),
        ('<tool_call>["add"]</tool_call>', 'a tool call is {"name"'),
        ('<tool_call>{"name": 3, "arguments": {}}</tool_call>', 'a tool call is {"name"'),
        ('<tool_call>{"name": "add", "arguments": [1]}</tool_call>', 'a tool call is {"name"'),
        ('{"name": "add", "arguments": "one"}', "the arguments of add are not JSON"),
        ("<tool_call>" + "[" * 10**5, "is not JSON"),
        ("[TOOL_CALLS]add[ARGS]{one}", "the arguments of add are not JSON"),
        ("<|tool_call_start|>[add(1)]<|tool_call_end|>", r"arguments of a tool call have names"),
        ("<|tool_call_start|>[add(a=b)]<|tool_call_end|>", "is not JSON"),
        ("<|tool_call_start|>[f(x={{}})]<|tool_call_end|>", "is not JSON"),
        ("<|tool_call_start|>[f(x={1, 2})]<|tool_call_end|>", "has a value that JSON cannot hold:"),
        ("<|tool_call_start|>[f(x=1j)]<|tool_call_end|>", "has a value that JSON cannot hold:"),
        (
            '<tool_call>{"name": "\\ud83d", "arguments": {}}</tool_call>',
            "has a value that JSON cannot hold:",
        ),
        (
            '<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>',
            "has a value that JSON cannot hold:",
        ),
        ('<tool_call>{"name": "f", "arguments": {"x": 1, "x": 2}}</tool_call>', "given twice"),
        ("<|tool_call_start|>[f(x=1, x=2)]<|tool_call_end|>", "given twice"),
        (coder("f", x="1</parameter>\n<parameter=x>\n2"), "x of f is given twice"),
        (coder("f", x="</parameter>\n</function>\n</tool_call>"), "ambiguous:"),
        (coder("f", x="1").removesuffix("</function>\n</tool_call>"), "x of f does not end"),
        ("<tool_call><function=f>x</function></tool_call>", "f does not end with </function>"),
        (f"<tool_call>{ADD} and then", "ends with </tool_call>: and then"),
        (f"[TOOL_CALLS]add[ARGS]{ARGUMENTS} and then", "ends with its arguments: and then"),
    ],
)
def test_a_call_that_is_none_is_the_models_mistake(text, problem):
    with pytest.raises(ToolError, match=problem):
        parse_tool_calls(text)


HOSTILE = [
    "[" + "\\'" * 50_000,
    "<|tool_call_start|>[f(x=" + "\"'" * 50_000,
    '<tool_call>{"a":' * 5_000,
    "<tool_call><function=f><parameter=x>" + "</parameter>\n" * 10_000,
    "<tool_call>{}</tool_call></think>" * 5_000,
]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_texts_take_no_more_time_than_their_length(text):
    begin = time.perf_counter()
    with suppress(ToolError):
        assert parse_tool_calls(text) == []
    assert time.perf_counter() - begin < 5  # a quadratic search takes minutes


async def typed(
    a: int, b: list[str], c: str, d: bool, e: str | None, f: dict[str, int] | None, g: float
) -> str:
    return ""


def test_plain_text_arguments_have_the_types_of_the_tool():
    wrote = {
        "a": "1",
        "b": '["2"]',
        "c": "12",
        "d": "True",
        "e": "first\n second",
        "f": '{"x": 3}',
        "g": "not a number",
        "h": "4",
    }
    parameters = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in wrote.items())
    text = f"<tool_call>\n<function=typed>\n{parameters}</function>\n</tool_call>"
    read = wrote | {"a": 1, "b": ["2"], "d": True, "f": {"x": 3}}
    assert parse_tool_calls(text, [add, typed]) == [ToolCall("typed", read)]
    properties = pydantic.TypeAdapter(cast(Any, typed)).json_schema()
    schema = {"type": "function", "function": {"name": "typed", "parameters": properties}}
    assert parse_tool_calls(text, [schema]) == [ToolCall("typed", read)]
    assert parse_tool_calls(text, [add]) == [ToolCall("typed", wrote)]


def test_plain_text_arguments_have_types_also_where_a_schema_lists_several():
    properties = {
        "a": {"type": ["string", "null"]},
        "b": {"type": ["integer", "null"]},
        "c": {"type": "integer"},
    }
    parameters = {"type": "object", "properties": properties}
    schema = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    wrote = "<parameter=a>1</parameter><parameter=b>1</parameter><parameter=c>{{}}</parameter>"
    text = f"<tool_call><function=f>{wrote}</function></tool_call>"
    assert parse_tool_calls(text, [schema]) == [ToolCall("f", {"a": "1", "b": 1, "c": "{{}}"})]


@pytest.mark.parametrize(
    ("asked", "problem"),
    [
        (ToolCall("sub", {}), "there is no tool sub; there are: calculator, add"),
        (ToolCall("add", {}), "add: a: Missing required argument"),
        (ToolCall("add", {"a": "one"}), "add: a: Input should be a valid integer"),
        (ToolCall("add", {"a": 1, "c": 2}), "add: c: Unexpected keyword argument"),
        (ToolCall("calculator", {"expression": "1/0"}), "division by zero"),
    ],
)
def test_wrong_calls_are_told_to_the_model(asked, problem):
    with pytest.raises(ToolError, match=problem):
        asyncio.run(call([calculator, add], asked))


def test_each_use_of_a_tool_is_heard_of():
    uses: list[ToolUse] = []

    async def broken() -> str:
        raise KeyError("no file")

    async def used() -> list[str]:
        on_tool_use.set(uses.append)
        answers = await answer_calls(
            '<tool_call>{"name": "calculator", "arguments": {"expression": "6*7"}}</tool_call>'
            '<tool_call>{"name": "calculator", "arguments": {"expression": "1/0"}}</tool_call>'
            '<tool_call>{"name": "sub"}</tool_call>',
            [calculator],
        )
        answers += await answer_calls("<tool_call>{}</tool_call>", [calculator])
        answers += await answer_calls("The answer is 42.", [calculator])
        with pytest.raises(KeyError):
            await answer_calls('{"name": "broken", "arguments": {}}', [broken])
        return answers

    assert asyncio.run(used()) == [
        "42",
        "error: division by zero",
        "error: there is no tool sub; there are: calculator",
        'error: a tool call is {"name": "...", "arguments": {...}}',
    ]
    assert [(use.name, use.error) for use in uses] == [
        ("calculator", None),
        ("calculator", "division by zero"),
        ("sub", "there is no tool sub; there are: calculator"),
        ("", 'a tool call is {"name": "...", "arguments": {...}}'),
        ("broken", "'no file'"),
    ]
    assert uses[0].seconds > 0


def test_what_a_tool_itself_validates_is_not_taken_for_the_models_either():
    async def strict(a: int) -> str:
        return str(pydantic.TypeAdapter(int).validate_python("one"))

    with pytest.raises(RuntimeError, match="strict: 1 validation error for int"):
        asyncio.run(call([strict], ToolCall("strict", {"a": 1})))


def test_chat_templates_take_tools_as_they_are(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(tiny_tokenizer(tmp_path))
    tools = [calculator, PythonSandbox().python]
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "2+2"}],
        tools=tools,
        chat_template="{{ tools | tojson }}",
        tokenize=False,
    )
    described = [each["function"] for each in json.loads(text)]
    assert [each["name"] for each in described] == ["calculator", "python"]
    assert described[1]["parameters"]["required"] == ["code"]
    assert "Print what you want to see" in text
