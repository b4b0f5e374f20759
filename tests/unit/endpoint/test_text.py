import pytest
from transformers import AutoTokenizer

from raypo.endpoint.text import ResponseText
from raypo.tools.calls import ToolCall
from tests.tiny import tiny_tokenizer

EOS = 2
ADD = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return AutoTokenizer.from_pretrained(tiny_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def told(tokenizer, text: str, *, ends: bool = False, **how) -> tuple[list[str], ResponseText, int]:
    """What is told of a text whose characters come one by one, and how many of them count."""
    response = ResponseText(tokenizer, stop_token_ids=[EOS], **how)
    ids = tokenizer.encode(text) + [EOS] * ends
    pieces, used = [], 0
    for token_id in ids:
        used += response.add([token_id])
        pieces.append(response.news())
        if response.is_stopped:
            break
    return pieces, response, used


def test_text_is_told_as_it_comes_and_the_end_of_turn_is_none_of_it(tokenizer):
    pieces, response, _ = told(tokenizer, "a b", ends=True)
    assert pieces == ["a", " ", "b", ""]
    assert response.finish() == ("", [])


def test_a_stop_string_ends_the_text_before_it_and_is_never_told(tokenizer):
    pieces, response, used = told(tokenizer, "one END two", stop=["END", "two"])
    assert "".join(pieces) + response.finish()[0] == "one "
    assert (response.is_stopped, used) == (True, len("one END"))


def test_what_might_have_been_a_stop_string_is_told_when_it_is_none(tokenizer):
    pieces, response, _ = told(tokenizer, "ENDE", stop=["ENDING"])
    assert pieces == ["", "", "", "END"]
    assert "".join(pieces) + response.finish()[0] == "ENDE"


def test_the_first_of_two_stop_strings_counts(tokenizer):
    _, response, _ = told(tokenizer, "abcd", stop=["bcd", "c"])
    assert response.text == "ab"


def test_a_tool_call_is_held_back_and_handed_out_at_the_end(tokenizer):
    pieces, response, _ = told(tokenizer, f"see: {ADD}", ends=True, tools=[])
    assert "".join(pieces) == "see: "
    assert response.finish() == ("", [ToolCall("add", {"a": 1})])


@pytest.mark.parametrize(
    "call",
    [
        "<tool_call><function=add><parameter=a>1</parameter></function></tool_call>",
        '[TOOL_CALLS]add[ARGS]{"a": 1}',
        "<|tool_call_start|>[add(a=1)]<|tool_call_end|>",
    ],
)
def test_calls_of_every_form_are_held_back(tokenizer, call):
    schema = {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}}}}
    tools = [{"type": "function", "function": schema}]
    pieces, response, _ = told(tokenizer, f"see: {call}", tools=tools)
    assert "".join(pieces) == "see: "
    assert response.finish() == ("", [ToolCall("add", {"a": 1})])


def test_a_call_without_marks_is_held_back_too(tokenizer):
    pieces, response, _ = told(tokenizer, ADD[11:-12], tools=[])
    assert "".join(pieces) == ""
    assert response.finish() == ("", [ToolCall("add", {"a": 1})])


def test_a_malformed_call_is_text(tokenizer):
    pieces, response, _ = told(tokenizer, "see <tool_call>add(1)", tools=[])
    assert "".join(pieces) == "see "
    assert response.finish() == ("<tool_call>add(1)", [])


def test_without_tools_a_call_is_text(tokenizer):
    pieces, response, _ = told(tokenizer, ADD)
    assert "".join(pieces) + response.finish()[0] == ADD
    assert response.finish()[1] == []


def test_all_at_once_is_told_as_one_by_one(tokenizer):
    response = ResponseText(tokenizer, stop=["END"])
    assert response.add(tokenizer.encode("one END two")) == len("one END")
    assert response.finish() == ("one ", [])
