"""Whole conversations of several turns, and which of their tokens the assistant wrote."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from raypo.config import ConfigError
from raypo.data.rows import Row
from raypo.types import Example

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MARKS_ASSISTANT = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""The tag by which a chat template says what the assistant wrote."""


def conversation(
    row: Row, column: str, tokenizer: PreTrainedTokenizerBase, end_token_id: int
) -> Example:
    """An example in which every token of the assistant is learned, and no other.

    The prompt is what comes before the first of these tokens, the response the rest up to the last
    one, with the others' turns masked.

    Where the template marks the assistant's text (`{% generation %}`), that counts, and the end
    token behind it. Else it is what the template writes from its generation prompt to the end of
    the message, up to the end token, which the last message gets where it has none. Each turn is
    tokenised by itself then, as it is when it is sampled.

    Raises:
        ConfigError: the template refuses it, leaves nothing that the assistant wrote, or
            rewrites earlier turns, so that it is unknown what the assistant wrote.
    """
    messages = row.values[column]
    if not tokenizer.chat_template:
        raise _refused(row, column, "chat messages, and the tokenizer has no chat template")
    read = _marked if _MARKS_ASSISTANT.search(tokenizer.get_chat_template()) else _by_prefixes
    try:
        found = read(messages, tokenizer, end_token_id)
    except Exception as error:  # templates raise what they like
        raise _refused(row, column, f"a chat that the template refuses: {error}") from error
    if found is None:
        raise _refused(
            row,
            column,
            "a turn of the assistant that the template writes otherwise once others follow. Mark "
            "the assistant's text in the template by {% generation %}, or give the last answer as "
            "a response (data.response_key)",
        )
    ids, mask = (np.asarray(each) for each in found)
    learned = np.flatnonzero(mask)
    if not len(learned) or not learned[0]:
        raise _refused(row, column, "nothing of the assistant behind a prompt")
    first, last = learned[0], learned[-1] + 1
    kept = mask[first:last].astype(bool)
    tokens = ids.astype(np.int32)
    return Example(tokens[:first], tokens[first:last], None if kept.all() else kept)


_Masked = tuple[list[int], list[bool]]
"""Token ids, and which of them the assistant wrote."""


def _marked(messages: Any, tokenizer: PreTrainedTokenizerBase, end: int) -> _Masked:
    """Reads what the template marks by its own tags."""
    found: Any = tokenizer.apply_chat_template(
        messages, return_dict=True, return_assistant_tokens_mask=True
    )
    ids, mask = found["input_ids"], [bool(each) for each in found["assistant_masks"]]
    for place, (written, token) in enumerate(zip(mask[:-1], ids[1:], strict=True), 1):
        mask[place] = mask[place] or (written and token == end and ids[place - 1] != end)
    return ids, mask


def _by_prefixes(messages: Any, tokenizer: PreTrainedTokenizerBase, end: int) -> _Masked | None:
    """Reads what each message of the assistant adds; None where the template rewrites others."""

    def text(count: int, *, prompting: bool = False) -> str:
        found = tokenizer.apply_chat_template(
            messages[:count], add_generation_prompt=prompting, tokenize=False
        )
        assert isinstance(found, str)
        return found

    whole, cuts = text(len(messages)), [0]
    for place, message in enumerate(messages):
        if message["role"] == "assistant" and place:
            before, after = text(place, prompting=True), text(place + 1)
            if not (after.startswith(before) and whole.startswith(after)):
                return None
            cuts += [len(before), len(after)]
    parts = [whole[begin:stop] for begin, stop in pairwise(cuts)]  # others, assistant, others, ...
    encoded: Any = tokenizer(parts, add_special_tokens=False, verbose=False)["input_ids"]
    if end not in encoded[-1]:
        encoded[-1] = [*encoded[-1], end]
    ids: list[int] = []
    mask: list[bool] = []
    for number, part in enumerate(encoded):
        written = part.index(end) + 1 if end in part else len(part)
        ids += part
        mask += [number % 2 == 1 and place < written for place in range(len(part))]
    return ids, mask


def _refused(row: Row, column: str, what: str) -> ConfigError:
    return ConfigError(
        f"data.messages_key ({column}): {row.where} has {what}. Correct the row or remove it."
    )
