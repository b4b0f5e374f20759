"""From sources of rows to tokenised prompts; `key` is the config key that sources come from."""

from __future__ import annotations

import difflib
import json
import re
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain, islice
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from raypo.config import ConfigError, DataSection, PromptSource, source_name
from raypo.data.rows import Row, RowsOnDisk, check_data_set, is_data_set, read_rows, rows_on_disk
from raypo.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PEEK_ROWS = 1000
"""Rows of each file that `peek` looks at."""

_LOOKS_LIKE_CHAT = re.compile(
    r"""\s*\[\s*\{\s*["'](role["']\s*:|content["']\s*:.*["']role["']\s*:)""", re.DOTALL
)
"""JSON or Python's own writing of a list of messages, whole or not."""

CHUNK = 1024
"""Rows that a tokenizer gets at once."""

Tokenised = tuple[Row, str, list[int]]
"""A row, the text of its prompt, and that in tokens."""


@dataclass(frozen=True)
class LoadedPrompts:
    """Tokenised prompts in the order of the sources."""

    prompts: Sequence[Prompt]
    """Of sources that stay on disk each is read and tokenised whenever it is asked for."""
    num_skipped: int
    """Prompts left out because they are longer than data.max_prompt_tokens."""
    sizes: tuple[int, ...]
    """Prompts of each source."""

    def notes(self, key: str) -> list[str]:
        """What was left out of a config key's prompts, in words; nothing where all are there."""
        number = self.num_skipped + len(self.prompts)
        words = f"{self.num_skipped} of the {number} prompts of {key} are longer than"
        return [f"{words} data.max_prompt_tokens and skipped"] if self.num_skipped else []


def peek(
    section: DataSection,
    *,
    key: str = "data.prompts",
    response_keys: Mapping[str, str] | None = None,
) -> int | None:
    """Check prompt files without a tokenizer or any heavy import, by their first rows.

    Args:
        section: Names the sources, and what each row must have: a prompt, or where `messages_key`
            is set a whole conversation.
        response_keys: Config key -> column of the responses that each row must have.

    Returns:
        The number of rows; None where there are more than it looks at, or a data set is among them.

    Raises:
        ConfigError: a file is missing, empty, unreadable or of an unknown kind, or a row lacks
            the prompt, the label or a response, or one of them is neither text nor chat messages.
    """
    num_rows: int | None = 0
    for source in section.prompts:
        if is_data_set(source):
            check_data_set(source, key=key)
            num_rows = None
            continue
        rows = islice(read_rows(source, key=key), PEEK_ROWS)
        if getattr(section, "messages_key", None):
            prepared = prepared_conversations(rows, source, section)
        else:
            prepared = prepared_rows(rows, source, section, response_keys)
        seen = sum(1 for _ in prepared)
        num_rows = None if num_rows is None or seen == PEEK_ROWS else num_rows + seen
    return num_rows


def load_prompts(
    section: DataSection, tokenizer: PreTrainedTokenizerBase, *, key: str = "data.prompts"
) -> LoadedPrompts:
    """Read and tokenise prompts.

    Text is tokenised with the special tokens that the tokenizer adds by default; chat messages go
    through its chat template, which writes the special tokens itself. `Prompt.index` is the row
    over all sources in their order, skipped rows counted.

    Every row is read once here, in whichever worker. Of data sets and folders of `save_to_disk`
    8 bytes of each prompt stay in memory: which row it is. Of files the prompts themselves stay.

    Raises:
        ConfigError: what `peek` refuses, a prompt without tokens, one that is too long where
            `data.too_long` is `error`, or nothing left.
    """
    parts: list[tuple[Sequence[Any], Callable[[Any], Prompt]]] = []
    first = num_skipped = shortest = 0
    for source in section.prompts:
        on_disk = rows_on_disk(source, key=key)
        read = partial(_prompts, section, source, tokenizer, first)
        kept: list[Prompt] = []
        places, begin = array("q"), first
        for row, prompt in read(read_rows(source, key=key) if on_disk is None else on_disk, 0):
            first, length = prompt.index + 1, len(prompt.token_ids)
            if not is_allowed(row, length, section):
                num_skipped += 1
                shortest = min(shortest or length, length)
            elif on_disk is None:
                kept.append(prompt)
            else:
                places.append(prompt.index - begin)
        if on_disk is None:
            parts.append((kept, lambda prompt: prompt))
        else:
            parts.append((places, partial(_prompt_on_disk, on_disk, read)))
    sizes = tuple(len(items) for items, _ in parts)
    if not sum(sizes):
        raise ConfigError(
            f"data.max_prompt_tokens ({section.max_prompt_tokens}): all {num_skipped} prompts of "
            f"{key} are longer. Set data.max_prompt_tokens to at least {shortest}, the length of "
            f"the shortest."
        )
    return LoadedPrompts(Prompts(parts), num_skipped, sizes)


def _prompts(
    section: DataSection,
    source: PromptSource,
    tokenizer: PreTrainedTokenizerBase,
    first: int,
    rows: Iterable[Row],
    place: int,
) -> Iterator[tuple[Row, Prompt]]:
    """The prompts of a source's rows from a place on; `first` is the index of its first row."""
    prepared = prepared_rows(rows, source, section)
    for row, text, token_ids in chain.from_iterable(tokenised(prepared, section, tokenizer)):
        given = row.values[section.prompt_key]
        yield (
            row,
            Prompt(
                index=first + place,
                text=text,
                token_ids=np.asarray(token_ids, np.int32),
                label=row.values[section.label_key] if section.label_key else None,
                messages=given if is_chat(given) else None,
                data_source=source_name(source),
            ),
        )
        place += 1


def _prompt_on_disk(
    rows: RowsOnDisk, read: Callable[..., Iterator[tuple[Row, Prompt]]], place: int
) -> Prompt:
    return next(read([rows[place]], place))[1]


class Prompts(Sequence[Prompt]):
    """The prompts of several sources, each a sequence and what makes a prompt of its items."""

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


def prepared_rows(
    rows: Iterable[Row],
    source: PromptSource,
    section: DataSection,
    response_keys: Mapping[str, str] | None = None,
) -> Iterator[Row]:
    """The rows of a source, checked as far as it takes no tokenizer, and with the system prompt."""
    responses = response_keys or {}
    columns = {"data.prompt_key": section.prompt_key, **responses}
    if section.label_key:
        columns["data.label_key"] = section.label_key
    for row in with_columns(rows, source, columns):
        value = row.values[section.prompt_key]
        if not (isinstance(value, str) or is_chat(value)):
            raise ConfigError(
                f"data.prompt_key ({section.prompt_key}): {row.where} has {_short(value)} there. "
                "A prompt is a text, or a list of chat messages with role and content. Correct "
                "the row or remove it."
            )
        for config_key, column in responses.items():
            value = row.values[column]
            if not (isinstance(value, str) or (is_chat(value) and len(value) == 1)):
                raise ConfigError(
                    f"{config_key} ({column}): {row.where} has {_short(value)} there. A response "
                    "is a text, or a list of one chat message with role and content. Correct the "
                    "row or remove it."
                )
        yield _with_system_prompt(row, "data.prompt_key", section.prompt_key, section.system_prompt)


def prepared_conversations(
    rows: Iterable[Row], source: PromptSource, section: Any
) -> Iterator[Row]:
    """The rows of a source, each with a conversation, and with the system prompt."""
    key, column = "data.messages_key", section.messages_key
    for row in with_columns(rows, source, {key: column}):
        messages = row.values[column]
        if not is_chat(messages) or all(each["role"] != "assistant" for each in messages[1:]):
            raise ConfigError(
                f"{key} ({column}): {row.where} has no list of chat messages in which the "
                "assistant answers. Correct the row or remove it."
            )
        yield _with_system_prompt(row, key, column, section.system_prompt)


def with_columns(
    rows: Iterable[Row], source: PromptSource, columns: Mapping[str, str]
) -> Iterator[Row]:
    """The rows, each with the wanted columns; one that the first row lacks is the config's.

    Chat messages that stand in a row as JSON text, as they must in csv, come as a list; labels stay
    as they are.
    """
    for number, row in enumerate(rows):
        for config_key, name in columns.items():
            if name in row.values:
                continue
            there = ", ".join(row.values) or "none"
            if number:
                raise ConfigError(
                    f"{config_key} ({name}): {row.where} has no such key, it has {there}. "
                    "Correct the row or remove it."
                )
            near = difflib.get_close_matches(name, row.values, n=1, cutoff=0.5)
            raise ConfigError(
                f"{config_key} ({name}): {source} has no such column, it has {there}. "
                f"Set {config_key} to {near[0] if near else 'one of them'}."
            )
        read = {
            name: _chat_of_text(row, config_key, name)
            for config_key, name in columns.items()
            if config_key != "data.label_key"
        }
        yield row._replace(values=row.values | read)


def _chat_of_text(row: Row, config_key: str, name: str) -> Any:
    """A row's value; where it is the text of chat messages, the list of them."""
    text = row.values[name]
    if not isinstance(text, str) or not _LOOKS_LIKE_CHAT.match(text):
        return text
    try:
        messages = json.loads(text)
    except json.JSONDecodeError:
        messages = None
    if is_chat(messages):
        return messages
    raise ConfigError(
        f"{config_key} ({name}): {row.where} has {_short(text)} there: chat messages as text, "
        "and no JSON list of objects with role and content. Write it as json.dumps does, or lists "
        "of messages into a jsonl or parquet file."
    )


def _with_system_prompt(row: Row, config_key: str, column: str, system_prompt: str | None) -> Row:
    """The row with a system message before its chat messages."""
    if system_prompt is None:
        return row
    messages = row.values[column]
    where = f"data.system_prompt ({_short(system_prompt)}): {row.where} has "
    if not is_chat(messages):
        raise ConfigError(
            f"{where}a text in {config_key} ({column}), which no chat template reads. Write it as "
            f'[{{"role": "user", "content": TEXT}}], or remove data.system_prompt.'
        )
    if any(message["role"] in ("system", "developer") for message in messages):
        raise ConfigError(
            f"{where}a system message of its own in {config_key} ({column}). Remove it there, or "
            f"remove data.system_prompt."
        )
    system = {"role": "system", "content": system_prompt}
    return row._replace(values=row.values | {column: [system, *messages]})


def is_chat(value: Any) -> bool:
    """Whether a value is a list of chat messages."""
    return (
        isinstance(value, list)
        and len(value) > 0
        and all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in value)
    )


def prompt_text(row: Row, prompt_key: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """What is tokenised: the text itself, or the chat messages through the template."""
    value = row.values[prompt_key]
    if isinstance(value, str):
        return value
    if not tokenizer.chat_template:
        raise ConfigError(
            f"data.prompt_key ({prompt_key}): {row.where} has chat messages, and the policy's "
            "tokenizer has no chat template. Use a chat model, or prompts that are text."
        )
    try:
        text = tokenizer.apply_chat_template(value, add_generation_prompt=True, tokenize=False)
    except Exception as error:  # templates raise what they like
        raise ConfigError(
            f"data.prompt_key ({prompt_key}): the tokenizer's chat template refuses {row.where}: "
            f"{error}. Correct the messages."
        ) from error
    assert isinstance(text, str)
    return text


def tokenised(
    rows: Iterator[Row], section: DataSection, tokenizer: PreTrainedTokenizerBase
) -> Iterator[list[Tokenised]]:
    """Prepared rows with their prompts, in chunks; text and chat of a chunk are tokenised apart."""
    while chunk := list(islice(rows, CHUNK)):
        texts = [prompt_text(row, section.prompt_key, tokenizer) for row in chunk]
        are_texts = [isinstance(row.values[section.prompt_key], str) for row in chunk]
        ids: list[list[int]] = [[] for _ in chunk]
        for is_text in set(are_texts):
            places = [place for place, each in enumerate(are_texts) if each == is_text]
            batch = [texts[place] for place in places]
            encoded: Any = tokenizer(batch, add_special_tokens=is_text, verbose=False)
            for place, tokens in zip(places, encoded["input_ids"], strict=True):
                ids[place] = tokens
        yield list(zip(chunk, texts, ids, strict=True))


def is_allowed(row: Row, num_tokens: int, section: DataSection) -> bool:
    """Whether a prompt is short enough; one without tokens is an error."""
    if num_tokens == 0:
        raise ConfigError(
            f"data.prompt_key ({section.prompt_key}): {row.where} has a prompt without tokens. "
            "Write a prompt there or remove the row."
        )
    return is_short("prompt", row, num_tokens, section)


def is_short(what: Literal["prompt", "response"], row: Row, num_tokens: int, section: Any) -> bool:
    """Whether a prompt or response is short enough; else an error, if `data.too_long` says so."""
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
