"""Load tokenised training examples from files: responses, preference pairs and verdicts."""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

import numpy as np

from raypo.config import (
    ConfigError,
    PairsSection,
    PreferencesSection,
    ResponsesSection,
)
from raypo.data.chat_messages import Message, answered, is_chat, render, says_more
from raypo.data.conversations import conversation, is_learned
from raypo.data.images import ImageReader, Slotted, WithImages
from raypo.data.item_store import ItemStore
from raypo.data.prepared_rows import (
    count_ignored,
    prepared_conversation,
    prepared_row,
    with_columns,
    with_tools_in_some,
)
from raypo.data.rows import BadRows, Row, RowError, read_rows
from raypo.data.special_tokens import SpecialTokenError, has_hidden, hidden_in_text
from raypo.data.stop_tokens import StopTokens, ids_behind
from raypo.data.tokenised_rows import (
    chat_format,
    is_short,
    special_token_error,
    template_error,
    tokenised,
    tools_of,
)
from raypo.types import Example, Pair, Verdict

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Item = TypeVar("Item")


@dataclass(frozen=True)
class LoadedExamples(Generic[Item]):
    """Tokenised examples in the order of the sources."""

    items: Sequence[Item]
    sizes: tuple[int, ...]
    """Number of examples of each source."""
    num_skipped: int
    """Rows skipped because their prompt or a response is too long."""
    num_unusable: int = 0
    """Rows skipped because a response is empty, or because both responses of a pair are equal."""
    bad: BadRows = field(default_factory=lambda: BadRows("refuse"))

    def notes(self, key: str) -> list[str]:
        """Return one line for each reason why rows of a config key were skipped."""
        rows = f"of the {self.num_skipped + self.num_unusable + len(self.items)} rows of {key}"
        reasons = {
            "have a prompt longer than data.max_prompt_tokens or a response longer than "
            "data.max_response_tokens": self.num_skipped,
            "have equal responses, an empty one or none to learn": self.num_unusable,
        }
        skipped = [f"{n} {rows} {why} and are skipped" for why, n in reasons.items() if n]
        return skipped + self.bad.notes(key)


def load_examples(
    section: ResponsesSection,
    tokenizer: PreTrainedTokenizerBase,
    stop_token_ids: Sequence[int],
    *,
    key: str = "data.prompts",
    reader: Callable[[], ImageReader] | None = None,
) -> LoadedExamples[Example]:
    """Read and tokenise prompts and the responses to train on.

    Text prompts are tokenised as in `load_prompts`. Text responses are tokenised without special
    tokens, and an end token is appended. If the prompt is chat messages, the response is one more
    assistant message, rendered with the chat template up to the stop token that it writes.

    Args:
        section: The sources, their columns and the length limits.
        tokenizer: Hugging Face tokenizer of the model.
        stop_token_ids: Tokens that end a response.
        key: Config key of the sources, for error messages. Evaluation has a key of its own.
        reader: Function that returns the reader of the model's images (`tokenised`).

    Raises:
        ConfigError: a row is invalid, a row is too long and `data.too_long` is `error`, or no row
            is left.
    """
    if section.messages_key is not None:
        stops = StopTokens(tokenizer, stop_token_ids, chat_format(section))
        return _load_conversations(section, tokenizer, stops, key)

    def build(row: Row, responses: list[_Response]) -> Example | None:
        (response,) = responses
        return None if response.is_empty else Example(row.prompt_ids, response.ids)

    columns = {"data.response_key": section.response_key}
    return _load(section, tokenizer, stop_token_ids, columns, build, key, reader)


def _load_conversations(
    section: ResponsesSection,
    tokenizer: PreTrainedTokenizerBase,
    stops: StopTokens,
    key: str,
) -> LoadedExamples[Example]:
    longest = section.max_prompt_tokens + section.max_response_tokens
    items: ItemStore[Example] = ItemStore()
    sizes: list[int] = []
    num_skipped = num_unusable = 0
    bad = BadRows(section.on_error)
    column = {"data.messages_key": str(section.messages_key)}

    def read(row: Row) -> tuple[Row, Example | None]:
        """Return the row and its example, which is None if the assistant says nothing."""
        count_ignored(row, column, section, tokenizer.chat_template, bad)
        row = prepared_conversation(row, source, section)
        answers = [m for m in row.values[str(section.messages_key)][1:] if is_learned(m)]
        is_empty = not any(says_more(m) or stops.bare(m["content"]).strip() for m in answers)
        return row, None if is_empty else conversation(row, section, tokenizer, stops, bad)

    for source in section.prompts:
        rows = with_tools_in_some(read_rows(source, key=key, bad=bad), source, section)
        for row, item in bad.each(read, rows):
            if item is None:
                num_unusable += 1
                continue
            if item.num_tokens <= longest:
                items.append(item)
                continue
            num_skipped += 1
            if section.too_long == "error":
                raise ConfigError(
                    f"data.max_response_tokens ({section.max_response_tokens}): the conversation "
                    f"of {row.where} has {item.num_tokens} tokens, but at most {longest} are "
                    "allowed (data.max_prompt_tokens + data.max_response_tokens). Set "
                    "data.max_response_tokens to at least "
                    f"{item.num_tokens - section.max_prompt_tokens}, or data.too_long to skip."
                )
        sizes.append(len(items) - sum(sizes))
    if not items and num_unusable:
        raise ConfigError(
            f"{key} ({', '.join(map(str, section.prompts))}): {num_unusable} conversations have "
            "only empty answers, or none that the loss covers, and no others are left, so there is "
            "nothing to learn. Look at "
            f"{section.messages_key}."
        )
    if not items and not num_skipped:
        bad.refuse_all(key)
    if not items:
        raise ConfigError(
            f"{key} ({', '.join(map(str, section.prompts))}): all {num_skipped} conversations have "
            f"more than {longest} tokens (data.max_prompt_tokens + data.max_response_tokens). "
            f"Raise them."
        )
    return LoadedExamples(items, tuple(sizes), num_skipped, num_unusable, bad)


def load_pairs(
    section: PairsSection,
    tokenizer: PreTrainedTokenizerBase,
    stop_token_ids: Sequence[int],
    *,
    key: str = "data.prompts",
    reader: Callable[[], ImageReader] | None = None,
) -> LoadedExamples[Pair]:
    """Read prompts with a chosen and a rejected response, otherwise like `load_examples`."""

    def build(row: Row, responses: list[_Response]) -> Pair | None:
        chosen, rejected = (each.ids for each in responses)
        if np.array_equal(chosen, rejected) or any(each.is_empty for each in responses):
            return None
        margin = _number(row, "data.margin_key", section.margin_key) if section.margin_key else 0.0
        references = None
        if isinstance(section, PreferencesSection) and section.ref_chosen_key:
            references = (
                _log_prob(row, "data.ref_chosen_key", section.ref_chosen_key),
                _log_prob(row, "data.ref_rejected_key", str(section.ref_rejected_key)),
            )
        return Pair(row.prompt_ids, chosen, rejected, margin, references)

    columns = {"data.chosen_key": section.chosen_key, "data.rejected_key": section.rejected_key}
    return _load(section, tokenizer, stop_token_ids, columns, build, key, reader)


def load_verdicts(
    section: PreferencesSection,
    tokenizer: PreTrainedTokenizerBase,
    stop_token_ids: Sequence[int],
    *,
    key: str = "data.prompts",
    reader: Callable[[], ImageReader] | None = None,
) -> LoadedExamples[Verdict]:
    """Read prompts with desirable and undesirable responses, otherwise like `load_examples`.

    Without `desirable_key`, the rows are pairs, and each pair becomes two verdicts. `other_ids` of
    a verdict is the response of the next row that has another prompt. After the last row, the
    search continues at the first.
    """
    column = section.desirable_key
    if column is None:
        pairs = load_pairs(section, tokenizer, stop_token_ids, key=key)
        responses = ItemStore(
            (pair.prompt_ids, response, response is pair.chosen_ids)
            for pair in pairs.items
            for response in (pair.chosen_ids, pair.rejected_ids)
        )
        sizes = tuple(2 * size for size in pairs.sizes)
        return LoadedExamples(
            _with_others(responses, key), sizes, pairs.num_skipped, pairs.num_unusable, pairs.bad
        )

    def build(row: Row, responses: list[_Response]) -> _Judged | None:
        value = row.values[column]
        if isinstance(value, str):  # as in csv files, whose values are text
            value = _VERDICTS.get(value.strip().lower(), value)
        if value not in (True, False):  # this accepts 1 and 0 too
            raise RowError(
                f"data.desirable_key ({column}): {row.where} has {value!r} there. A verdict must "
                "be true or false. Correct the row or remove it."
            )
        (response,) = responses
        judged = row.prompt_ids, response.ids, bool(value)
        return None if response.is_empty else judged

    columns = {"data.response_key": section.response_key}
    loaded = _load(section, tokenizer, stop_token_ids, columns, build, key)
    verdicts = _with_others(loaded.items, key)
    return LoadedExamples(
        verdicts, loaded.sizes, loaded.num_skipped, loaded.num_unusable, loaded.bad
    )


_VERDICTS = {"true": True, "1": True, "false": False, "0": False}

_Judged = tuple[np.ndarray, np.ndarray, bool]
"""Prompt, response, and True if the response is desirable."""


def _with_others(rows: Sequence[_Judged], key: str) -> Sequence[Verdict]:
    """Return verdicts, each with a response to another prompt."""
    count = len(rows)
    following = chain(islice(rows, 1, None), rows[:1])
    differs = [not np.array_equal(a[0], b[0]) for a, b in zip(rows, following, strict=True)]
    if not any(differs):
        raise ConfigError(
            f"{key}: all {count} responses answer one prompt, but kto compares responses to "
            "different prompts. Give more prompts, or choose another dpo.loss."
        )
    last = differs.index(True)
    others = array("q", [0]) * count
    for row in (place % count for place in range(last, last - count, -1)):
        after = (row + 1) % count
        others[row] = after if differs[row] else others[after]
    return ItemStore(Verdict(*row, rows[other][1]) for row, other in zip(rows, others, strict=True))


_TAG = re.compile(r"<[^>]*>?")
"""Pattern of a tag with which a generation prompt opens a block, such as `<think>`."""


class _Response(NamedTuple):
    """A tokenised response."""

    ids: np.ndarray
    """Token ids with the end token, int32 [T]."""
    is_empty: bool


class _Written(NamedTuple):
    """A response before tokenisation."""

    text: str
    end: int
    """Stop token to append if the text contains none."""
    is_empty: bool


_Responded = tuple[Row, list[_Response]]
"""A row and its tokenised responses."""


def _load(
    section: ResponsesSection | PairsSection,
    tokenizer: PreTrainedTokenizerBase,
    stop_token_ids: Sequence[int],
    response_keys: Mapping[str, str],
    build: Callable[[Row, list[_Response]], Item | None],
    key: str,
    reader: Callable[[], ImageReader] | None = None,
) -> LoadedExamples[Item]:
    stops = StopTokens(tokenizer, stop_token_ids, chat_format(section))
    items: ItemStore[Slotted[Item]] = ItemStore()
    sizes: list[int] = []
    num_skipped = num_unusable = 0
    bad = BadRows(section.on_error)
    others = {
        f"data.{name}": column
        for name in ("margin_key", "desirable_key", "ref_chosen_key", "ref_rejected_key")
        if (column := getattr(section, name, None))
    }

    columns = {"data.prompt_key": section.prompt_key, **response_keys, **others}
    columns |= {"data.image_key": section.image_key} if section.image_key else {}

    def prepare(row: Row) -> Row:
        count_ignored(row, columns, section, tokenizer.chat_template, bad)
        return prepared_row(with_columns(row, source, others), source, section, response_keys)

    def built(responded: _Responded) -> tuple[bool, Slotted[Item] | None]:
        """Return whether a row is short enough, and the item built from it."""
        row, responses = responded
        fits = [is_short("prompt", row, len(row.prompt_ids), section)]
        fits += [is_short("response", row, len(response.ids), section) for response in responses]
        item = build(row, responses) if all(fits) else None
        return all(fits), None if item is None else Slotted.of(item, row)

    for source in section.prompts:
        rows = with_tools_in_some(read_rows(source, key=key, bad=bad), source, section)
        rows = bad.each(prepare, rows)
        for chunk in tokenised(rows, section, tokenizer, bad, reader):
            responded = _with_responses(chunk, response_keys, section, stops, bad)
            for fits, item in bad.each(built, responded):
                if not fits:
                    num_skipped += 1
                elif item is None:
                    num_unusable += 1
                else:
                    items.append(item)
        sizes.append(len(items) - sum(sizes))
    if not items:
        raise _nothing_left(section, response_keys, key, bad, num_skipped, num_unusable)
    return LoadedExamples(WithImages(items, reader), tuple(sizes), num_skipped, num_unusable, bad)


def _nothing_left(
    section: ResponsesSection | PairsSection,
    response_keys: Mapping[str, str],
    key: str,
    bad: BadRows,
    num_skipped: int,
    num_unusable: int,
) -> ConfigError:
    """Return the error to raise if no row of the sources is usable."""
    if num_unusable:
        return ConfigError(
            f"{key} ({', '.join(map(str, section.prompts))}): {num_unusable} rows have equal "
            "responses or an empty one and no other rows are left, so there is nothing to "
            f"learn. Look at {' and '.join(response_keys.values())}."
        )
    if not num_skipped:
        bad.refuse_all(key)
    return ConfigError(
        f"{key} ({', '.join(map(str, section.prompts))}): all {num_skipped} rows have a prompt "
        f"or a response that is too long. Raise data.max_prompt_tokens "
        f"({section.max_prompt_tokens}) or data.max_response_tokens "
        f"({section.max_response_tokens})."
    )


def _with_responses(
    chunk: Sequence[Row],
    response_keys: Mapping[str, str],
    section: ResponsesSection | PairsSection,
    stops: StopTokens,
    bad: BadRows,
) -> Iterator[_Responded]:
    """Yield rows with their responses. All responses of a chunk are tokenised in one call."""
    tokenizer, columns = stops.tokenizer, list(response_keys.items())

    def written(row: Row) -> tuple[Row, list[_Written]]:
        return row, [_written(row, *column, section, tokenizer, stops) for column in columns]

    rows = list(bad.each(written, chunk))
    texts = [one.text for _, writings in rows for one in writings]
    before = [row.prompt_text for row, writings in rows for _ in writings]
    encoded = iter(ids_behind(tokenizer, texts, before) if texts else [])
    with_ids = [(row, [(one, next(encoded)) for one in writings]) for row, writings in rows]

    def responded(each: tuple[Row, list[tuple[_Written, list[int]]]]) -> _Responded:
        row, writings = each
        is_text = isinstance(row.values[section.prompt_key], str)
        responses = []
        if any(has_hidden(one.text) for one, _ in writings) and not has_hidden(row.prompt_text):
            bad.count_special_tokens(row)
        for (config_key, column), (one, ids) in zip(columns, writings, strict=True):
            cut = next((token for token in ids[:-1] if token in stops.ids), None)
            if is_text and cut is not None:  # the stop token is an ordinary word
                raise _inside(row, config_key, column, repr(tokenizer.decode([cut])))
            responses.append(_Response(stops.ended(ids, one.end), one.is_empty))
        return row, responses

    yield from bad.each(responded, with_ids)


def _written(
    row: Row,
    config_key: str,
    column: str,
    section: ResponsesSection | PairsSection,
    tokenizer: PreTrainedTokenizerBase,
    stops: StopTokens,
) -> _Written:
    """Return a row's response as the text that follows the prompt."""
    prompt = row.prompt_text
    message: Message = row.values[column]
    messages = row.values[section.prompt_key]
    bare = message | {"content": stops.bare(message["content"])}
    is_empty = not (says_more(bare) or bare["content"].strip())
    if text := stops.inside(bare):
        raise _inside(row, config_key, column, text)
    if not is_chat(messages):
        if says_more(message):
            raise RowError(
                f"{config_key} ({column}): {row.where} has tool calls or reasoning there, which "
                "only a chat template can render, but its prompt is a text. Write the prompt as "
                "chat messages."
            )
        try:
            text = hidden_in_text(tokenizer, bare["content"], stops.chat.special_tokens)
        except SpecialTokenError as error:
            raise special_token_error(row, config_key, column, error) from None
        text += stops.end_of(message["content"])
        return _Written(text, stops.default, is_empty)
    said = answered(messages, bare)
    try:
        whole = render(
            tokenizer, said, tools=tools_of(row, section), chat=chat_format(section, row)
        )
    except Exception as error:  # templates can raise anything
        raise template_error(row, config_key, column, said, section, tokenizer, error) from error
    if whole.startswith(prompt):
        return _Written(whole.removeprefix(prompt), stops.after(said), is_empty)
    # Some generation prompts open a block that the template omits from messages, like <think>.
    shared = next(at for at, each in enumerate(prompt) if whole[at : at + 1] != each)
    opened = prompt[shared:]
    if says_more(message):
        raise RowError(
            f"{config_key} ({column}): {row.where} has tool calls or reasoning there, but the "
            f"template's generation prompt ends with {opened!r}, which the template omits from "
            "complete messages. Write the response as one text, exactly as the model should "
            "write it."
        )
    content = bare["content"]
    mark = opened.strip()
    if content.lstrip().startswith(mark):
        content = content.lstrip().removeprefix(mark).lstrip("\n")
    elif (tag := _TAG.match(mark)) and tag[0].replace("<", "</", 1) not in mark + content:
        raise RowError(
            f"{config_key} ({column}): {row.where} has a response that neither repeats nor "
            f"closes {mark}, which the template's generation prompt opens, so all of it would be "
            "learned as the content of that tag. Write the response exactly as the model should "
            "write it."
        )
    (behind,) = ids_behind(tokenizer, [whole[shared:]])
    end = next((token for token in behind if token in stops.ids), stops.default)
    return _Written(content, end, is_empty)


def _inside(row: Row, config_key: str, column: str, text: str) -> RowError:
    return RowError(
        f"{config_key} ({column}): {row.where} has the stop token {text} inside the response, so "
        "the response would end there. Correct the row or remove it."
    )


def _log_prob(row: Row, config_key: str, column: str) -> float:
    value = _number(row, config_key, column)
    if value > 0:
        raise RowError(
            f"{config_key} ({column}): {row.where} has {value:g} there, and a log-prob is at most "
            "0. Give the sum of the natural logarithms of the response's token probabilities."
        )
    return value


def _number(row: Row, config_key: str, column: str) -> float:
    value = row.values[column]
    if isinstance(value, str):  # as in csv files, whose values are text
        with suppress(ValueError):
            value = float(value)
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    raise RowError(
        f"{config_key} ({column}): {row.where} has {value!r} there, and it must be a "
        "finite number. Correct the row or remove it."
    )
