"""Tool calls in a model's text, and who answers them.

A tool is an async function, or a method, whose types and docstring (in Google's style) describe its
arguments: chat templates take it as it is (`tokenizer.apply_chat_template(..., tools=[tool])`). It
answers with a text for the model, and raises `ToolError` for what the model did wrong.
"""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

import pydantic

Tool = Callable[..., Awaitable[str]]

CALL = "<tool_call>"
"""What a call of Hermes and Qwen begins with."""
_HERMES = re.compile(CALL + r"(.*?)(?:</tool_call>|$)", re.DOTALL)


class ToolError(Exception):
    """What a model did wrong with a tool; its text is the tool's answer."""


@dataclass(frozen=True)
class ToolCall:
    """A tool's name and its arguments, as the model wrote them."""

    name: str
    arguments: Mapping[str, Any]


def parse_tool_calls(text: str) -> list[ToolCall]:
    """The tool calls in a response, in order; none where it does not call any.

    Two forms are known: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as many as
    there are (Hermes, Qwen), and a response that is nothing but such an object or a list of them
    (Llama 3, where `arguments` may be called `parameters`).

    Raises:
        ToolError: a call has begun and is not such an object.
    """
    if CALL in text:
        return [_call(_json(body)) for body in _HERMES.findall(text)]
    bare = text.strip().removeprefix("<|python_tag|>")
    if not bare.startswith(("{", "[")):
        return []
    try:
        found = json.loads(bare)
    except (ValueError, RecursionError):
        return []
    calls = found if isinstance(found, list) else [found]
    if not all(isinstance(each, dict) and "name" in each for each in calls):
        return []
    return [_call(each) for each in calls]


async def call(tools: Sequence[Tool], asked: ToolCall) -> str:
    """The answer of the tool that a call names.

    Raises:
        ToolError: there is no such tool, the arguments are not its own, or it says so.
    """
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


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ToolError(f"a tool call is not JSON: {error}") from None


def _call(found: Any) -> ToolCall:
    arguments = None
    if isinstance(found, dict) and isinstance(found.get("name"), str):
        arguments = found.get("arguments", found.get("parameters", {}))
        if isinstance(arguments, str):  # some models quote them
            arguments = _json(arguments)
    if not isinstance(arguments, dict):
        raise ToolError('a tool call is {"name": "...", "arguments": {...}}')
    return ToolCall(found["name"], arguments)
