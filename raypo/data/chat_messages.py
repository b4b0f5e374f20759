"""Chat messages: normalisation, validation and rendering.

Prompts, responses, conversations, observations of environments and requests to the endpoint all
pass through this module, so that a message means the same wherever it comes from.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from typing import Any

from raypo.data.special_tokens import hidden

Message = dict[str, Any]

ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
"""Roles accepted for every chat template. Another role is accepted if the template names it."""

_SAYS = ("tool_calls", "reasoning_content", "reasoning", "thinking")
"""Keys that may replace the content of an assistant message."""


@dataclass(frozen=True)
class ChatFormat:
    """Settings of how chat messages and texts become tokens."""

    special_tokens: str = "auto"
    """Value of `data.special_tokens_in_text`."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Variables for the chat template, `data.chat_template_kwargs`."""

    @property
    def in_messages(self) -> str:
        """Mode of `hidden` for chat messages."""
        return "text" if self.special_tokens == "auto" else self.special_tokens


USUAL_FORMAT = ChatFormat()
"""Format of a config that sets none of the keys."""


class MessageError(ValueError):
    """Invalid chat message."""


def is_chat(value: Any) -> bool:
    """Return whether a value is shaped like chat messages; `chat_messages` checks the contents."""
    return (
        isinstance(value, list)
        and len(value) > 0
        and all(
            isinstance(each, Mapping) and "role" in each and ("content" in each or says_more(each))
            for each in value
        )
    )


def chat_messages(
    messages: Sequence[Mapping[str, Any]], images: list[Mapping[str, Any]] | None = None
) -> list[Message]:
    """Normalise messages to the form that chat templates expect.

    Contents become text: parts of type text are joined. Arguments of tool calls become objects.
    Keys with a null value are dropped at every depth, because Arrow (parquet, `save_to_disk`)
    fills the keys that a row lacks with null. Nulls inside arguments given as JSON text are kept.

    Args:
        messages: The messages.
        images: List to which parts of type image are appended as they are. In their messages only
            their type is left, and the content stays a list. None means that they are refused.

    Raises:
        MessageError: a role is not a string, a content is neither text nor text parts, or a tool
            call is malformed. The error names the message by its index.
    """
    return [_normalised(index, message, images) for index, message in enumerate(messages)]


def _normalised(
    index: int, message: Mapping[str, Any], images: list[Mapping[str, Any]] | None
) -> Message:
    where = f"messages.{index}"
    if not isinstance(message.get("role"), str):
        raise MessageError(f"{where}.role: a message must have a role, which is a text")
    plain: Message = without_nulls(message)
    calls = plain.pop("tool_calls", None)
    content: Any = plain.get("content")
    if images is not None and _has_images(content):
        plain["content"] = _with_slots(where, content, images)
    else:
        plain["content"] = _text(where, content, may_lack=bool(calls) or says_more(plain))
    if calls:  # Arrow turns missing tool calls into an empty list
        try:
            plain["tool_calls"] = [_call(call) for call in calls]
        except (TypeError, KeyError, ValueError, AttributeError):
            raise MessageError(
                f"{where}.tool_calls: these are not tool calls. Each must have a function with a "
                "name, and arguments that are an object or the JSON text of one"
            ) from None
    return plain


def says_more(message: Mapping[str, Any]) -> bool:
    """Return whether a message has tool calls or reasoning besides its content."""
    return any(message.get(key) for key in _SAYS)


IMAGE_PARTS = ("image", "image_url")
"""Types of parts that are images; the second one is OpenAI's."""


def _has_images(content: Any) -> bool:
    return isinstance(content, list) and any(
        isinstance(part, Mapping) and part.get("type") in IMAGE_PARTS for part in content
    )


def _with_slots(
    where: str, content: list[Any], images: list[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return a content with images as a list of parts; append the images to `images`."""
    parts: list[dict[str, Any]] = []
    for part in content:
        if isinstance(part, Mapping) and part.get("type") in IMAGE_PARTS:
            images.append(part)
            parts.append({"type": "image"})
        else:
            parts.append({"type": "text", "text": _text(where, [part], may_lack=False)})
    return parts


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
            f"{where}.content: has a part of type {wrong}, but only text parts are supported "
            "here (data.image_key adds images to prompts). A part is "
            '{"type": "text", "text": TEXT}'
        )
    kind = "null" if content is None else type(content).__name__
    raise MessageError(f"{where}.content: must be a text, but this is {kind}. Write it as a text")


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    if "function" not in call:  # the form {name, arguments}, which transformers accepts too
        call = {"type": "function", "function": call}
    function = call["function"]
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        arguments = json.loads(arguments.strip() or "{}")
    if not isinstance(arguments, Mapping) or not isinstance(function["name"], str):
        raise TypeError("a name must be a text, and arguments must be an object")
    # Fixed key order, because Arrow keeps the order of the first row that it saw.
    return {**call, "function": {"name": function["name"], "arguments": dict(arguments)}}


def without_nulls(value: Any) -> Any:
    """Return a value without the dict keys whose value is null, at every depth."""
    if isinstance(value, Mapping):
        return {key: without_nulls(each) for key, each in value.items() if each is not None}
    if isinstance(value, list | tuple):
        return [without_nulls(each) for each in value]
    return value


def strings_of(value: Any) -> list[str]:
    """Return all strings inside a value, at every depth."""
    if isinstance(value, str):
        return [value]
    parts = value.values() if isinstance(value, Mapping) else value
    parts = parts if isinstance(value, Mapping | list | tuple) else ()
    return [text for part in parts for text in strings_of(part)]


def is_prefilled(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether the last message is the beginning of the assistant's response."""
    return messages[-1]["role"] == "assistant"


def answered(messages: Sequence[Message], response: Message) -> list[Message]:
    """Append the assistant's response to messages, or continue a prefilled last message with it."""
    if not is_prefilled(messages):
        return [*messages, response]
    *before, begun = messages
    return [*before, {**begun, **response, "content": begun["content"] + response["content"]}]


def check_roles(
    tokenizer: Any, messages: Sequence[Message], tools: Sequence[Any] | None = None
) -> None:
    """Reject roles that the model was not trained on, because many templates print any role.

    A role counts as known if the template names it. It also counts as known if the template renders
    the message and the tokenizer has a special token with the role's name, like GLM-4's
    `<|observation|>`.

    Raises:
        MessageError: a role is unknown. The error names the message by its index.
    """
    written = tokenizer.chat_template
    template = " ".join(written.values()) if isinstance(written, dict) else str(written)
    for place, message in enumerate(messages):
        role = message["role"]
        if role in ROLES or f"'{role}'" in template or f'"{role}"' in template:
            continue
        is_special = any(role in str(token) for token in tokenizer.added_tokens_encoder)
        marked = [*messages[:place], message | {"content": _MARK}, *messages[place + 1 :]]
        if not is_special or _MARK not in _written(tokenizer, marked, tools):
            raise MessageError(
                f"messages.{place}.role: the template knows no role {role!r}. Roles are "
                f"{', '.join(sorted(ROLES))}"
            )


def check_tools(tokenizer: Any, tools: Sequence[Any] | None) -> None:
    """Refuse tools if the chat template ignores them: the model would never know of them.

    raypo does not describe them in a form of its own, because the model was trained on no such
    form, and because the caller would not see what the model is told.

    Raises:
        MessageError: the template renders the same text with and without the tools.
    """
    if not tools:
        return
    template = tokenizer.get_chat_template(tools=list(tools))
    if template not in _READS_TOOLS:
        system, user = ({"role": role, "content": "."} for role in ("system", "user"))
        tried = [each for each in ([user], [system, user]) if _renders(tokenizer, each, None)]
        _READS_TOOLS[template] = not tried or any(
            not _renders(tokenizer, messages, [_TOOL])
            or _written(tokenizer, messages, [_TOOL]) != _written(tokenizer, messages, None)
            for messages in tried
        )
    if not _READS_TOOLS[template]:
        raise MessageError(
            "tools: the chat template does not describe tools, so the model would never know of "
            "them. Use a model whose template does, or describe them in a system message "
            "(data.system_prompt), and give the template none"
        )


def check_variables(tokenizer: Any, names: Iterable[str]) -> None:
    """Refuse variables that the chat template does not read.

    Raises:
        MessageError: the template does not read a variable.
    """
    written = tokenizer.chat_template
    templates = written.values() if isinstance(written, dict) else [str(written)]
    for name in names:
        read = [variables_of(template) for template in templates]
        if all(each is not None and name not in each for each in read):
            known = sorted({*chain(*(each or () for each in read))} - _VARIABLES_OF_RAYPO)
            raise MessageError(
                f"chat_template_kwargs.{name}: the chat template does not read this variable. It "
                f"reads {', '.join(known) or 'none that can be set'}"
            )


_VARIABLES_OF_RAYPO = {
    *("messages", "tools", "documents", "add_generation_prompt", "raise_exception"),
    *("strftime_now", "bos_token", "eos_token", "pad_token", "unk_token"),
}


@lru_cache(maxsize=32)
def variables_of(template: str) -> frozenset[str] | None:
    """Return the variables that a chat template reads. None: they cannot be determined."""
    # transformers needs jinja2 to render a template, but raypo itself does not to train on texts.
    from jinja2 import Environment, TemplateSyntaxError
    from jinja2.meta import find_undeclared_variables

    environment = Environment(extensions=["jinja2.ext.loopcontrols", "jinja2.ext.do"])
    try:
        parsed = environment.parse(_GENERATION_TAGS.sub("", template))
    except TemplateSyntaxError:  # a tag of transformers' own
        return None
    return frozenset(find_undeclared_variables(parsed))


_GENERATION_TAGS = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")


def as_read(
    tokenizer: Any, messages: Sequence[Message], tools: Sequence[Any] | None = None
) -> list[Message]:
    """Return messages in the form that the template reads. Forms are cached for each template.

    Contents are texts, unless the template shows only parts of type text, as those of SmolVLM and
    LLaVA do. Arguments of tool calls are objects, unless the template rejects objects but accepts
    JSON text. DeepSeek's template does so, because it appends the arguments to other text. This
    form is found by rendering the messages in both forms.
    """
    messages = _with_shown_contents(tokenizer, messages, tools)
    if not any(message.get("tool_calls") for message in messages):
        return list(messages)
    template = tokenizer.get_chat_template(tools=tools)
    if template not in _READS_TEXT:
        forms = {False: list(messages), True: _with_arguments_as_text(messages)}
        is_text = next((each for each in forms if _renders(tokenizer, forms[each], tools)), None)
        if is_text is None:  # the caller renders the messages too, and raises the template's error
            return list(messages)
        _READS_TEXT[template] = is_text
    return _with_arguments_as_text(messages) if _READS_TEXT[template] else list(messages)


_MARK = "raypo-content"
"""Placeholder for the content of a message, to see whether the template renders it."""
_TOOL = {
    "type": "function",
    "function": {
        "name": "raypo_tool",
        "description": "Does nothing.",
        "parameters": {"type": "object", "properties": {}},
    },
}
"""Tool to see whether a template describes tools."""
_READS_TOOLS: dict[str, bool] = {}
"""Maps a chat template to whether it describes tools."""
_READS_TEXT: dict[str, bool] = {}
"""Maps a chat template to whether it reads arguments of tool calls as JSON text."""
_SHOWS_PARTS_ONLY: dict[str, bool] = {}
"""Maps a chat template to whether it omits contents that are texts, but shows parts."""


def _with_shown_contents(
    tokenizer: Any, messages: Sequence[Message], tools: Sequence[Any] | None
) -> list[Message]:
    template = tokenizer.get_chat_template(tools=tools)
    if template not in _SHOWS_PARTS_ONLY:

        def shows(messages: list[Message]) -> bool:
            try:
                return _MARK in tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
            except Exception:  # templates can raise anything
                return False

        probe: list[Message] = [{"role": "user", "content": _MARK}]
        _SHOWS_PARTS_ONLY[template] = not shows(probe) and shows(_in_parts(probe))
    return _in_parts(messages) if _SHOWS_PARTS_ONLY[template] else list(messages)


def _in_parts(messages: Sequence[Message]) -> list[Message]:
    return [
        message | {"content": [{"type": "text", "text": message["content"]}]}
        if isinstance(message.get("content"), str)
        else message
        for message in messages
    ]


def _with_arguments_as_text(messages: Sequence[Message]) -> list[Message]:
    def call(each: dict[str, Any]) -> dict[str, Any]:
        function = each["function"]
        arguments = function.get("arguments", {})
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        return each | {"function": function | {"arguments": arguments}}

    return [
        message | {"tool_calls": [call(each) for each in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def _renders(tokenizer: Any, messages: Sequence[Message], tools: Sequence[Any] | None) -> bool:
    try:
        _written(tokenizer, messages, tools)
    except Exception:  # templates can raise anything
        return False
    return True


def _written(tokenizer: Any, messages: Sequence[Message], tools: Sequence[Any] | None) -> str:
    shown = _with_shown_contents(tokenizer, messages, tools)
    return tokenizer.apply_chat_template(shown, tools=tools, tokenize=False)


def render(
    tokenizer: Any,
    messages: Sequence[Message],
    *,
    prompting: bool = False,
    tools: Sequence[Any] | None = None,
    chat: ChatFormat = USUAL_FORMAT,
) -> str:
    """Render messages with the chat template.

    Special tokens in the messages are placeholders in the result (`raypo.data.special_tokens`).

    Args:
        prompting: True to render a prompt that the assistant answers. If the last message is the
            assistant's, it is left open, and the response continues it.
        tools: Functions or JSON schemas for the template to describe. None means no tools.
        chat: Variables for the template, and the treatment of special tokens in messages.

    Raises:
        MessageError: a role is unknown to the template, it reads no tools or not a variable of
            `chat`, or the last message cannot be continued.
        SpecialTokenError: a special token is in a message, and it is refused.
        Exception: any error that the template itself raises.
    """
    tools = None if tools is None else hidden(tokenizer, list(tools), chat.in_messages)
    continues = prompting and is_prefilled(messages)
    can_continue = not says_more(messages[-1]) and bool(messages[-1].get("content"))
    messages = as_read(tokenizer, hidden(tokenizer, messages, chat.in_messages), tools)
    check_roles(tokenizer, messages, tools)
    check_tools(tokenizer, tools)
    check_variables(tokenizer, chat.kwargs)
    if continues and not can_continue:
        raise MessageError(
            f"messages.{len(messages) - 1}: the last message is the assistant's, and a response "
            "can continue it only if it is a text. Remove it, or add a message of another role "
            "after it"
        )
    text = tokenizer.apply_chat_template(
        messages,
        tools=tools,
        add_generation_prompt=prompting and not continues,
        continue_final_message=continues,
        tokenize=False,
        **chat.kwargs,
    )
    assert isinstance(text, str)
    return text
