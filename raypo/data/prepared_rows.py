"""Check and normalise rows as far as that is possible without a tokenizer.

The functions are in the order in which `prepared_row` uses them: columns, chat messages, responses,
tools, system prompt. Parameters named `config_key` are config keys for error messages.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from raypo.config import ConfigError, DataSection, PromptSource
from raypo.data.chat_messages import (
    Message,
    MessageError,
    chat_messages,
    is_chat,
    strings_of,
    without_nulls,
)
from raypo.data.images import with_images
from raypo.data.rows import BadRows, Row, RowError

LabelCheck = Callable[[Any, str], Any]
"""Function of a label and its location. It raises ValueError if the label cannot be scored."""

SYSTEM, TEMPLATE_KWARGS, LOSS_MASK = "system", "chat_template_kwargs", "loss_mask"
"""Columns that are used if rows have them: the system message, variables of the chat template, and
the messages that are trained on."""
_MEDIA = ("images", "videos", "audio", "audios")
"""Columns of inputs other than text."""
WEIGHTS = ("weight", "train", "trainable", "training", "learn", "loss", "loss_mask")
"""Fields with which data sets exclude a message from the loss."""

_READ_FIELDS = {"role", "content", "tool_calls", *WEIGHTS}
"""Fields of messages that raypo reads itself. Others are read if the chat template names them."""

_LOOKS_LIKE_CHAT = re.compile(
    r"""\s*\[\s*\{\s*["'](role["']\s*:|content["']\s*:.*["']role["']\s*:)""", re.DOTALL
)
"""Pattern of the beginning of a list of messages, written as JSON or as Python's repr."""


def prepared_row(
    row: Row,
    source: PromptSource,
    section: DataSection,
    response_keys: Mapping[str, str] | None = None,
) -> Row:
    """Check a row as far as possible without a tokenizer, and add the system prompt.

    Chat messages are normalised, and each response becomes one message of the assistant.

    Raises:
        RowError: the row is unusable.
    """
    responses = response_keys or {}
    columns = {"data.prompt_key": section.prompt_key, **responses}
    if section.label_key:
        columns["data.label_key"] = section.label_key
    if section.image_key:
        columns["data.image_key"] = section.image_key
    row = with_columns(row, source, columns | _tools_column(row, section))
    _refuse_media(row, section)
    name = section.prompt_key
    value = row.values[name]
    if section.as_chat and isinstance(value, str):
        value = [{"role": "user", "content": value}]
        row = _replaced(row, name, value)
    parts: list[Mapping[str, Any]] = []
    if is_chat(value):
        images = parts if section.image_key else None
        row = _replaced(row, name, _chat(row, "data.prompt_key", name, images))
    elif not isinstance(value, str):
        raise RowError(
            f"data.prompt_key ({name}): {row.where} has {short(value)} there. A prompt must be a "
            "text, or a list of chat messages with role and content. Correct the row or remove "
            "it."
        )
    row = with_images(row, section, source, parts)
    for config_key, column in responses.items():
        row = _replaced(row, column, _response(row, config_key, column))
    if responses:
        _refuse_weights(row, name, responses)
    row = _with_tools(row, "data.prompt_key", name, section)
    row = _with_template_kwargs(row, name)
    return _with_system_prompt(row, "data.prompt_key", name, section.system_prompt)


def prepared_conversation(row: Row, source: PromptSource, section: Any) -> Row:
    """Check and normalise a row's conversation, and add the system prompt.

    Raises:
        RowError: the row has no conversation with an answer of the assistant.
    """
    key, column = "data.messages_key", section.messages_key
    row = with_columns(row, source, {key: column} | _tools_column(row, section))
    messages = row.values[column]
    if not is_chat(messages) or all(each["role"] != "assistant" for each in messages[1:]):
        raise RowError(
            f"{key} ({column}): {row.where} has no list of chat messages in which the "
            "assistant answers. Correct the row or remove it."
        )
    _refuse_media(row, section)
    row = _replaced(row, column, _with_weights(row, column, _chat(row, key, column)))
    row = _with_tools(row, key, column, section)
    row = _with_template_kwargs(row, column)
    return _with_system_prompt(row, key, column, section.system_prompt)


def count_ignored(
    row: Row, columns: Mapping[str, str], section: DataSection, template: Any, bad: BadRows
) -> None:
    """Record the columns and message fields of a row that nothing reads.

    Args:
        row: A row as its source has it.
        columns: Columns that are read, by config key.
        section: The data section.
        template: The chat template, or several by name. It may read fields of any name.
        bad: Record of the rows.
    """
    read = {*columns.values(), tools_column(row, section), SYSTEM, TEMPLATE_KWARGS, LOSS_MASK}
    for name, value in row.values.items():
        if value is None:
            continue
        if name not in read:
            bad.ignored[f"column {name}"] = None
        elif is_chat(value):
            fields = {key for message in value for key in message if message[key] is not None}
            for field in sorted(fields - _READ_FIELDS):
                if not re.search(rf"\b{re.escape(field)}\b", str(template)):
                    bad.ignored[f"message field {field}"] = None


def check_label(check: LabelCheck, row: Row, label_key: str) -> None:
    """Check the label of a row.

    Raises:
        RowError: the check rejects the label.
    """
    try:
        check(row.values[label_key], row.where)
    except ValueError as error:
        raise RowError(str(error)) from None


def with_columns(row: Row, source: PromptSource, columns: Mapping[str, str]) -> Row:
    """Return the row if it has the required columns.

    Chat messages given as JSON text, as csv requires, become a list. Labels are left unchanged.

    Raises:
        ConfigError: the first row lacks a column, so the config names a column that the source
            does not have.
        RowError: a later row lacks a column, or a text in a column cannot be tokenised.
    """
    for config_key, name in columns.items():
        if name in row.values:
            _refuse_surrogates(row, config_key, name)
            continue
        if not row.number:
            raise _no_column(row, source, config_key, name, columns)
        there = ", ".join(row.values) or "none"
        raise RowError(
            f"{config_key} ({name}): {row.where} has no such key. It has {there}. Correct the "
            "row or remove it."
        )
    read = {
        name: _chat_of_text(row, config_key, name)
        for config_key, name in columns.items()
        if config_key not in ("data.label_key", "data.tools_key", "data.image_key")
    }
    return row._replace(values=row.values | read)


def _no_column(
    row: Row, source: PromptSource, config_key: str, name: str, columns: Mapping[str, str]
) -> ConfigError:
    there = ", ".join(row.values) or "none"
    near = difflib.get_close_matches(name, row.values, n=1, cutoff=0.5)
    remedy = f"Set {config_key} to {near[0] if near else 'one of them'}."
    if "messages" in row.values and "data.response_key" in columns:
        remedy = "Set data.messages_key to messages, if it holds whole conversations."
    elif config_key == "data.prompt_key" and is_chat(
        row.values.get(columns.get("data.chosen_key", ""))
    ):
        remedy = (
            "Whole conversations in the columns of the responses are not supported: put the "
            "messages that they share into a column of prompts, as TRL's extract_prompt does."
        )
    return ConfigError(
        f"{config_key} ({name}): {source} has no such column. It has {there}. {remedy}"
    )


def _refuse_surrogates(row: Row, config_key: str, name: str) -> None:
    """Reject a lone surrogate: JSON can spell one (`\\ud83d`), but no tokenizer can read it."""
    for text in strings_of(row.values[name]):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            half = text[error.start : error.end]
            raise RowError(
                f"{config_key} ({name}): {row.where} has {half!r} at character {error.start}, "
                "which is half of a character (a lone surrogate). Correct the row or remove it."
            ) from None


def _chat_of_text(row: Row, config_key: str, name: str) -> Any:
    """Return a value of a row. Chat messages that are given as text are parsed to a list."""
    text = row.values[name]
    if not isinstance(text, str) or not _LOOKS_LIKE_CHAT.match(text):
        return text
    try:
        messages = json.loads(text)
    except json.JSONDecodeError:
        messages = None
    if is_chat(messages):
        return messages
    raise RowError(
        f"{config_key} ({name}): {row.where} has {short(text)} there: chat messages as text, but "
        "not a JSON list of objects with role and content. Write it as json.dumps does, or "
        "write lists of messages to a jsonl or parquet file."
    )


def _chat(
    row: Row, config_key: str, column: str, images: list[Mapping[str, Any]] | None = None
) -> list[Message]:
    try:
        return chat_messages(row.values[column], images)
    except MessageError as error:
        raise RowError(
            f"{config_key} ({column}): {row.where}, {error}, or remove the row."
        ) from None


def _response(row: Row, config_key: str, column: str) -> Message:
    """Return a response as an assistant message."""
    value = row.values[column]
    if isinstance(value, str):
        return {"role": "assistant", "content": value}
    if not is_chat(value) or len(value) != 1:
        raise RowError(
            f"{config_key} ({column}): {row.where} has {short(value)} there. A response must be "
            "a text, or a list of one chat message with role and content. Correct the row or "
            "remove it."
        )
    (message,) = _chat(row, config_key, column)
    if message["role"] != "assistant":
        raise RowError(
            f"{config_key} ({column}): {row.where} has a message of the role {message['role']} "
            "there. A response must be the assistant's. Correct the row or remove it."
        )
    return message


def _refuse_media(row: Row, section: DataSection) -> None:
    for name in _MEDIA:
        if row.values.get(name) and name != section.image_key:
            remedy = "Set data.image_key: images, or remove" if name == "images" else "Remove"
            raise RowError(
                f"{row.where} has {name}, which the policy would not get. {remedy} the column; if "
                "only a reward function reads it, rename it."
            )


def _is_excluded(where: str, values: Mapping[str, Any]) -> bool | None:
    """Return whether values of `WEIGHTS` exclude a message from the loss. None: there are none."""
    for name, value in values.items():
        if not isinstance(value, int | float) or value not in (0, 1):
            raise RowError(
                f"{where}.{name} ({short(value)}): a message counts for the loss or it does not. "
                "Write 1 or true, 0 or false, or remove the field."
            )
    if len(decisions := {not value for value in values.values()}) > 1:
        raise RowError(f"{where}: {', '.join(values)} contradict each other. Remove one of them.")
    return decisions.pop() if decisions else None


def _with_weights(row: Row, column: str, messages: list[Message]) -> list[Message]:
    """Return messages with `weight: 0` in those of the assistant that are excluded from the loss.

    Other fields of `WEIGHTS` are removed. The row's column `loss_mask` has a value per message.
    """
    mask: Any = row.values.get(LOSS_MASK)
    if mask is not None and not (isinstance(mask, list) and len(mask) == len(messages)):
        raise RowError(
            f"{row.where} has {short(mask)} in its column {LOSS_MASK}, which must be a list with "
            f"0 or 1 for each message of {column} ({len(messages)}). Correct or remove it."
        )
    weighted = []
    for place, message in enumerate(messages):
        where = f"data.messages_key ({column}): {row.where}, messages.{place}"
        values = {name: message[name] for name in WEIGHTS if name in message}
        if mask is not None:
            values[f"column {LOSS_MASK}"] = mask[place]
        is_excluded, is_answer = _is_excluded(where, values), message["role"] == "assistant"
        if is_excluded is False and not is_answer:
            raise RowError(
                f"{where}: {', '.join(values)} would train on a message of the role "
                f"{message['role']}, but the loss covers only the assistant's. Set it to 0, or "
                "remove it."
            )
        message = {name: value for name, value in message.items() if name not in WEIGHTS}
        weighted.append(message | ({"weight": 0} if is_excluded and is_answer else {}))
    return weighted


def _refuse_weights(row: Row, column: str, responses: Mapping[str, str]) -> None:
    """Refuse fields that exclude a response from the loss, or include a message of the prompt."""
    messages = row.values[column] if is_chat(row.values[column]) else []
    for message, is_response in [
        *((message, False) for message in messages),
        *((row.values[name], True) for name in responses.values()),
    ]:
        values = {name: message[name] for name in WEIGHTS if name in message}
        if _is_excluded(f"{row.where}, {message['role']}", values) == is_response and values:
            raise RowError(
                f"{row.where}: {', '.join(values)} of a message of the "
                f"{'response' if is_response else 'prompt'}, but the loss covers the response, and "
                "nothing of the prompt. Remove the field, or give whole conversations "
                "(data.messages_key)."
            )
    if row.values.get(LOSS_MASK) is not None:
        raise RowError(
            f"{row.where} has a column {LOSS_MASK}, which applies to whole conversations "
            "(data.messages_key) only. Remove it."
        )


def tools_column(row: Row, section: DataSection) -> str | None:
    """Return the name of the column of tools, or None if the row has none.

    Without `data.tools_key` it is `tools`, if it holds JSON schemas.
    """
    if section.tools_key is not None:
        return section.tools_key if section.tools_key in row.values else None
    value = row.values.get("tools")
    if isinstance(value, str) and value.startswith("["):
        with suppress(json.JSONDecodeError):
            value = json.loads(value)
    is_found = isinstance(value, list) and value and all(map(_is_schema, value))
    return "tools" if is_found else None


def _is_schema(value: Any) -> bool:
    return isinstance(value, Mapping) and (
        "function" in value or {"name", "parameters"} <= {*value}
    )


def _tools_column(row: Row, section: DataSection) -> dict[str, str]:
    """Return {config key: name of the tools column}, or {} if the row has no such column."""
    name = tools_column(row, section)
    return {"data.tools_key": name} if name is not None else {}


def with_tools_in_some(
    rows: Iterable[Row], source: PromptSource, section: DataSection
) -> Iterator[Row]:
    """Yield the rows of a source. Some rows, but not all, may lack the column of the tools.

    Raises:
        ConfigError: all rows lack the column.
    """
    name, row = section.tools_key, None
    is_there = name is None
    for row in rows:
        is_there = is_there or name in row.values
        yield row
    if row is not None and not is_there:
        raise _no_column(row, source, "data.tools_key", str(name), {})


def _with_tools(row: Row, config_key: str, column: str, section: DataSection) -> Row:
    """Return the row with its tools as a list of JSON schemas, or as None if it has no tools."""
    name = section.tools_key or tools_column(row, section)
    if name is None:
        return row
    tools = row.values.get(name)
    where = f"data.tools_key ({name}): {row.where} has "
    if isinstance(tools, str):
        try:
            tools = json.loads(tools or "[]")
        except json.JSONDecodeError:
            raise RowError(f"{where}{short(tools)} there, which is not JSON. Correct it.") from None
    else:
        tools = without_nulls(tools)
    if tools and not (isinstance(tools, list) and all(isinstance(each, dict) for each in tools)):
        raise RowError(
            f"{where}{short(tools)} there. Tools must be a list of JSON schemas, or its JSON "
            "text. Correct the row or remove it."
        )
    if tools and not is_chat(row.values[column]):
        raise RowError(
            f"{where}tools, but the text in {config_key} ({column}) cannot describe them. Write "
            "it as chat messages, set data.as_chat: true, or remove the tools."
        )
    return _replaced(row, name, tools or None)


def _with_template_kwargs(row: Row, column: str) -> Row:
    """Return the row with the variables of its chat template as a mapping, if it has any."""
    values = row.values.get(TEMPLATE_KWARGS)
    if not values:
        return row
    if isinstance(values, str):
        with suppress(json.JSONDecodeError):
            values = json.loads(values)
    if not isinstance(values, Mapping) or not is_chat(row.values[column]):
        raise RowError(
            f"{row.where} has {short(values)} in its column {TEMPLATE_KWARGS}, which must be a "
            "mapping, beside chat messages. Correct or remove it."
        )
    return _replaced(row, TEMPLATE_KWARGS, without_nulls(values))


def _with_system_prompt(row: Row, config_key: str, column: str, system_prompt: str | None) -> Row:
    """Return the row with a system message prepended to its chat messages.

    It is `data.system_prompt`, or the text in the row's column `system`.
    """
    messages, own = row.values[column], row.values.get(SYSTEM)
    where, remedy = f"{row.where} has a column {SYSTEM}, and ", "Remove or rename the column."
    if own and (system_prompt is not None or not isinstance(own, str)):
        what = "data.system_prompt is set" if isinstance(own, str) else "it is not a text"
        raise RowError(f"{where}{what}. {remedy}")
    if system_prompt is None and not own:
        return row
    if system_prompt is not None:
        where = f"data.system_prompt ({short(system_prompt)}): {row.where} has "
        remedy = "remove data.system_prompt."
    else:
        remedy = "remove or rename the column."
    system_prompt = system_prompt or own
    if not is_chat(messages):
        raise RowError(
            f"{where}a text in {config_key} ({column}), to which no chat template applies. Set "
            f"data.as_chat: true, then the text is a user message, or {remedy}"
        )
    if any(message["role"] in ("system", "developer") for message in messages):
        raise RowError(
            f"{where}its own system message in {config_key} ({column}). Remove it there, or "
            f"{remedy}"
        )
    system = {"role": "system", "content": system_prompt}
    return row._replace(values=row.values | {column: [system, *messages]})


def _replaced(row: Row, column: str, value: Any) -> Row:
    return row._replace(values=row.values | {column: value})


def short(value: Any) -> str:
    """Return the repr of a value, cut to 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
