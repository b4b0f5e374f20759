import pytest
from transformers import AutoTokenizer

from raypo.endpoint.protocol import text_and_calls
from raypo.tools.calls import ToolCall
from tests.tiny import tiny_tokenizer

EOS = 2
ADD = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return AutoTokenizer.from_pretrained(tiny_tokenizer(tmp_path_factory.mktemp("tokenizer")))


MARKED = (
    "<tool_call><function=add><parameter=a>1</parameter></function></tool_call>",
    '[TOOL_CALLS]add[ARGS]{"a": 1}',
    "<|tool_call_start|>[add(a=1)]<|tool_call_end|>",
)
SCHEMA = {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}}}}
TOOLS = [{"type": "function", "function": SCHEMA}]


@pytest.mark.parametrize(
    ("text", "how", "told", "calls"),
    [
        ("a b", {}, "a b", []),  # the end of turn is none of it
        ("one END two", {"stop": ["END", "two"]}, "one ", []),
        ("abcd", {"stop": ["bcd", "c"]}, "a", []),
        ("ENDE", {"stop": ["ENDING"]}, "ENDE", []),
        (f"see: {ADD}", {"tools": []}, "see: ", [ToolCall("add", {"a": 1})]),
        (ADD[11:-12], {"tools": []}, "", [ToolCall("add", {"a": 1})]),
        *(
            (f"see: {each}", {"tools": TOOLS}, "see: ", [ToolCall("add", {"a": 1})])
            for each in MARKED
        ),
        ("see <tool_call>add(1)", {"tools": []}, "see <tool_call>add(1)", []),
        (ADD, {}, ADD, []),
    ],
)
def test_what_is_told_of_a_response(tokenizer, text, how, told, calls):
    ids = [*tokenizer.encode(text), EOS]
    assert text_and_calls(tokenizer, ids, stop_token_ids=[EOS], **how) == (told, calls)
