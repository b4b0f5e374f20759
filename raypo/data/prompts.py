"""From sources of rows to tokenised prompts."""

from __future__ import annotations

import difflib
import json
import re
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import TYPE_CHECKING, Any

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


@dataclass(frozen=True)
class LoadedPrompts:
    """Tokenised prompts in the order of the sources."""

    prompts: Sequence[Prompt]
    """Of sources that stay on disk each is read and tokenised whenever it is asked for."""
    num_skipped: int
    """Prompts left out because they are longer than data.max_prompt_tokens."""
    sizes: tuple[int, ...]
    """Prompts of each source."""


def peek(
    sources: Sequence[PromptSource],
    prompt_key: str,
    label_key: str | None = None,
    *,
    key: str = "data.prompts",
    response_keys: Mapping[str, str] | None = None,
    system_prompt: str | None = None,
) -> int | None:
    """Check prompt files without a tokenizer or any heavy import, by their first rows.

    Args:
        key: The config key that the sources come from, for messages.
        response_keys: Config key -> column of the responses that each row must have.
        system_prompt: What `data.system_prompt` puts before the messages of each row.

    Returns:
        The number of rows; None where there are more than it looks at, or a data set is among them.

    Raises:
        ConfigError: a file is missing, empty, unreadable or of an unknown kind, or a row lacks
            the prompt, the label or a response, or one of them is neither text nor chat messages.
    """
    num_rows, saw_all = 0, True
    for source in sources:
        if is_data_set(source):
            check_data_set(source, key=key)
            saw_all = False
            continue
        rows = read_rows(source, key=key)
        columns = key_columns(prompt_key, label_key) | dict(response_keys or {})
        seen = 0
        for row in with_columns(islice(rows, PEEK_ROWS), source, columns):
            check_prompt(row, prompt_key)
            with_system_prompt(row, "data.prompt_key", prompt_key, system_prompt)
            for config_key, column in (response_keys or {}).items():
                check_response(row, config_key, column)
            seen += 1
        num_rows, saw_all = num_rows + seen, saw_all and seen < PEEK_ROWS
    return num_rows if saw_all else None


def load_prompts(
    section: DataSection, tokenizer: PreTrainedTokenizerBase, *, key: str = "data.prompts"
) -> LoadedPrompts:
    """Read and tokenise prompts.

    Text is tokenised with the special tokens that the tokenizer adds by default; chat messages go
    through its chat template, which writes the special tokens itself. `Prompt.index` is the row
    over all sources in their order, skipped rows counted.

    Every row is read once here, in whichever worker. Of data sets and folders of `save_to_disk`
    8 bytes of each prompt stay in memory: which row it is. Of files the prompts themselves stay.

    Args:
        key: The config key that the paths come from, for messages; evaluation has its own.

    Raises:
        ConfigError: what `peek` refuses, a prompt without tokens, one that is too long where
            `data.too_long` is `error`, or nothing left.
    """
    parts: list[Sequence[Prompt]] = []
    index = num_skipped = shortest = 0
    for source in section.prompts:
        reader = PromptReader(section, source, tokenizer, first_index=index)
        on_disk = rows_on_disk(source, key=key)
        rows = reader.prepared(read_rows(source, key=key) if on_disk is None else iter(on_disk))
        kept: list[Prompt] = []
        places = array("q")
        while chunk := list(islice(rows, CHUNK)):
            place = index - reader.first_index
            for number, prompt in enumerate(reader.tokenised(chunk, place)):
                length = len(prompt.token_ids)
                if not is_allowed(chunk[number], length, section):
                    num_skipped += 1
                    shortest = min(shortest or length, length)
                elif on_disk is None:
                    kept.append(prompt)
                else:
                    places.append(place + number)
            index += len(chunk)
        parts.append(kept if on_disk is None else PromptsOnDisk(on_disk, places, reader))
    sizes = tuple(len(part) for part in parts)
    if not sum(sizes):
        raise ConfigError(
            f"data.max_prompt_tokens ({section.max_prompt_tokens}): all {num_skipped} prompts of "
            f"{key} are longer. Set data.max_prompt_tokens to at least {shortest}, the length of "
            f"the shortest."
        )
    return LoadedPrompts(parts[0] if len(parts) == 1 else Joined(parts), num_skipped, sizes)


@dataclass(frozen=True)
class PromptReader:
    """How the rows of one source become prompts."""

    section: DataSection
    source: PromptSource
    tokenizer: PreTrainedTokenizerBase
    first_index: int
    """Of its first row, over all sources."""

    def prepared(self, rows: Iterator[Row]) -> Iterator[Row]:
        """The rows, each checked, with its messages as a list and with the system prompt."""
        columns = key_columns(self.section.prompt_key, self.section.label_key)
        return prepared_rows(rows, self.source, self.section, columns)

    def tokenised(self, rows: Sequence[Row], place: int) -> list[Prompt]:
        """Prompts of prepared rows that follow each other, from the source's row `place` on."""
        section, tokenizer = self.section, self.tokenizer
        texts = [prompt_text(row, section.prompt_key, tokenizer) for row in rows]
        all_ids = tokenised_prompts(rows, texts, section, tokenizer)
        prompts = []
        for number, (row, text, ids) in enumerate(zip(rows, texts, all_ids, strict=True)):
            given = row.values[section.prompt_key]
            prompts.append(
                Prompt(
                    index=self.first_index + place + number,
                    text=text,
                    token_ids=np.asarray(ids, np.int32),
                    label=row.values[section.label_key] if section.label_key else None,
                    messages=given if is_chat(given) else None,
                    data_source=source_name(self.source),
                )
            )
        return prompts


class PromptsOnDisk(Sequence[Prompt]):
    """Prompts that are read and tokenised whenever they are asked for."""

    def __init__(self, rows: RowsOnDisk, places: array[int], reader: PromptReader) -> None:
        """Only note them; `places` are those of the rows that are prompts."""
        self._rows, self._places, self._reader = rows, places, reader

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, number: int) -> Prompt:  # type: ignore[override]
        place = self._places[number]
        row = next(self._reader.prepared(iter([self._rows[place]])))
        return self._reader.tokenised([row], place)[0]


class Joined(Sequence[Prompt]):
    """Several sequences of prompts as one."""

    def __init__(self, parts: Sequence[Sequence[Prompt]]) -> None:
        self._parts = parts
        self._ends = list(accumulate(map(len, parts)))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, number: int) -> Prompt:  # type: ignore[override]
        if not 0 <= number < len(self):
            raise IndexError(number)
        part = bisect_right(self._ends, number)
        return self._parts[part][number - self._ends[part] + len(self._parts[part])]


def key_columns(prompt_key: str, label_key: str | None) -> dict[str, str]:
    """Config key -> column that each row must have."""
    return {"data.prompt_key": prompt_key} | ({"data.label_key": label_key} if label_key else {})


def prepared_rows(
    rows: Iterator[Row], source: PromptSource, section: DataSection, columns: Mapping[str, str]
) -> Iterator[Row]:
    """The rows of a source, each with a prompt and the wanted columns, and the system prompt."""
    for row in with_columns(rows, source, columns):
        check_prompt(row, section.prompt_key)
        yield with_system_prompt(row, "data.prompt_key", section.prompt_key, section.system_prompt)


def with_columns(
    rows: Iterator[Row], source: PromptSource, columns: Mapping[str, str]
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


def check_prompt(row: Row, prompt_key: str) -> None:
    """Refuse a prompt that is neither text nor chat messages."""
    value = row.values[prompt_key]
    if isinstance(value, str) or is_chat(value):
        return
    raise ConfigError(
        f"data.prompt_key ({prompt_key}): {row.where} has {_short(value)} there. A prompt is a "
        "text, or a list of chat messages with role and content. Correct the row or remove it."
    )


def with_system_prompt(row: Row, config_key: str, column: str, system_prompt: str | None) -> Row:
    """The row with a system message before its chat messages.

    Args:
        row: Its column has been checked.
        config_key: The config key that names the column, for messages.
        column: Of the chat messages.
        system_prompt: The message's text; None: the row stays as it is.

    Raises:
        ConfigError: the row has a text there, or messages with one of the system.
    """
    if system_prompt is None:
        return row
    messages = row.values[column]
    told = f"data.system_prompt ({_short(system_prompt)}): {row.where} has "
    if not is_chat(messages):
        raise ConfigError(
            f"{told}a text in {config_key} ({column}), which no chat template reads. Write it as "
            f'[{{"role": "user", "content": TEXT}}], or remove data.system_prompt.'
        )
    if any(message["role"] in ("system", "developer") for message in messages):
        raise ConfigError(
            f"{told}a system message of its own in {config_key} ({column}). Remove it there, or "
            f"remove data.system_prompt."
        )
    system = {"role": "system", "content": system_prompt}
    return row._replace(values=row.values | {column: [system, *messages]})


def check_response(row: Row, config_key: str, column: str) -> None:
    """Refuse a response that is neither text nor one chat message."""
    value = row.values[column]
    if isinstance(value, str) or (is_chat(value) and len(value) == 1):
        return
    raise ConfigError(
        f"{config_key} ({column}): {row.where} has {_short(value)} there. A response is a text, or "
        "a list of one chat message with role and content. Correct the row or remove it."
    )


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


def tokenised_prompts(
    rows: Sequence[Row],
    texts: Sequence[str],
    section: DataSection,
    tokenizer: PreTrainedTokenizerBase,
) -> list[list[int]]:
    """Token ids by row; in a mixed chunk text and chat are tokenised apart."""
    ids: list[list[int]] = [[] for _ in rows]
    is_text = [isinstance(row.values[section.prompt_key], str) for row in rows]
    for plain in (True, False):
        places = [i for i, text in enumerate(is_text) if text == plain]
        if places:
            batch = [texts[i] for i in places]
            encoded = tokenizer(batch, add_special_tokens=plain, verbose=False)["input_ids"]
            for i, tokens in zip(places, encoded, strict=True):  # pyright: ignore[reportArgumentType]
                ids[i] = tokens  # pyright: ignore[reportArgumentType]
    return ids


def is_allowed(row: Row, num_tokens: int, section: DataSection) -> bool:
    """Whether the prompt is kept; what must not be at all is an error."""
    if num_tokens == 0:
        raise ConfigError(
            f"data.prompt_key ({section.prompt_key}): {row.where} has a prompt without tokens. "
            "Write a prompt there or remove the row."
        )
    if num_tokens <= section.max_prompt_tokens:
        return True
    if section.too_long == "error":
        raise ConfigError(
            f"data.max_prompt_tokens ({section.max_prompt_tokens}): the prompt of {row.where} has "
            f"{num_tokens} tokens. Set data.max_prompt_tokens to at least {num_tokens}, shorten "
            "the prompt, or set data.too_long to skip."
        )
    return False


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
