"""From files to tokenised examples: responses to learn, and pairs to compare."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice, product
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from raypo.config import ConfigError, PairsSection, ResponsesSection
from raypo.data.prompts import (
    CHUNK,
    check_response,
    checked_rows,
    is_allowed,
    is_chat,
    key_columns,
    prompt_text,
    tokenised_prompts,
)
from raypo.data.rows import Row
from raypo.types import Example, Pair

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Item = TypeVar("Item")


@dataclass(frozen=True)
class LoadedExamples(Generic[Item]):
    """Tokenised examples in the order of the files."""

    items: list[Item]
    num_skipped: int
    """Rows left out because their prompt or a response is too long."""


def load_examples(
    section: ResponsesSection,
    tokenizer: PreTrainedTokenizerBase,
    end_token_id: int,
    *,
    key: str = "data.prompts",
) -> LoadedExamples[Example]:
    """Prompts and the responses to learn.

    Text prompts are tokenised as `load_prompts` does, text responses without special tokens and
    with `end_token_id` behind them. After chat messages the response is what the chat template
    makes of one more message of the assistant, up to the end token.

    Args:
        end_token_id: The token that ends a response.
        key: The config key that the paths come from, for messages; evaluation has its own.

    Raises:
        ConfigError: a row is wrong, one is too long where `data.too_long` is `error`, or nothing
            is left.
    """

    def build(row: Row, prompt: list[int], responses: list[np.ndarray]) -> Example:
        return Example(np.asarray(prompt, np.int32), *responses)

    columns = {"data.response_key": section.response_key}
    return _load(section, tokenizer, end_token_id, columns, build, key)


def load_pairs(
    section: PairsSection,
    tokenizer: PreTrainedTokenizerBase,
    end_token_id: int,
    *,
    key: str = "data.prompts",
) -> LoadedExamples[Pair]:
    """Prompts with a better and a worse response; arguments and errors as `load_examples`."""

    def build(row: Row, prompt: list[int], responses: list[np.ndarray]) -> Pair:
        margin = _margin(row, section.margin_key) if section.margin_key else 0.0
        return Pair(np.asarray(prompt, np.int32), *responses, margin=margin)

    columns = {"data.chosen_key": section.chosen_key, "data.rejected_key": section.rejected_key}
    return _load(section, tokenizer, end_token_id, columns, build, key)


def _load(
    section: ResponsesSection | PairsSection,
    tokenizer: PreTrainedTokenizerBase,
    end_token_id: int,
    response_columns: dict[str, str],
    build: Callable[[Row, list[int], list[np.ndarray]], Item],
    key: str,
) -> LoadedExamples[Item]:
    items: list[Item] = []
    num_skipped = 0
    columns = key_columns(section.prompt_key, section.label_key) | response_columns
    if isinstance(section, PairsSection) and section.margin_key:
        columns["data.margin_key"] = section.margin_key
    rows = checked_rows(section, key, columns)
    while chunk := list(islice(rows, CHUNK)):
        for row, (config_key, column) in product(chunk, response_columns.items()):
            check_response(row, config_key, column)
        texts = [prompt_text(row, section.prompt_key, tokenizer) for row in chunk]
        prompts = tokenised_prompts(chunk, texts, section, tokenizer)
        by_column = [
            _responses(chunk, texts, column, section.prompt_key, tokenizer, end_token_id)
            for column in response_columns.values()
        ]
        for row, prompt, *responses in zip(chunk, prompts, *by_column, strict=True):
            fits = is_allowed(row, len(prompt), section)
            if fits and all(_is_short(row, ids, section) for ids in responses):
                items.append(build(row, prompt, responses))
            else:
                num_skipped += 1
    if not items:
        raise ConfigError(
            f"{key} ({', '.join(map(str, section.prompts))}): all {num_skipped} rows have a prompt "
            f"or a response that is too long. Raise data.max_prompt_tokens "
            f"({section.max_prompt_tokens}) or data.max_response_tokens "
            f"({section.max_response_tokens})."
        )
    return LoadedExamples(items, num_skipped)


def _responses(
    rows: Sequence[Row],
    prompts: Sequence[str],
    column: str,
    prompt_key: str,
    tokenizer: PreTrainedTokenizerBase,
    end_token_id: int,
) -> list[np.ndarray]:
    """Token ids [T] of each row's response, its end included."""
    texts = [
        _after_chat(row.values[prompt_key], prompt, _content(row.values[column]), tokenizer)
        if is_chat(row.values[prompt_key])
        else _content(row.values[column])
        for row, prompt in zip(rows, prompts, strict=True)
    ]
    encoded: Any = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    return [_ended(ids, end_token_id) for ids in encoded]


def _content(response: Any) -> str:
    return response if isinstance(response, str) else response[0]["content"]


def _after_chat(
    messages: list[dict[str, Any]],
    prompt: str,
    response: str,
    tokenizer: PreTrainedTokenizerBase,
) -> str:
    """What the chat template writes behind the prompt for the assistant's message."""
    answered = [*messages, {"role": "assistant", "content": response}]
    whole = tokenizer.apply_chat_template(answered, tokenize=False)
    assert isinstance(whole, str)
    # Some templates rewrite earlier turns; then the response itself is learned.
    return whole.removeprefix(prompt) if whole.startswith(prompt) else response


def _ended(ids: list[int], end_token_id: int) -> np.ndarray:
    """The ids up to their first end token, which is added where there is none."""
    kept = ids[: ids.index(end_token_id)] if end_token_id in ids else ids
    return np.asarray([*kept, end_token_id], np.int32)


def _is_short(row: Row, ids: np.ndarray, section: ResponsesSection | PairsSection) -> bool:
    if len(ids) <= section.max_response_tokens:
        return True
    if section.too_long == "error":
        raise ConfigError(
            f"data.max_response_tokens ({section.max_response_tokens}): a response of {row.where} "
            f"has {len(ids)} tokens. Set data.max_response_tokens to at least {len(ids)}, shorten "
            "the response, or set data.too_long to skip."
        )
    return False


def _margin(row: Row, column: str) -> float:
    value = row.values[column]
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    raise ConfigError(
        f"data.margin_key ({column}): {row.where} has {value!r} there. A margin is a number. "
        "Correct the row or remove it."
    )
