"""Tool calls are read as vLLM's parsers read them, each of which knows one form."""

import json

import pytest
from transformers import AutoTokenizer

from raypo.tools.calls import MARKS, PYTHON_TAG, parse_tool_calls
from tests.tiny import tiny_tokenizer

SCHEMA = {
    "name": "find",
    "parameters": {
        "type": "object",
        "properties": {
            "text": {"type": "string"},
            "most": {"type": "integer"},
            "exact": {"type": "boolean"},
            "among": {"type": "array", "items": {"type": "string"}},
        },
    },
}
TOOLS = [{"type": "function", "function": SCHEMA}]
ARGUMENTS = '{"text": "a \\"b\\"\\n[c]", "most": -3, "exact": true, "among": ["x", "y"]}'
JSON = f'{{"name": "find", "arguments": {ARGUMENTS}}}'
PYTHON = 'find(text="a \\"b\\"", most=-3, exact=True, among=["x", "y"])'
XML = """<function=find>
<parameter=text>
a "b"

c
</parameter>
<parameter=most>
-3
</parameter>
<parameter=exact>
true
</parameter>
<parameter=among>
["x", "y"]
</parameter>
</function>"""
SAID = [
    ("hermes", f"So:\n<tool_call>\n{JSON}\n</tool_call>\n<tool_call>\n{JSON}\n</tool_call>"),
    ("hermes", f"<tool_call>{JSON}"),
    ("qwen3_coder", f"So:\n<tool_call>\n{XML}\n</tool_call>\n<tool_call>\n{XML}\n</tool_call>"),
    ("qwen3_coder", "<tool_call>\n<function=find>\n</function>\n</tool_call>"),
    ("mistral", f"So:[TOOL_CALLS]find[ARGS]{ARGUMENTS}[TOOL_CALLS]find[ARGS]{{}}"),
    ("llama3_json", JSON.replace("arguments", "parameters")),
    ("llama3_json", f"{PYTHON_TAG}{JSON}"),
    ("pythonic", f"[{PYTHON}, find()]"),
    ("llama4_pythonic", f"<|python_start|>[{PYTHON}]<|python_end|>"),
    ("lfm2", f"<|tool_call_start|>[{PYTHON}, find(text='')]<|tool_call_end|>So."),
]


@pytest.mark.parametrize(("parser", "text"), SAID, ids=[name for name, _ in SAID])
def test_calls_are_those_that_vllm_finds(tmp_path, parser, text):
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    tokenizer = AutoTokenizer.from_pretrained(tiny_tokenizer(tmp_path))
    marks = [*MARKS, "</tool_call>", "[ARGS]", "<|tool_call_end|>", "<|python_end|>", PYTHON_TAG]
    tokenizer.add_tokens(marks, special_tokens=True)
    request = ChatCompletionRequest.model_validate(
        {"model": "any", "messages": [{"role": "user", "content": "."}], "tools": TOOLS}
    )
    theirs = ToolParserManager.get_tool_parser(parser)(tokenizer, [*(request.tools or ())])
    found = [each.function for each in theirs.extract_tool_calls(text, request).tool_calls]
    assert found
    ours = parse_tool_calls(text, TOOLS)
    assert [(each.name, dict(each.arguments)) for each in ours] == [
        (each.name, json.loads(each.arguments)) for each in found
    ]
