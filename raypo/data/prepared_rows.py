"""Check and normalise rows as far as that is possible without a tokenizer.

The functions are in the order in which `prepared_row` uses them: columns, chat messages, responses,
tools, system prompt. Parameters named `config_key` are config keys for error messages.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
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
from raypo.data.rows import Row, RowError

LabelCheck = Callable[[Any, str], Any]
"""Function of a label and its location. It raises ValueError if the label cannot be scored."""

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
    row = with_columns(row, source, columns | _tools_column(row, section))
    name = section.prompt_key
    value = row.values[name]
    if is_chat(value):
        row = _replaced(row, name, _chat(row, "data.prompt_key", name))
    elif not isinstance(value, str):
        raise RowError(
            f"data.prompt_key ({name}): {row.where} has {short(value)} there. A prompt must be a "
            "text, or a list of chat messages with role and content. Correct the row or remove "
            "it."
        )
    for config_key, column in responses.items():
        row = _replaced(row, column, _response(row, config_key, column))
    row = _with_tools(row, "data.prompt_key", name, section)
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
    row = _replaced(row, column, _chat(row, key, column))
    row = _with_tools(row, key, column, section)
    return _with_system_prompt(row, key, column, section.system_prompt)


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
        if config_key not in ("data.label_key", "data.tools_key")
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


def _chat(row: Row, config_key: str, column: str) -> list[Message]:
    try:
        return chat_messages(row.values[column])
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


def _tools_column(row: Row, section: DataSection) -> dict[str, str]:
    """Return {config key: name of the tools column}, or {} if the row has no such column."""
    name = section.tools_key
    return {"data.tools_key": name} if name is not None and name in row.values else {}


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
    name = section.tools_key
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
            "it as chat messages, or remove the tools."
        )
    return _replaced(row, name, tools or None)


def _with_system_prompt(row: Row, config_key: str, column: str, system_prompt: str | None) -> Row:
    """Return the row with a system message prepended to its chat messages."""
    if system_prompt is None:
        return row
    messages = row.values[column]
    where = f"data.system_prompt ({short(system_prompt)}): {row.where} has "
    if not is_chat(messages):
        raise RowError(
            f"{where}a text in {config_key} ({column}), to which no chat template applies. Write "
            'it as [{"role": "user", "content": TEXT}], or remove data.system_prompt.'
        )
    if any(message["role"] in ("system", "developer") for message in messages):
        raise RowError(
            f"{where}its own system message in {config_key} ({column}). Remove it there, or "
            "remove data.system_prompt."
        )
    system = {"role": "system", "content": system_prompt}
    return row._replace(values=row.values | {column: [system, *messages]})


def _replaced(row: Row, column: str, value: Any) -> Row:
    return row._replace(values=row.values | {column: value})


def short(value: Any) -> str:
    """Return the repr of a value, cut to 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
