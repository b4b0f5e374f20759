"""Tool calls in a model's text, and who answers them.

A tool is an async function, or a method, whose types and docstring (in Google's style) describe its
arguments: chat templates take it as it is (`tokenizer.apply_chat_template(..., tools=[tool])`). It
answers with a text for the model, and raises `ToolError` for what the model did wrong.
"""

from __future__ import annotations

import ast
import json
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import wraps
from typing import Any, cast

import pydantic

from raypo.custom.errors import text_of
from raypo.types import ToolUse

Tool = Callable[..., Awaitable[str]]
Tools = Sequence[Tool | Mapping[str, Any]]
"""Tools, or their JSON schemas."""

MARKS = {
    "<tool_call>": "</tool_call>",  # Hermes, Qwen, SmolLM
    "[TOOL_CALLS]": r"(?=\[TOOL_CALLS\])",  # Mistral
    "<|tool_call_start|>": r"<\|tool_call_end\|>",  # LFM2
    "<|python_start|>": r"<\|python_end\|>",  # Llama 4
}
"""What tool calls begin with -> a pattern of what ends them, where the response does not."""
PYTHON_TAG = "<|python_tag|>"
"""What Llama 3 may write before a call."""
_FUNCTION = re.compile(r"<function=([^>]+)>(.*?)(?:</function>|$)", re.DOTALL)
_PARAMETER = re.compile(
    r"<parameter=([^>]+)>\n?(.*?)\n?(?:</parameter>|(?=<parameter=)|$)", re.DOTALL
)
_NAMED = re.compile(r"([\w.-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*(\{.*)", re.DOTALL)
_NO_PYTHON = (SyntaxError, ValueError, TypeError, RecursionError, MemoryError)
"""What Python's parser raises of a text; TypeError where a dictionary is a key."""
_CONSTANTS = {"true": True, "false": False, "null": None}
heard: ContextVar[Callable[[ToolUse], None]] = ContextVar("heard", default=lambda use: None)
"""Hears of each use of a tool; an episode has its own."""


class ToolError(Exception):
    """What a model did wrong with a tool; its text is the tool's answer."""


@dataclass(frozen=True)
class ToolCall:
    """A tool's name and its arguments, as the model wrote them."""

    name: str
    arguments: Mapping[str, Any]


def parse_tool_calls(text: str, tools: Tools = ()) -> list[ToolCall]:
    """The tool calls in a response, in order; none where it does not call any.

    Known by their marks are the forms of Hermes and Qwen (JSON in `<tool_call>`, also a list of
    calls as SmolLM2 writes it), Qwen3-Coder (`<function=...>` there), Mistral (`[TOOL_CALLS]`) and
    LFM2 (`<|tool_call_start|>[f(x=1)]`). Without marks a response is a call where it is nothing
    else: JSON as Llama 3 writes it, a list of Python's calls as Llama 4 does. Marks may be special
    tokens, so the text is one that was decoded with them.

    Args:
        text: The response.
        tools: That the model was told of. Qwen3-Coder writes arguments as plain text: by these
            they become numbers, lists and so on.

    Raises:
        ToolError: a call has begun and has none of these forms.
    """
    for opening, closing in MARKS.items():
        if opening in text:
            bodies = re.findall(rf"{re.escape(opening)}(.*?)(?:{closing}|$)", text, re.DOTALL)
            return [each for body in bodies for each in _marked(body.strip(), tools)]
    bare = text.strip().removeprefix(PYTHON_TAG)
    found = []
    if bare.startswith(("{", "[")):
        with suppress(ToolError):
            found = _objects(bare)
    keys = [set(each) if isinstance(each, dict) else set() for each in found]
    if not all("name" in own and own & {"arguments", "parameters"} for own in keys):
        return []  # an answer in JSON may have a name too
    return [_call(each) for each in found]


async def call(tools: Sequence[Tool], asked: ToolCall) -> str:
    """The answer of the tool that a call names; in an episode the use is recorded.

    Raises:
        ToolError: there is no such tool, the arguments are not its own, or it says so.
    """
    begin, error = time.perf_counter(), None
    try:
        return await _answer(tools, asked)
    except BaseException as failure:
        error = text_of(failure) or type(failure).__name__
        raise
    finally:
        heard.get()(ToolUse(asked.name, time.perf_counter() - begin, error))


async def _answer(tools: Sequence[Tool], asked: ToolCall) -> str:
    named = {tool.__name__: tool for tool in tools}
    if asked.name not in named:
        raise ToolError(f"there is no tool {asked.name}; there are: {', '.join(named)}")
    tool = named[asked.name]

    @wraps(tool)
    async def answered(*args: Any, **kwargs: Any) -> str:
        try:
            return await tool(*args, **kwargs)
        except pydantic.ValidationError as error:  # of its own, no mistake of the model's
            raise RuntimeError(f"{asked.name}: {error}") from error

    try:
        return await pydantic.validate_call(answered)(**asked.arguments)
    except pydantic.ValidationError as error:
        wrong = "; ".join(
            f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()
        )
        raise ToolError(f"{asked.name}: {wrong}") from None


async def answer_calls(response: str, tools: Sequence[Tool]) -> list[str]:
    """The tools' answers to the calls in a response; empty where it calls none.

    What the model did wrong is an answer too: `error: ...`.
    """
    try:
        calls = parse_tool_calls(response, tools)
    except ToolError as error:
        heard.get()(ToolUse("", 0.0, str(error)))
        return [f"error: {error}"]
    answers = []
    for each in calls:
        try:
            answers.append(await call(tools, each))
        except ToolError as error:
            answers.append(f"error: {error}")
    return answers


def _marked(body: str, tools: Tools) -> list[ToolCall]:
    """The calls between two marks."""
    if body.startswith("<function="):
        return [
            _call({"name": name, "arguments": _typed(dict(found), _parameters(name, tools))})
            for name, text in _FUNCTION.findall(body)
            for found in [_PARAMETER.findall(text)]
        ]
    if named := _NAMED.fullmatch(body):
        return [_call({"name": named[1], "arguments": named[2]})]
    return [_call(each) for each in _objects(body)]


def _objects(text: str) -> list[Any]:
    """JSON, an object or a list of them, or a list of Python's calls as such objects."""
    try:
        found = json.loads(text)
        return found if isinstance(found, list) else [found]
    except (ValueError, RecursionError) as error:
        with suppress(*_NO_PYTHON):
            match ast.parse(text, mode="eval").body:
                case ast.List(elts=calls) if all(isinstance(each, ast.Call) for each in calls):
                    return [_of_python(each) for each in calls]  # pyright: ignore
        raise ToolError(f"a tool call is not JSON: {error}") from None


def _of_python(call: ast.Call) -> dict[str, Any]:
    if call.args or not all(each.arg for each in call.keywords):
        raise ToolError(f"arguments of a tool call have names: {ast.unparse(call):.100}")
    return {
        "name": ast.unparse(call.func),
        "arguments": {str(each.arg): _literal(each.value) for each in call.keywords},
    }


def _literal(node: ast.expr) -> Any:
    if isinstance(node, ast.Name) and node.id in _CONSTANTS:
        return _CONSTANTS[node.id]
    return ast.literal_eval(node)


def _parameters(name: str, tools: Tools) -> Mapping[str, Any]:
    """The JSON schemas of a tool's arguments, as far as they are known."""
    for tool in tools:
        if isinstance(tool, Mapping):
            described = tool.get("function", tool)
            if described.get("name") == name:
                return (described.get("parameters") or {}).get("properties", {})
        elif tool.__name__ == name:
            return pydantic.TypeAdapter(cast(Any, tool)).json_schema().get("properties", {})
    return {}


def _typed(arguments: dict[str, str], schemas: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments that were written as plain text."""
    typed: dict[str, Any] = dict(arguments)
    for name, text in arguments.items():
        schema = schemas.get(name, {})
        kinds = [each.get("type", []) for each in (schema, *schema.get("anyOf", ()))]
        kinds = {kind for own in kinds for kind in ([own] if isinstance(own, str) else own)}
        if not kinds or "string" in kinds:
            continue
        for read in (ast.literal_eval, json.loads):
            with suppress(*_NO_PYTHON):
                typed[name] = read(text)
    return typed


def _call(found: Any) -> ToolCall:
    arguments = None
    if isinstance(found, dict) and isinstance(found.get("name"), str):
        arguments = found.get("arguments", found.get("parameters", {}))
        if isinstance(arguments, str):  # some models quote them
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError) as error:
                raise ToolError(f"the arguments of {found['name']} are not JSON: {error}") from None
    if not isinstance(arguments, dict):
        raise ToolError('a tool call is {"name": "...", "arguments": {...}}')
    try:  # as whoever reads JSON gets it
        told = json.dumps([found["name"], arguments], ensure_ascii=False, allow_nan=False)
        return ToolCall(*json.loads(told.encode()))
    except (ValueError, TypeError, RecursionError) as error:
        raise ToolError(f"a tool call has what JSON does not: {error}") from None
