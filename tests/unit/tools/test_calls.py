import asyncio
import json

import pydantic
import pytest
from transformers import AutoTokenizer

from raypo.tools.calculator import calculator
from raypo.tools.calls import ToolCall, ToolError, call, parse_tool_calls
from raypo.tools.sandbox import PythonSandbox
from tests.tiny import tiny_tokenizer

ADD = '{"name": "add", "arguments": {"a": 1, "b": [2, "x"]}}'
CALL = ToolCall("add", {"a": 1, "b": [2, "x"]})


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
        ("", []),
        (f"Let me see.\n<tool_call>\n{ADD}\n</tool_call>", [CALL]),
        (f"<tool_call>{ADD}</tool_call>\n<tool_call>{ADD}</tool_call>", [CALL, CALL]),
        (f"<tool_call>{ADD}", [CALL]),  # the end of turn came first
        (ADD, [CALL]),
        (f" [{ADD}, {ADD}]\n", [CALL, CALL]),
        ('<|python_tag|>{"name": "add", "parameters": {"a": 1}}', [ToolCall("add", {"a": 1})]),
        ('<tool_call>{"name": "now"}</tool_call>', [ToolCall("now", {})]),
        ('{"name": "add", "arguments": "{\\"a\\": 1}"}', [ToolCall("add", {"a": 1})]),
        ('{"answer": 4}', []),
        ("[1, 2]", []),
        ("{not json}", []),
        ("[" * 10**5, []),
    ],
)
def test_calls_are_found_in_the_forms_of_hermes_and_llama(text, calls):
    assert parse_tool_calls(text) == calls


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("<tool_call>add(1, 2)</tool_call>", "is not JSON"),
        ("<tool_call></tool_call>", "is not JSON"),
        ('<tool_call>["add"]</tool_call>', 'a tool call is {"name"'),
        ('<tool_call>{"name": 3, "arguments": {}}</tool_call>', 'a tool call is {"name"'),
        ('<tool_call>{"name": "add", "arguments": [1]}</tool_call>', 'a tool call is {"name"'),
        ('{"name": "add", "arguments": "one"}', "is not JSON"),
        ("<tool_call>" + "[" * 10**5, "is not JSON"),
    ],
)
def test_a_call_that_is_none_is_the_models_mistake(text, problem):
    with pytest.raises(ToolError, match=problem):
        parse_tool_calls(text)


def test_a_tool_is_called_with_its_arguments():
    assert asyncio.run(call([calculator, add], ToolCall("add", {"a": 1, "b": 2}))) == "3"


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


def test_an_error_of_a_tool_itself_is_not_taken_for_the_models():
    async def broken(a: int) -> str:
        return str(a / 0)

    with pytest.raises(ZeroDivisionError):
        asyncio.run(call([broken], ToolCall("broken", {"a": 1})))


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
