"""Load tokenised prompts from sources of rows; `key` is the config key of the sources."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from typing import TYPE_CHECKING

import numpy as np

from raypo.config import ConfigError, DataSection, PromptSource, source_name
from raypo.data.chat_messages import is_chat
from raypo.data.images import ImageReader, Slotted, WithImages
from raypo.data.item_store import ItemStore
from raypo.data.prepared_rows import (
    LabelCheck,
    check_label,
    prepared_conversation,
    prepared_row,
    with_tools_in_some,
)
from raypo.data.rows import (
    BadRows,
    Row,
    check_data_set,
    is_data_set,
    read_rows,
)
from raypo.data.special_tokens import shown
from raypo.data.tokenised_rows import is_short, tokenised
from raypo.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PEEK_ROWS = 1000
"""Number of rows of each source that `peek` reads."""


@dataclass(frozen=True)
class LoadedPrompts:
    """Tokenised prompts in the order of the sources."""

    prompts: Sequence[Prompt]
    num_skipped: int
    """Prompts skipped because they are longer than data.max_prompt_tokens."""
    sizes: tuple[int, ...]
    """Number of prompts of each source."""
    highest: np.ndarray
    """Token ids of the prompt that contains the largest token id, int32 [P]."""
    bad: BadRows = field(default_factory=lambda: BadRows("refuse"))
    digests: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    """Hash of each prompt's token ids, images and label, int64. Equal ones have equal hashes in a
    process. The label counts because rows with the same prompt and other labels are no copies."""

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
        The number of rows, or None if a source is a data set or has `PEEK_ROWS` rows or more.

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
        rows = islice(with_tools_in_some(whole, source, section), PEEK_ROWS)
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
    most: int | None = None,
    reader: Callable[[], ImageReader] | None = None,
) -> LoadedPrompts:
    """Read and tokenise prompts.

    Text is tokenised with the special tokens that the tokenizer writes before a text. Chat messages
    are rendered with the tokenizer's chat template, which writes the special tokens itself.
    `Prompt.index` is the row number over all sources in order, counting skipped rows.

    Each worker that calls this reads every row once. Large sets of prompts are stored in a
    temporary file (`ItemStore`).

    Args:
        section: The sources, their columns and the length limit.
        tokenizer: The policy's Hugging Face tokenizer.
        key: The config key of the sources, for error messages.
        label_checks: Function that returns the check of a source's labels, or None for no check.
        most: Maximum number of prompts of each source. None means no limit.
        reader: Function that returns the reader of the policy's images (`tokenised`). Images are
            read again whenever a prompt is taken from the result.

    Raises:
        ConfigError: a row fails the checks of `peek` or of its label, a prompt has no tokens, a
            prompt is too long and `data.too_long` is `error`, or no prompt is left.
    """
    prompts: ItemStore[Slotted[Prompt]] = ItemStore()
    sizes: list[int] = []
    num_rows = num_skipped = shortest = 0
    highest = np.zeros(1, np.int32)
    bad, digests = BadRows(section.on_error), array("q")
    for source in section.prompts:
        first = num_rows

        def counted(rows: Iterable[Row], first: int = first) -> Iterator[Row]:
            nonlocal num_rows
            for row in rows:
                num_rows = first + row.number + 1
                yield row

        rows = counted(with_tools_in_some(read_rows(source, key=key, bad=bad), source, section))
        prepared = _prepared(section, source, rows, bad, label_checks and label_checks(source))
        for row in chain.from_iterable(tokenised(prepared, section, tokenizer, bad, reader)):
            prompt = _prompt(row, section, source, first)
            length = len(prompt.token_ids)
            if not is_short("prompt", row, length, section):
                num_skipped += 1
                shortest = min(shortest or length, length)
                continue
            highest = max(highest, prompt.token_ids, key=np.max)
            prompts.append(Slotted.of(prompt, row))
            sources = tuple(image.source for image in row.images)
            digests.append(hash((prompt.token_ids.tobytes(), sources, repr(prompt.label))))
            if len(prompts) - sum(sizes) == most:
                break
        sizes.append(len(prompts) - sum(sizes))
    if not prompts and not num_skipped:
        bad.refuse_all(key)
    if not prompts:
        raise ConfigError(
            f"data.max_prompt_tokens ({section.max_prompt_tokens}): all {num_skipped} prompts of "
            f"{key} are longer. Set data.max_prompt_tokens to at least {shortest}, the length of "
            f"the shortest."
        )
    loaded, found = WithImages(prompts, reader), np.asarray(digests)
    return LoadedPrompts(loaded, num_skipped, tuple(sizes), highest, bad, found)


def _prepared(
    section: DataSection,
    source: PromptSource,
    rows: Iterable[Row],
    bad: BadRows,
    label_check: LabelCheck | None,
) -> Iterator[Row]:
    """Yield the rows of a source, checked and normalised."""

    def prepare(row: Row) -> Row:
        row = prepared_row(row, source, section)
        if label_check and section.label_key:
            check_label(label_check, row, section.label_key)
        return row

    return bad.each(prepare, rows)


def _prompt(row: Row, section: DataSection, source: PromptSource, first: int) -> Prompt:
    """Return the prompt of a row; `first` is the index of the first row of its source."""
    given = row.values[section.prompt_key]
    return Prompt(
        index=first + row.number,
        text=shown(row.prompt_text),
        token_ids=row.prompt_ids,
        label=row.values[section.label_key] if section.label_key else None,
        messages=given if is_chat(given) else None,
        data_source=source_name(source),
        row=row.values,
    )
