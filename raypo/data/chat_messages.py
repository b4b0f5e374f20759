"""Chat messages: one way to normalise or refuse them, and one way to render them.

Prompts, responses, conversations, observations of environments and requests to the endpoint all
pass through here, so that a message means the same wherever it comes from.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

Message = dict[str, Any]

ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
"""Roles that every chat template is given. Another role is accepted where the template names it."""

_SAYS = ("tool_calls", "reasoning_content", "reasoning", "thinking")
"""Keys that may stand in place of the content of an assistant's message."""


class MessageError(ValueError):
    """A chat message that no template should be given."""


def is_chat(value: Any) -> bool:
    """Whether a value has the shape of chat messages; `chat_messages` looks inside them."""
    return (
        isinstance(value, list)
        and len(value) > 0
        and all(
            isinstance(each, Mapping) and "role" in each and ("content" in each or says_more(each))
            for each in value
        )
    )


def chat_messages(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Return messages as chat templates take them.

    Contents become text: parts of type text are joined. Arguments of tool calls become objects.
    Keys whose value is null are dropped at every depth, because Arrow (parquet, `save_to_disk`)
    fills the keys that a row lacks with null. Nulls inside arguments that are JSON text stay.

    Raises:
        MessageError: a role is no text, a content is neither text nor parts of text, or a tool
            call is none. The message is named by its place.
    """
    return [_normalised(place, message) for place, message in enumerate(messages)]


def _normalised(place: int, message: Mapping[str, Any]) -> Message:
    where = f"messages.{place}"
    if not isinstance(message.get("role"), str):
        raise MessageError(f"{where}.role: a message has a role, and it is a text")
    plain: Message = without_nulls(message)
    calls = plain.pop("tool_calls", None)
    plain["content"] = _text(where, plain.get("content"), may_lack=bool(calls) or says_more(plain))
    if calls:  # an empty list is what Arrow leaves of none
        try:
            plain["tool_calls"] = [_call(call) for call in calls]
        except (TypeError, KeyError, ValueError, AttributeError):
            raise MessageError(
                f"{where}.tool_calls: these are no tool calls. Each has a function with a name, "
                "and arguments that are an object or the JSON text of one"
            ) from None
    return plain


def says_more(message: Mapping[str, Any]) -> bool:
    """Return whether a message has tool calls or reasoning besides its content."""
    return any(message.get(key) for key in _SAYS)


def _text(where: str, content: Any, *, may_lack: bool) -> str:
    if isinstance(content, str):
        return content
    if content is None and may_lack:
        return ""
    if isinstance(content, list):
        kinds = [part.get("type") if isinstance(part, Mapping) else None for part in content]
        texts = [part.get("text", "") for part in content if isinstance(part, Mapping)]
        if set(kinds) <= {"text"} and all(isinstance(text, str) for text in texts):
            return "".join(texts)
        wrong = next((str(kind) for kind in kinds if kind != "text"), "text without a text")
        raise MessageError(
            f"{where}.content: has a part of type {wrong}, and only texts are read. Parts are "
            '{"type": "text", "text": TEXT}'
        )
    kind = "null" if content is None else type(content).__name__
    raise MessageError(f"{where}.content: must be a text, this is {kind}. Write it as a text")


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    if "function" not in call:  # {name, arguments}, which transformers takes too
        call = {"type": "function", "function": call}
    function = call["function"]
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(arguments, Mapping) or not isinstance(function["name"], str):
        raise TypeError("a name is a text, arguments are an object")
    # Always in this order: Arrow keeps the order of the first row that it saw.
    return {**call, "function": {"name": function["name"], "arguments": dict(arguments)}}


def without_nulls(value: Any) -> Any:
    """Return a value without the keys of its dicts, at every depth, whose value is null."""
    if isinstance(value, Mapping):
        return {key: without_nulls(each) for key, each in value.items() if each is not None}
    if isinstance(value, list | tuple):
        return [without_nulls(each) for each in value]
    return value


def strings_of(value: Any) -> list[str]:
    """Return all texts inside a value, at every depth."""
    if isinstance(value, str):
        return [value]
    parts = value.values() if isinstance(value, Mapping) else value
    parts = parts if isinstance(value, Mapping | list | tuple) else ()
    return [text for part in parts for text in strings_of(part)]


def is_prefilled(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the last message is the beginning of the assistant's response."""
    return messages[-1]["role"] == "assistant"


def answered(messages: Sequence[Message], response: Message) -> list[Message]:
    """Return messages with the assistant's response behind them; a prefilled one is continued."""
    if not is_prefilled(messages):
        return [*messages, response]
    *before, begun = messages
    return [*before, {**begun, **response, "content": begun["content"] + response["content"]}]


def check_roles(tokenizer: Any, messages: Sequence[Message]) -> None:
    """Refuse a role that the chat template does not name: most templates print any, or drop it.

    Raises:
        MessageError: with the message's place.
    """
    written = tokenizer.chat_template
    template = " ".join(written.values()) if isinstance(written, dict) else str(written)
    for place, message in enumerate(messages):
        role = message["role"]
        if role not in ROLES and f"'{role}'" not in template and f'"{role}"' not in template:
            raise MessageError(
                f"messages.{place}.role: the template knows no role {role!r}. Roles are "
                f"{', '.join(sorted(ROLES))}"
            )


def render(
    tokenizer: Any,
    messages: Sequence[Message],
    *,
    prompting: bool = False,
    tools: Sequence[Any] | None = None,
) -> str:
    """Return what the chat template writes.

    Args:
        prompting: Write a prompt that the assistant answers. A last message of the assistant is
            then left open, and the response continues it.
        tools: Functions or JSON schemas that the template describes.

    Raises:
        MessageError: a role is unknown to the template, or the last message cannot be continued.
        Exception: whatever the template itself raises.
    """
    tools = None if tools is None else list(tools)
    check_roles(tokenizer, messages)
    continues = prompting and is_prefilled(messages)
    if continues and (says_more(messages[-1]) or not messages[-1]["content"]):
        raise MessageError(
            f"messages.{len(messages) - 1}: the last message is the assistant's, and a response "
            "can only continue one that is a text. Remove it, or let a message of another role "
            "follow"
        )
    text = tokenizer.apply_chat_template(
        list(messages),
        tools=tools,
        add_generation_prompt=prompting and not continues,
        continue_final_message=continues,
        tokenize=False,
    )
    assert isinstance(text, str)
    return text
