"""From files to tokenised examples: responses to learn, pairs to compare, verdicts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from raypo.config import (
    ConfigError,
    PairsSection,
    PreferencesSection,
    ResponsesSection,
)
from raypo.data.conversations import conversation
from raypo.data.prompts import (
    Tokenised,
    is_allowed,
    is_chat,
    is_short,
    prepared_conversations,
    prepared_rows,
    tokenised,
    with_columns,
)
from raypo.data.rows import Row, read_rows
from raypo.types import Example, Pair, Verdict

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Item = TypeVar("Item")


@dataclass(frozen=True)
class LoadedExamples(Generic[Item]):
    """Tokenised examples in the order of the sources."""

    items: list[Item]
    sizes: tuple[int, ...]
    """Examples of each source."""
    num_skipped: int
    """Rows left out because their prompt or a response is too long."""
    num_unusable: int = 0
    """Pairs left out because their responses are equal, or one of them is empty."""

    def notes(self, key: str) -> list[str]:
        """What was left out of a config key's rows, in words; nothing where all are there."""
        rows = f"of the {self.num_skipped + self.num_unusable + len(self.items)} rows of {key}"
        reasons = {
            "have a prompt longer than data.max_prompt_tokens or a response longer than "
            "data.max_response_tokens": self.num_skipped,
            "have equal or empty responses": self.num_unusable,
        }
        return [f"{n} {rows} {why} and are skipped" for why, n in reasons.items() if n]


def load_examples(
    section: ResponsesSection,
    tokenizer: PreTrainedTokenizerBase,
    end_token_id: int,
    *,
    key: str = "data.prompts",
) -> LoadedExamples[Example]:
    """Reads and tokenises prompts and the responses to learn.

    Text prompts are tokenised as `load_prompts` does, text responses without special tokens and
    with `end_token_id` behind them. After chat messages the response is what the chat template
    makes of one more message of the assistant, up to the end token.

    Args:
        end_token_id: The token that ends a response.
        key: The config key that the sources come from, for messages; evaluation has its own.

    Raises:
        ConfigError: a row is wrong, one is too long where `data.too_long` is `error`, or nothing
            is left.
    """
    if section.messages_key is not None:
        return _load_conversations(section, tokenizer, end_token_id, section.messages_key, key)

    def build(row: Row, prompt: list[int], responses: list[np.ndarray]) -> Example:
        return Example(np.asarray(prompt, np.int32), *responses)

    columns = {"data.response_key": section.response_key}
    return _load(section, tokenizer, end_token_id, columns, build, key)


def _load_conversations(
    section: ResponsesSection,
    tokenizer: PreTrainedTokenizerBase,
    end_token_id: int,
    column: str,
    key: str,
) -> LoadedExamples[Example]:
    longest = section.max_prompt_tokens + section.max_response_tokens
    items: list[Example] = []
    sizes: list[int] = []
    num_skipped = 0
    for source in section.prompts:
        for row in prepared_conversations(read_rows(source, key=key), source, section):
            item = conversation(row, column, tokenizer, end_token_id)
            if item.num_tokens <= longest:
                items.append(item)
                continue
            num_skipped += 1
            if section.too_long == "error":
                raise ConfigError(
                    f"data.max_response_tokens ({section.max_response_tokens}): the conversation "
                    f"of {row.where} has {item.num_tokens} tokens, with data.max_prompt_tokens "
                    f"{longest} are allowed. Set data.max_response_tokens to at least "
                    f"{item.num_tokens - section.max_prompt_tokens}, or data.too_long to skip."
                )
        sizes.append(len(items) - sum(sizes))
    if not items:
        raise ConfigError(
            f"{key} ({', '.join(map(str, section.prompts))}): all {num_skipped} conversations have "
            f"more than {longest} tokens (data.max_prompt_tokens + data.max_response_tokens). "
            f"Raise them."
        )
    return LoadedExamples(items, tuple(sizes), num_skipped)


def load_pairs(
    section: PairsSection,
    tokenizer: PreTrainedTokenizerBase,
    end_token_id: int,
    *,
    key: str = "data.prompts",
) -> LoadedExamples[Pair]:
    """Reads prompts with a better and a worse response; otherwise as `load_examples`."""

    def build(row: Row, prompt: list[int], responses: list[np.ndarray]) -> Pair | None:
        chosen, rejected = responses
        if np.array_equal(chosen, rejected) or min(len(chosen), len(rejected)) < 2:
            return None
        margin = _number(row, "data.margin_key", section.margin_key) if section.margin_key else 0.0
        references = None
        if isinstance(section, PreferencesSection) and section.ref_chosen_key:
            references = (
                _number(row, "data.ref_chosen_key", section.ref_chosen_key),
                _number(row, "data.ref_rejected_key", str(section.ref_rejected_key)),
            )
        return Pair(np.asarray(prompt, np.int32), chosen, rejected, margin, references)

    columns = {"data.chosen_key": section.chosen_key, "data.rejected_key": section.rejected_key}
    return _load(section, tokenizer, end_token_id, columns, build, key)


def load_verdicts(
    section: PreferencesSection,
    tokenizer: PreTrainedTokenizerBase,
    end_token_id: int,
    *,
    key: str = "data.prompts",
) -> LoadedExamples[Verdict]:
    """Reads prompts with responses that are desirable or not; otherwise as `load_examples`.

    Without `desirable_key` each pair is two of them. `other_ids` of each is the response of the
    next row with another prompt, of the last one that of the first.
    """
    column = section.desirable_key
    if column is None:
        pairs = load_pairs(section, tokenizer, end_token_id, key=key)
        responses = [
            (pair.prompt_ids, response, response is pair.chosen_ids)
            for pair in pairs.items
            for response in (pair.chosen_ids, pair.rejected_ids)
        ]
        sizes = tuple(2 * size for size in pairs.sizes)
        return LoadedExamples(
            _with_others(responses, key), sizes, pairs.num_skipped, pairs.num_unusable
        )

    def build(row: Row, prompt: list[int], responses: list[np.ndarray]) -> _Judged | None:
        value = row.values[column]
        if value not in (True, False):  # 1 and 0 too
            raise ConfigError(
                f"data.desirable_key ({column}): {row.where} has {value!r} there. A verdict is "
                "true or false. Correct the row or remove it."
            )
        is_empty = len(responses[0]) < 2
        return None if is_empty else (np.asarray(prompt, np.int32), responses[0], bool(value))

    columns = {"data.response_key": section.response_key}
    loaded = _load(section, tokenizer, end_token_id, columns, build, key)
    verdicts = _with_others(loaded.items, key)
    return LoadedExamples(verdicts, loaded.sizes, loaded.num_skipped, loaded.num_unusable)


_Judged = tuple[np.ndarray, np.ndarray, bool]
"""Prompt, response, and whether that is desirable."""


def _with_others(rows: Sequence[_Judged], key: str) -> list[Verdict]:
    """Verdicts, each with a response to another prompt."""
    count = len(rows)
    differs = [not np.array_equal(rows[i][0], rows[(i + 1) % count][0]) for i in range(count)]
    if not any(differs):
        raise ConfigError(
            f"{key}: all {count} responses answer one prompt, and kto compares responses with "
            "those to other prompts. Give more prompts, or choose another dpo.loss."
        )
    last = differs.index(True)
    others = [0] * count
    for row in (place % count for place in range(last, last - count, -1)):
        following = (row + 1) % count
        others[row] = following if differs[row] else others[following]
    return [Verdict(*row, rows[other][1]) for row, other in zip(rows, others, strict=True)]


def _load(
    section: ResponsesSection | PairsSection,
    tokenizer: PreTrainedTokenizerBase,
    end_token_id: int,
    response_keys: dict[str, str],
    build: Callable[[Row, list[int], list[np.ndarray]], Item | None],
    key: str,
) -> LoadedExamples[Item]:
    items: list[Item] = []
    sizes: list[int] = []
    num_skipped = num_unusable = 0
    others = {
        f"data.{name}": column
        for name in ("margin_key", "desirable_key", "ref_chosen_key", "ref_rejected_key")
        if (column := getattr(section, name, None))
    }
    for source in section.prompts:
        read = with_columns(read_rows(source, key=key), source, others)
        rows = prepared_rows(read, source, section, response_keys)
        for chunk in tokenised(rows, section, tokenizer):
            by_column = [
                _responses(chunk, column, section.prompt_key, tokenizer, end_token_id)
                for column in response_keys.values()
            ]
            for (row, _, prompt), *responses in zip(chunk, *by_column, strict=True):
                fits = is_allowed(row, len(prompt), section)
                if not (
                    fits and all(is_short("response", row, len(r), section) for r in responses)
                ):
                    num_skipped += 1
                elif (item := build(row, prompt, responses)) is None:
                    num_unusable += 1
                else:
                    items.append(item)
        sizes.append(len(items) - sum(sizes))
    if num_unusable and not items:
        raise ConfigError(
            f"{key} ({', '.join(map(str, section.prompts))}): {num_unusable} rows have equal or "
            "empty responses and no other row is left, so there is nothing to compare. Look at "
            f"the columns {' and '.join(response_keys.values())}."
        )
    if not items:
        raise ConfigError(
            f"{key} ({', '.join(map(str, section.prompts))}): all {num_skipped} rows have a prompt "
            f"or a response that is too long. Raise data.max_prompt_tokens "
            f"({section.max_prompt_tokens}) or data.max_response_tokens "
            f"({section.max_response_tokens})."
        )
    return LoadedExamples(items, tuple(sizes), num_skipped, num_unusable)


def _responses(
    chunk: Sequence[Tokenised],
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
        for row, prompt, _ in chunk
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


def _number(row: Row, config_key: str, column: str) -> float:
    value = row.values[column]
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    raise ConfigError(
        f"{config_key} ({column}): {row.where} has {value!r} there, and it must be a number. "
        "Correct the row or remove it."
    )
