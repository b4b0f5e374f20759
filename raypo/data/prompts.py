"""Load tokenised prompts from sources of rows; `key` is the config key of the sources."""

from __future__ import annotations

import difflib
import json
import re
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, chain, islice
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from raypo.config import ConfigError, DataSection, PromptSource, source_name
from raypo.data.chat_messages import (
    Message,
    MessageError,
    chat_messages,
    is_chat,
    render,
    strings_of,
    without_nulls,
)
from raypo.data.rows import (
    BadRows,
    Row,
    RowError,
    RowsOnDisk,
    check_data_set,
    is_data_set,
    read_rows,
    rows_on_disk,
)
from raypo.data.stop_tokens import prompt_ids
from raypo.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PEEK_ROWS = 1000
"""Number of rows of each source that `peek` reads."""

_LOOKS_LIKE_CHAT = re.compile(
    r"""\s*\[\s*\{\s*["'](role["']\s*:|content["']\s*:.*["']role["']\s*:)""", re.DOTALL
)
"""A list of messages as JSON or as Python's repr, complete or not."""

CHUNK = 1024
"""Number of rows tokenised in one call."""

LabelCheck = Callable[[Any, str], Any]
"""Takes a label and its location, and raises ValueError for a label that cannot be scored."""

Tokenised = tuple[Row, str, list[int]]
"""A row, its prompt as text, and its prompt as token ids."""


@dataclass(frozen=True)
class LoadedPrompts:
    """Tokenised prompts in the order of the sources."""

    prompts: Sequence[Prompt]
    """Prompts of sources that stay on disk are read and tokenised on each access."""
    num_skipped: int
    """Prompts skipped because they are longer than data.max_prompt_tokens."""
    sizes: tuple[int, ...]
    """Number of prompts of each source."""
    highest: np.ndarray
    """int32 [P]. Token ids of the prompt that has the largest one."""
    bad: BadRows = field(default_factory=lambda: BadRows("refuse"))

    def notes(self, key: str) -> list[str]:
        """Return one line for each reason why prompts of a config key were skipped."""
        number = self.num_skipped + len(self.prompts)
        words = f"{self.num_skipped} of the {number} prompts of {key} are longer than"
        long = [f"{words} data.max_prompt_tokens and skipped"] if self.num_skipped else []
        return long + self.bad.notes(key)


def peek(
    section: DataSection,
    *,
    key: str = "data.prompts",
    response_keys: Mapping[str, str] | None = None,
) -> int | None:
    """Check the first rows of the sources without a tokenizer or any heavy import.

    Args:
        section: The sources and the columns of each row: a prompt, or a whole conversation if
            `messages_key` is set.
        key: The config key of the sources, for error messages.
        response_keys: Maps config keys to the response columns that each row must have.

    Returns:
        The number of rows. None if a source is a data set or has `PEEK_ROWS` rows or more.

    Raises:
        ConfigError: a file is missing, empty, unreadable or of an unknown kind; or a row lacks
            the prompt, the label or a response, or one of them is neither text nor chat messages.
    """
    num_rows: int | None = 0
    for source in section.prompts:
        if is_data_set(source):
            check_data_set(source, key=key)
            num_rows = None
            continue
        bad = BadRows(section.on_error)
        whole = read_rows(source, key=key, bad=bad)
        rows = with_tools_in_some(islice(whole, PEEK_ROWS), source, section)
        prepare = partial(prepared_row, source=source, section=section, response_keys=response_keys)
        if getattr(section, "messages_key", None):
            prepare = partial(prepared_conversation, source=source, section=section)
        seen = sum(1 for _ in bad.each(prepare, rows))
        if not seen and next(whole, None) is None:
            bad.refuse_all(key)
        is_whole = seen + bad.count < PEEK_ROWS
        num_rows = num_rows + seen if num_rows is not None and is_whole else None
    return num_rows


def load_prompts(
    section: DataSection,
    tokenizer: PreTrainedTokenizerBase,
    *,
    key: str = "data.prompts",
    label_checks: Callable[[PromptSource], LabelCheck | None] | None = None,
) -> LoadedPrompts:
    """Read and tokenise prompts.

    Text is tokenised with the special tokens that the tokenizer adds by default. Chat messages are
    rendered with its chat template, which writes the special tokens itself. `Prompt.index` is the
    row number over all sources in order, counting skipped rows.

    Each worker that calls this reads every row once. Prompts of files stay in memory. Of data sets
    and folders of `save_to_disk` only the row numbers do, 8 bytes per prompt.

    Args:
        section: The sources, their columns and the length limit.
        tokenizer: The policy's Hugging Face tokenizer.
        key: The config key of the sources, for error messages.
        label_checks: Returns the check of a source's labels, or None.

    Raises:
        ConfigError: a row fails the checks of `peek` or of its label, a prompt has no tokens, a
            prompt is too long and `data.too_long` is `error`, or no prompt is left.
    """
    parts: list[tuple[Sequence[Any], Callable[[Any], Prompt]]] = []
    num_rows = num_skipped = shortest = 0
    highest = np.zeros(1, np.int32)
    bad = BadRows(section.on_error)
    for source in section.prompts:
        first = num_rows
        on_disk = rows_on_disk(source, key=key)
        read = partial(_prompts, section, source, tokenizer, first)
        kept: list[Prompt] = []
        places = array("q")

        def counted(rows: Iterable[Row], first: int = first) -> Iterator[Row]:
            nonlocal num_rows
            for row in rows:
                num_rows = first + row.number + 1
                yield row

        rows = read_rows(source, key=key, bad=bad) if on_disk is None else on_disk
        rows = counted(with_tools_in_some(rows, source, section))
        for row, prompt in read(rows, bad, label_checks and label_checks(source)):
            length = len(prompt.token_ids)
            if not is_short("prompt", row, length, section):
                num_skipped += 1
                shortest = min(shortest or length, length)
                continue
            highest = max(highest, prompt.token_ids, key=np.max)
            if on_disk is None:
                kept.append(prompt)
            else:
                places.append(row.number)
        if on_disk is None:
            parts.append((kept, lambda prompt: prompt))
        else:
            parts.append((places, partial(_prompt_on_disk, on_disk, read)))
    sizes = tuple(len(items) for items, _ in parts)
    if not sum(sizes) and not num_skipped:
        bad.refuse_all(key)
    if not sum(sizes):
        raise ConfigError(
            f"data.max_prompt_tokens ({section.max_prompt_tokens}): all {num_skipped} prompts of "
            f"{key} are longer. Set data.max_prompt_tokens to at least {shortest}, the length of "
            f"the shortest."
        )
    return LoadedPrompts(Prompts(parts), num_skipped, sizes, highest, bad)


def _prompts(
    section: DataSection,
    source: PromptSource,
    tokenizer: PreTrainedTokenizerBase,
    first: int,
    rows: Iterable[Row],
    bad: BadRows,
    label_check: LabelCheck | None = None,
) -> Iterator[tuple[Row, Prompt]]:
    """Yield the prompts of a source's rows; `first` is the index of its first row."""

    def prepare(row: Row) -> Row:
        row = prepared_row(row, source, section)
        if label_check and section.label_key:
            check_label(label_check, row, section.label_key)
        return row

    prepared = bad.each(prepare, rows)
    for row, text, token_ids in chain.from_iterable(tokenised(prepared, section, tokenizer, bad)):
        given = row.values[section.prompt_key]
        yield (
            row,
            Prompt(
                index=first + row.number,
                text=text,
                token_ids=np.asarray(token_ids, np.int32),
                label=row.values[section.label_key] if section.label_key else None,
                messages=given if is_chat(given) else None,
                data_source=source_name(source),
                row=row.values,
            ),
        )


def _prompt_on_disk(
    rows: RowsOnDisk, read: Callable[..., Iterator[tuple[Row, Prompt]]], place: int
) -> Prompt:
    return next(read([rows[place]], BadRows("refuse")))[1]


class Prompts(Sequence[Prompt]):
    """Concatenated parts, each a sequence of items and a function item -> Prompt."""

    def __init__(self, parts: Sequence[tuple[Sequence[Any], Callable[[Any], Prompt]]]) -> None:
        self._parts = parts
        self._ends = list(accumulate(len(items) for items, _ in parts))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, number: int) -> Prompt:  # type: ignore[override]
        if not 0 <= number < len(self):
            raise IndexError(number)
        part = bisect_right(self._ends, number)
        items, prompt_of = self._parts[part]
        return prompt_of(items[number - self._ends[part] + len(items)])


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
            f"data.prompt_key ({name}): {row.where} has {_short(value)} there. "
            "A prompt is a text, or a list of chat messages with role and content. Correct "
            "the row or remove it."
        )
    for config_key, column in responses.items():
        row = _replaced(row, column, _response(row, config_key, column))
    row = _with_tools(row, "data.prompt_key", name, section)
    return _with_system_prompt(row, "data.prompt_key", name, section.system_prompt)


def check_label(check: LabelCheck, row: Row, label_key: str) -> None:
    """Check the label of a row.

    Raises:
        RowError: the check refuses it.
    """
    try:
        check(row.values[label_key], row.where)
    except ValueError as error:
        raise RowError(str(error)) from None


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


def _tools_column(row: Row, section: DataSection) -> dict[str, str]:
    """Return config key -> column of the tools, if the row has it; a row without it has none."""
    name = section.tools_key
    return {"data.tools_key": name} if name is not None and name in row.values else {}


def with_tools_in_some(
    rows: Iterable[Row], source: PromptSource, section: DataSection
) -> Iterator[Row]:
    """Yield the rows of a source, in which some may lack the column of the tools.

    Raises:
        ConfigError: all of them lack it.
    """
    name, row = section.tools_key, None
    is_there = name is None
    for row in rows:
        is_there = is_there or name in row.values
        yield row
    if row is not None and not is_there:
        raise _no_column(row, source, "data.tools_key", str(name))


def _no_column(row: Row, source: PromptSource, config_key: str, name: str) -> ConfigError:
    there = ", ".join(row.values) or "none"
    near = difflib.get_close_matches(name, row.values, n=1, cutoff=0.5)
    return ConfigError(
        f"{config_key} ({name}): {source} has no such column, it has {there}. "
        f"Set {config_key} to {near[0] if near else 'one of them'}."
    )


def _replaced(row: Row, column: str, value: Any) -> Row:
    return row._replace(values=row.values | {column: value})


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
            f"{config_key} ({column}): {row.where} has {_short(value)} there. A response "
            "is a text, or a list of one chat message with role and content. Correct the "
            "row or remove it."
        )
    (message,) = _chat(row, config_key, column)
    if message["role"] != "assistant":
        raise RowError(
            f"{config_key} ({column}): {row.where} has a message of the role {message['role']} "
            "there. A response is the assistant's. Correct the row or remove it."
        )
    return message


def _with_tools(row: Row, config_key: str, column: str, section: DataSection) -> Row:
    """Return the row with its tools as a list of JSON schemas; None means no tools."""
    name = section.tools_key
    if name is None:
        return row
    tools = row.values.get(name)
    where = f"data.tools_key ({name}): {row.where} has "
    if isinstance(tools, str):
        try:
            tools = json.loads(tools or "[]")
        except json.JSONDecodeError:
            raise RowError(f"{where}{_short(tools)} there, which is no JSON. Correct it.") from None
    else:
        tools = without_nulls(tools)
    if tools and not (isinstance(tools, list) and all(isinstance(each, dict) for each in tools)):
        raise RowError(
            f"{where}{_short(tools)} there. Tools are a list of JSON schemas, or its JSON text. "
            "Correct the row or remove it."
        )
    if tools and not is_chat(row.values[column]):
        raise RowError(
            f"{where}tools, and a text in {config_key} ({column}), in which nothing describes "
            "them. Write it as chat messages, or remove the tools."
        )
    return _replaced(row, name, tools or None)


def with_columns(row: Row, source: PromptSource, columns: Mapping[str, str]) -> Row:
    """Return the row if it has the required columns.

    Chat messages given as JSON text, as csv requires, become a list. Labels are left unchanged.

    Raises:
        ConfigError: the first row lacks a column, so the config names a column that the source
            does not have.
        RowError: a later row lacks a column, or a text in one cannot be tokenised.
    """
    for config_key, name in columns.items():
        if name in row.values:
            _refuse_surrogates(row, config_key, name)
            continue
        if not row.number:
            raise _no_column(row, source, config_key, name)
        there = ", ".join(row.values) or "none"
        raise RowError(
            f"{config_key} ({name}): {row.where} has no such key, it has {there}. "
            "Correct the row or remove it."
        )
    read = {
        name: _chat_of_text(row, config_key, name)
        for config_key, name in columns.items()
        if config_key not in ("data.label_key", "data.tools_key")
    }
    return row._replace(values=row.values | read)


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
    """Return a row's value; chat messages given as text are parsed to a list."""
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
        f"{config_key} ({name}): {row.where} has {_short(text)} there: chat messages as text, "
        "and no JSON list of objects with role and content. Write it as json.dumps does, or lists "
        "of messages into a jsonl or parquet file."
    )


def _with_system_prompt(row: Row, config_key: str, column: str, system_prompt: str | None) -> Row:
    """Return the row with a system message prepended to its chat messages."""
    if system_prompt is None:
        return row
    messages = row.values[column]
    where = f"data.system_prompt ({_short(system_prompt)}): {row.where} has "
    if not is_chat(messages):
        raise RowError(
            f"{where}a text in {config_key} ({column}), which no chat template reads. Write it as "
            f'[{{"role": "user", "content": TEXT}}], or remove data.system_prompt.'
        )
    if any(message["role"] in ("system", "developer") for message in messages):
        raise RowError(
            f"{where}a system message of its own in {config_key} ({column}). Remove it there, or "
            f"remove data.system_prompt."
        )
    system = {"role": "system", "content": system_prompt}
    return row._replace(values=row.values | {column: [system, *messages]})


def prompt_text(row: Row, section: DataSection, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the text to tokenise: the prompt itself, or its rendered chat messages."""
    column = section.prompt_key
    value = row.values[column]
    if isinstance(value, str):
        return value
    if not tokenizer.chat_template:
        raise ConfigError(
            f"data.prompt_key ({column}): {row.where} has chat messages, and the policy's "
            "tokenizer has no chat template. Use a chat model, or prompts that are text."
        )
    try:
        return render(tokenizer, value, prompting=True, tools=tools_of(row, section))
    except Exception as error:  # templates can raise anything
        key = "data.prompt_key"
        raise template_error(row, key, column, value, section, tokenizer, error) from error


def tools_of(row: Row, section: DataSection) -> list[dict[str, Any]] | None:
    """Return the tools that the chat template describes to the model."""
    return row.values[section.tools_key] if section.tools_key else None


def template_error(
    row: Row,
    config_key: str,
    column: str,
    messages: Sequence[Message],
    section: DataSection,
    tokenizer: PreTrainedTokenizerBase,
    error: Exception,
) -> ConfigError:
    """Return the error for a row whose messages the template rejects, possibly for the first."""
    if messages[0]["role"] == "system" and len(messages) > 1:
        prompting = config_key == "data.prompt_key"
        try:
            render(tokenizer, messages[1:], prompting=prompting, tools=tools_of(row, section))
        except Exception:  # fails without the system message too
            pass
        else:
            refuses = f"the tokenizer's chat template refuses a system message: {error}."
            if section.system_prompt is not None:
                return ConfigError(
                    f"data.system_prompt ({_short(section.system_prompt)}): {refuses} Remove it, "
                    "or write it into the messages of the user."
                )
            return RowError(
                f"{config_key} ({column}): {row.where} begins with one, and {refuses} Write it "
                "into the first message of the user."
            )
    return RowError(
        f"{config_key} ({column}): the tokenizer's chat template refuses {row.where}: "
        f"{error}. Correct the messages."
    )


def tokenised(
    rows: Iterable[Row],
    section: DataSection,
    tokenizer: PreTrainedTokenizerBase,
    bad: BadRows,
) -> Iterator[list[Tokenised]]:
    """Yield prepared rows with their prompts, in chunks. Text and chat are tokenised separately."""

    def with_text(row: Row) -> tuple[Row, str]:
        return row, prompt_text(row, section, tokenizer)

    def with_tokens(each: Tokenised) -> Tokenised:
        row, _, ids = each
        if not ids:
            raise RowError(
                f"data.prompt_key ({section.prompt_key}): {row.where} has a prompt without tokens. "
                "Write a prompt there or remove the row."
            )
        return each

    rows = iter(rows)
    while chunk := list(islice(rows, CHUNK)):
        texts = list(bad.each(with_text, chunk))
        are_texts = [isinstance(row.values[section.prompt_key], str) for row, _ in texts]
        ids: list[list[int]] = [[] for _ in texts]
        for is_text in set(are_texts):
            places = [place for place, each in enumerate(are_texts) if each == is_text]
            batch = [texts[place][1] for place in places]
            if is_text:
                encoded = prompt_ids(tokenizer, batch)
            else:  # the template writes the special tokens
                found: Any = tokenizer(batch, add_special_tokens=False, verbose=False)
                encoded = found["input_ids"]
            for place, tokens in zip(places, encoded, strict=True):
                ids[place] = tokens
        whole = [(row, text, each) for (row, text), each in zip(texts, ids, strict=True)]
        yield list(bad.each(with_tokens, whole))


def is_short(what: Literal["prompt", "response"], row: Row, num_tokens: int, section: Any) -> bool:
    """Return whether a prompt or response is within its length limit.

    Raises:
        ConfigError: it is too long and `data.too_long` is `error`.
    """
    key = f"max_{what}_tokens"
    most = getattr(section, key)
    if num_tokens > most and section.too_long == "error":
        raise ConfigError(
            f"data.{key} ({most}): the {what} of {row.where} has {num_tokens} tokens. Set "
            f"data.{key} to at least {num_tokens}, shorten the {what}, or set data.too_long to "
            f"skip."
        )
    return num_tokens <= most


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
