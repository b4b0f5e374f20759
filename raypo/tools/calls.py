"""Parsing of tool calls in a model's text, and their execution.

A tool is an async function or method. Its types and its docstring (in Google's style) describe the
arguments, so chat templates accept it directly
(`tokenizer.apply_chat_template(..., tools=[tool])`). A tool returns a string for the model, and
raises `ToolError` for mistakes of the model.
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
    "[TOOL_CALLS]": "",  # Mistral
    "<|tool_call_start|>": "<|tool_call_end|>",  # LFM2
    "<|python_start|>": "<|python_end|>",  # Llama 4
}
"""Closing mark of a tool call, by opening mark. An empty string means no closing mark. A call also
ends at the next opening mark, or with the response."""
PYTHON_TAG = "<|python_tag|>"
"""Tag that Llama 3 may write before a call."""
_MARK = re.compile("|".join(map(re.escape, MARKS)))
_SPACE = re.compile(r"\s*")
_NAME = re.compile(r"([\w.-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*(?=\{)")
_FUNCTION = re.compile(r"<function=([^>\n]+)>\s*")
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?")
# A value is written verbatim and may contain any of these tags. Its closing tag therefore counts
# only if the rest of the call follows it.
_VALUE_END = re.compile(
    r"\n?</parameter>\s*(?=<parameter=[^>\n]+>|</function>\s*(?:</tool_call>|<function=|\Z))"
)
_STRAY = re.compile(r"</parameter>|</function>|</tool_call>|<parameter=")
_PYTHON = re.compile(
    r"""(?P<text>\"{3}.*?\"{3}|'{3}.*?'{3}|"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')
    |(?P<open>[(\[{])|[)\]}]|(?P<unclosed>["'])""",
    re.DOTALL | re.VERBOSE,
)
_PYTHON_ERRORS = (SyntaxError, ValueError, TypeError, RecursionError, MemoryError)
"""Errors of Python's parser. TypeError means that a dictionary is used as a key."""
_CONSTANTS = {"true": True, "false": False, "null": None}
on_tool_use: ContextVar[Callable[[ToolUse], None]] = ContextVar(
    "on_tool_use", default=lambda use: None
)
"""Callback for each use of a tool. Each episode sets its own callback."""


class ToolError(Exception):
    """A model's mistake in a tool call. The message is returned to the model."""


@dataclass(frozen=True)
class ToolCall:
    """Name and arguments of a tool call, as the model wrote them."""

    name: str
    arguments: Mapping[str, Any]


def parse_tool_calls(text: str, tools: Tools = ()) -> list[ToolCall]:
    """Return the tool calls in a response, in order.

    These formats with marks are recognised:

    - Hermes and Qwen: JSON in `<tool_call>`, or a list of calls as SmolLM2 writes it;
    - Qwen3-Coder: `<function=...>` inside `<tool_call>`;
    - Mistral: `[TOOL_CALLS]`;
    - LFM2: `<|tool_call_start|>[f(x=1)]`.

    Without marks, a response is a call only if it contains nothing else: JSON as Llama 3 writes it,
    or a list of Python calls as Llama 4 writes it. Marks may be special tokens, so decode the text
    with special tokens. Calls in a thought, before `</think>`, are ignored.

    Args:
        text: The response, decoded with special tokens.
        tools: Tools offered to the model. Qwen3-Coder writes arguments as plain text; the tools'
            schemas convert them to numbers, lists and so on.

    Raises:
        ToolError: a call has none of these formats, is cut off, repeats an argument, or is
            ambiguous.
    """
    return split_tool_calls(text, tools)[1]


def split_tool_calls(text: str, tools: Tools = ()) -> tuple[str, list[ToolCall]]:
    """Split a response into the text before its first tool call, and the calls.

    See `parse_tool_calls` for the arguments and errors.
    """
    if bare_calls := _bare_calls(text):
        return "", bare_calls
    thought, tag, remainder = text.partition("</think>")
    opens_thought = thought.lstrip().startswith("<think>")
    if not tag and not opens_thought:
        return _split(text, 0, tools)
    if not opens_thought and not _can_split(thought, tools):
        # If `</think>` is inside an argument, the whole response parses. Otherwise the prompt
        # opened the think block, and that block contains the tag of a tool call.
        with suppress(ToolError):
            return _split(text, 0, tools)
    return _split(text, len(text) - len(remainder), tools)


def _can_split(text: str, tools: Tools) -> bool:
    with suppress(ToolError):
        _split(text, 0, tools)
        return True
    return False


def _split(text: str, start: int, tools: Tools) -> tuple[str, list[ToolCall]]:
    """Split a response like `split_tool_calls`, ignoring calls before `start`."""
    if bare_calls := _bare_calls(text[start:]):
        return text[:start], bare_calls
    calls, offset, first_mark, can_end_early = [], start, None, False
    while True:
        mark = _MARK.search(text, offset)
        # If a value contains the same tags as the call, the call may have been closed too early.
        # The real closing tags then remain.
        if can_end_early and _STRAY.search(text[offset : mark.start() if mark else len(text)]):
            raise ToolError("a tool call is ambiguous: its tags also occur in a value")
        if mark is None:
            return text[:first_mark], calls
        first_mark = mark.start() if first_mark is None else first_mark
        can_end_early = text.startswith("<function=", _skip_space(text, mark.end()))
        new_calls, offset = _parse_calls(text, mark.end(), MARKS[mark[0]], tools)
        calls += new_calls


def _bare_calls(text: str) -> list[ToolCall]:
    text = text.strip().removeprefix(PYTHON_TAG).lstrip()
    objects = []
    if text.startswith(("{", "[")):
        with suppress(ToolError):
            objects, end = _parse_objects(text, 0)
            objects = objects if end == len(text) else []
    for item in objects:
        keys = set(item) if isinstance(item, dict) else set()
        if "name" not in keys or not keys & {"arguments", "parameters"}:
            return []  # not a call, although the JSON may have a `name`
    return [_to_tool_call(item) for item in objects]


async def call(tools: Sequence[Tool], tool_call: ToolCall) -> str:
    """Run the tool that a call names, and return its result.

    The callback `on_tool_use` gets the use of the tool, also if the call fails.

    Raises:
        ToolError: there is no such tool, its arguments are invalid, or the tool raises it.
    """
    started_at, error = time.perf_counter(), None
    try:
        return await _run_tool(tools, tool_call)
    except BaseException as failure:
        error = text_of(failure) or type(failure).__name__
        raise
    finally:
        on_tool_use.get()(ToolUse(tool_call.name, time.perf_counter() - started_at, error))


async def _run_tool(tools: Sequence[Tool], tool_call: ToolCall) -> str:
    tools_by_name = {tool.__name__: tool for tool in tools}
    if tool_call.name not in tools_by_name:
        raise ToolError(f"there is no tool {tool_call.name}; there are: {', '.join(tools_by_name)}")
    tool = tools_by_name[tool_call.name]

    @wraps(tool)
    async def run_validated(*args: Any, **kwargs: Any) -> str:
        try:
            return await tool(*args, **kwargs)
        except pydantic.ValidationError as error:  # an error inside the tool, not of the model
            raise RuntimeError(f"{tool_call.name}: {error}") from error

    try:
        return await pydantic.validate_call(run_validated)(**tool_call.arguments)
    except pydantic.ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(map(str, detail['loc']))}: {detail['msg']}" for detail in error.errors()
        )
        raise ToolError(f"{tool_call.name}: {problems}") from None


async def answer_calls(response: str, tools: Sequence[Tool]) -> list[str]:
    """Run the tool calls in a response, and return their results. Without calls, the list is empty.

    If the model made a mistake, the result is `error: ...`.
    """
    try:
        calls = parse_tool_calls(response, tools)
    except ToolError as error:
        on_tool_use.get()(ToolUse("", 0.0, str(error)))
        return [f"error: {error}"]
    results = []
    for tool_call in calls:
        try:
            results.append(await call(tools, tool_call))
        except ToolError as error:
            results.append(f"error: {error}")
    return results


def _parse_calls(text: str, offset: int, closing: str, tools: Tools) -> tuple[list[ToolCall], int]:
    """Parse the calls after an opening mark. Return them and the offset after the closing mark."""
    offset = _skip_space(text, offset)
    if text.startswith("<function=", offset):
        objects, offset = _parse_functions(text, offset, tools)
    elif name_match := _NAME.match(text, offset):
        arguments, offset = _parse_json(
            text, name_match.end(), f"the arguments of {name_match[1]} are"
        )
        objects = [{"name": name_match[1], "arguments": arguments}]
    else:
        objects, offset = _parse_objects(text, offset)
    offset = _skip_space(text, offset)
    if closing and text.startswith(closing, offset):
        offset += len(closing)
    elif offset < len(text) and not _MARK.match(text, offset):
        raise ToolError(f"a tool call ends with {closing or 'its arguments'}: {text[offset:]:.100}")
    return [_to_tool_call(item) for item in objects], offset


def _parse_functions(text: str, offset: int, tools: Tools) -> tuple[list[Any], int]:
    """Parse calls in Qwen3-Coder's format."""
    objects: list[Any] = []
    while function := _FUNCTION.match(text, offset):
        name, offset, arguments = function[1], function.end(), {}
        while parameter := _PARAMETER.match(text, offset):
            value_start, key = parameter.end(), parameter[1]
            end = _VALUE_END.search(text, value_start)
            if end is None:
                raise ToolError(f"the argument {key} of {name} does not end with </parameter>")
            if key in arguments:
                raise ToolError(f"the argument {key} of {name} is given twice")
            arguments[key], offset = text[value_start : end.start()], end.end()
        if not text.startswith("</function>", offset):
            raise ToolError(f"the call of {name} does not end with </function>")
        offset = _skip_space(text, offset + len("</function>"))
        objects.append(
            {"name": name, "arguments": _convert_types(arguments, _parameter_schemas(name, tools))}
        )
    return objects, offset


def _parse_objects(text: str, offset: int) -> tuple[list[Any], int]:
    """Parse a JSON object, a list of objects, or a list of Python calls, into a list of objects."""
    try:
        value, end = _parse_json(text, offset, "a tool call is")
        return (value if isinstance(value, list) else [value]), end
    except ToolError:
        if (end := _end_of_list(text, offset)) is not None:
            with suppress(*_PYTHON_ERRORS):
                match ast.parse(text[offset:end], mode="eval").body:
                    case ast.List(elts=calls) if all(isinstance(node, ast.Call) for node in calls):
                        return [_python_call(node) for node in calls], end  # pyright: ignore
        raise


def _parse_json(text: str, offset: int, subject: str) -> tuple[Any, int]:
    try:
        return json.JSONDecoder(object_pairs_hook=_refuse_repeated_keys).raw_decode(text, offset)
    except (ValueError, RecursionError) as error:
        raise ToolError(f"{subject} not JSON: {error}") from None


def _refuse_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError(f"a key is given twice: {', '.join(key for key, _ in pairs):.100}")
    return values


def _end_of_list(text: str, offset: int) -> int | None:
    """Return the end of the Python list that starts at `offset`, or None if it is incomplete."""
    depth = 0
    for part in _PYTHON.finditer(text, offset) if text.startswith("[", offset) else ():
        if part["unclosed"]:
            return None
        if part["text"] is None:
            depth += 1 if part["open"] else -1
        if depth == 0:
            return part.end()
    return None


def _skip_space(text: str, offset: int) -> int:
    return _SPACE.match(text, offset).end()  # pyright: ignore[reportOptionalMemberAccess]


def _python_call(call: ast.Call) -> dict[str, Any]:
    names = [keyword.arg for keyword in call.keywords]
    if call.args or not all(names):
        raise ToolError(f"arguments of a tool call have names: {ast.unparse(call):.100}")
    if len(set(names)) < len(names):
        raise ToolError(f"an argument is given twice: {ast.unparse(call):.100}")
    return {
        "name": ast.unparse(call.func),
        "arguments": {str(keyword.arg): _literal(keyword.value) for keyword in call.keywords},
    }


def _literal(node: ast.expr) -> Any:
    if isinstance(node, ast.Name) and node.id in _CONSTANTS:
        return _CONSTANTS[node.id]
    return ast.literal_eval(node)


def _parameter_schemas(name: str, tools: Tools) -> Mapping[str, Any]:
    """Return the JSON schemas of a tool's arguments. Empty if the tool is unknown."""
    for tool in tools:
        if isinstance(tool, Mapping):
            schema = tool.get("function", tool)
            if schema.get("name") == name:
                return (schema.get("parameters") or {}).get("properties", {})
        elif tool.__name__ == name:
            return pydantic.TypeAdapter(cast(Any, tool)).json_schema().get("properties", {})
    return {}


def _convert_types(arguments: dict[str, str], schemas: Mapping[str, Any]) -> dict[str, Any]:
    """Convert arguments from plain text to the types in their schemas."""
    values: dict[str, Any] = dict(arguments)
    for name, text in arguments.items():
        schema = schemas.get(name, {})
        types = [part.get("type", []) for part in (schema, *schema.get("anyOf", ()))]
        types = {
            name
            for type_names in types
            for name in ([type_names] if isinstance(type_names, str) else type_names)
        }
        if not types or "string" in types:
            continue
        for parse in (ast.literal_eval, json.loads):
            with suppress(*_PYTHON_ERRORS):
                values[name] = parse(text)
    return values


def _to_tool_call(value: Any) -> ToolCall:
    arguments = None
    if isinstance(value, dict) and isinstance(value.get("name"), str):
        arguments = value.get("arguments", value.get("parameters", {}))
        if isinstance(arguments, str):  # some models quote the arguments
            subject, text = f"the arguments of {value['name']} are", arguments.strip()
            arguments, end = _parse_json(text, 0, subject)
            if end < len(text):
                raise ToolError(f"{subject} not JSON alone: {text[end:]:.100}")
    if not isinstance(arguments, dict):
        raise ToolError('a tool call is {"name": "...", "arguments": {...}}')
    try:  # convert to plain JSON values
        encoded = json.dumps([value["name"], arguments], ensure_ascii=False, allow_nan=False)
        return ToolCall(*json.loads(encoded.encode()))
    except (ValueError, TypeError, RecursionError) as error:
        raise ToolError(f"a tool call has a value that JSON cannot hold: {error}") from None
