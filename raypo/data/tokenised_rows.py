"""Prompts of prepared rows, rendered by the chat template and tokenised in chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from raypo.config import ConfigError, DataSection
from raypo.data.chat_messages import ChatFormat, Message, render
from raypo.data.images import ImageReader
from raypo.data.prepared_rows import TEMPLATE_KWARGS, short, tools_column
from raypo.data.rows import BadRows, Row, RowError
from raypo.data.special_tokens import SpecialTokenError, has_hidden, hidden_in_text
from raypo.data.stop_tokens import ids_behind, prompt_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CHUNK = 1024
"""Number of rows tokenised in one call."""


def tokenised(
    rows: Iterable[Row],
    section: DataSection,
    tokenizer: PreTrainedTokenizerBase,
    bad: BadRows,
    reader: Callable[[], ImageReader] | None = None,
) -> Iterator[list[Row]]:
    """Yield prepared rows with `prompt_text` and `prompt_ids`, in chunks.

    Text and chat are tokenised separately.

    Args:
        rows: The prepared rows.
        section: The data section.
        tokenizer: Tokenizer of the policy.
        bad: Record of unusable rows.
        reader: Function that returns the reader of the policy's images. It is called for rows with
            images. None means that the policy gets none.
    """

    def with_text(row: Row) -> Row:
        return row._replace(prompt_text=prompt_text(row, section, tokenizer))

    def with_tokens(row: Row) -> Row:
        if not len(row.prompt_ids):
            raise RowError(
                f"data.prompt_key ({section.prompt_key}): {row.where} has a prompt without tokens. "
                "Write a prompt there or remove the row."
            )
        return _with_placeholders(row, section, reader) if row.images else row

    rows = iter(rows)
    while chunk := list(islice(rows, CHUNK)):
        chunk = list(bad.each(with_text, chunk))
        are_texts = [isinstance(row.values[section.prompt_key], str) for row in chunk]
        for is_text in set(are_texts):
            indices = [i for i, is_chunk_text in enumerate(are_texts) if is_chunk_text == is_text]
            batch = [chunk[index].prompt_text for index in indices]
            if is_text:
                encoded = prompt_ids(tokenizer, batch)
            else:  # the template writes the special tokens
                encoded = ids_behind(tokenizer, batch, [None] * len(batch))
            for index, ids in zip(indices, encoded, strict=True):
                chunk[index] = chunk[index]._replace(prompt_ids=np.asarray(ids, np.int32))
                if has_hidden(chunk[index].prompt_text):
                    bad.count_special_tokens(chunk[index])
        yield list(bad.each(with_tokens, chunk))


def _with_placeholders(
    row: Row, section: DataSection, reader: Callable[[], ImageReader] | None
) -> Row:
    """Return a row with placeholders for its images in its ids."""
    where = f"data.image_key ({section.image_key}): {row.where}"
    if reader is None:
        raise ConfigError(f"{where} has images, but this recipe reads texts. Remove them.")
    try:
        ids = reader().expanded(row.prompt_ids, [image.size for image in row.images])
    except ValueError as error:
        raise RowError(f"{where} {error}.") from None
    return row._replace(prompt_ids=ids, slotted_ids=row.prompt_ids)


def prompt_text(row: Row, section: DataSection, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the text to tokenise: the prompt itself, or its rendered chat messages.

    Special tokens in the prompt are placeholders in it (`raypo.data.special_tokens`).
    """
    column, key = section.prompt_key, "data.prompt_key"
    value = row.values[column]
    chat = chat_format(section, row)
    if isinstance(value, str):
        try:
            return hidden_in_text(tokenizer, value, chat.special_tokens)
        except SpecialTokenError as error:
            raise special_token_error(row, key, column, error) from None
    if not tokenizer.chat_template:
        raise ConfigError(
            f"data.prompt_key ({column}): {row.where} has chat messages, but the policy's "
            "tokenizer has no chat template. Use a chat model, or prompts that are text."
        )
    try:
        return render(tokenizer, value, prompting=True, tools=tools_of(row, section), chat=chat)
    except Exception as error:  # templates can raise anything
        raise template_error(row, key, column, value, section, tokenizer, error) from error


def chat_format(section: DataSection, row: Row | None = None) -> ChatFormat:
    """Return the settings of a config, and of a row, for chat templates and special tokens."""
    own = row.values.get(TEMPLATE_KWARGS) if row else None
    kwargs = section.chat_template_kwargs | (own if isinstance(own, dict) else {})
    return ChatFormat(section.special_tokens_in_text, kwargs)


def special_token_error(row: Row, config_key: str, column: str, error: Exception) -> RowError:
    """Return the error for a row with a special token that is refused."""
    return RowError(f"{config_key} ({column}): {row.where} {error}.")


def tools_of(row: Row, section: DataSection) -> list[dict[str, Any]] | None:
    """Return the tools that the chat template describes to the model."""
    name = tools_column(row, section)
    return row.values[name] if name else None


def template_error(
    row: Row,
    config_key: str,
    column: str,
    messages: Sequence[Message],
    section: DataSection,
    tokenizer: PreTrainedTokenizerBase,
    error: Exception,
) -> ConfigError:
    """Return the error for a row whose messages the template rejects.

    If the template accepts the messages without the system message, the error says so.
    """
    if isinstance(error, SpecialTokenError):
        return special_token_error(row, config_key, column, error)
    if messages[0]["role"] == "system" and len(messages) > 1:
        prompting = config_key == "data.prompt_key"
        try:
            tools, chat = tools_of(row, section), chat_format(section, row)
            render(tokenizer, messages[1:], prompting=prompting, tools=tools, chat=chat)
        except Exception:  # fails without the system message too
            pass
        else:
            refuses = f"the tokenizer's chat template refuses a system message: {error}."
            if section.system_prompt is not None:
                return ConfigError(
                    f"data.system_prompt ({short(section.system_prompt)}): {refuses} Remove it, "
                    "or write it into the messages of the user."
                )
            return RowError(
                f"{config_key} ({column}): {row.where} begins with a system message, but "
                f"{refuses} Write it into the first message of the user."
            )
    return RowError(
        f"{config_key} ({column}): the tokenizer's chat template refuses {row.where}: "
        f"{error}. Correct the messages."
    )


def is_short(what: Literal["prompt", "response"], row: Row, num_tokens: int, section: Any) -> bool:
    """Return whether a prompt or response is within its length limit.

    Raises:
        ConfigError: the prompt or response is too long, and `data.too_long` is `error`.
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
