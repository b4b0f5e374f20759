"""Multi-turn conversations as training examples, with a mask of the assistant's tokens."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from transformers.utils.chat_template_utils import render_jinja_template

from raypo.config import ConfigError, ResponsesSection
from raypo.data.chat_messages import (
    ChatFormat,
    Message,
    as_read,
    check_roles,
    check_tools,
    check_variables,
    render,
)
from raypo.data.rows import BadRows, Row, RowError
from raypo.data.special_tokens import has_hidden, hidden
from raypo.data.stop_tokens import Run, StopTokens, ids_behind
from raypo.data.tokenised_rows import chat_format, template_error, tools_of
from raypo.types import Example

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MARKS_ASSISTANT = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""The tag with which a chat template marks the assistant's text."""


def conversation(
    row: Row,
    section: ResponsesSection,
    tokenizer: PreTrainedTokenizerBase,
    stops: StopTokens,
    bad: BadRows,
) -> Example:
    """Return an example that trains on every token of the assistant, and on no other.

    The prompt is everything before the assistant's first token. The response is the rest, up to the
    assistant's last token, with the turns of other roles masked.

    If the template marks the assistant's text (`{% generation %}`), these marks decide which text
    is the assistant's. Otherwise, the assistant's text reaches from the generation prompt to the
    end of the message. Each turn is trained up to and including its first stop token, even if that
    token directly follows the turn. Turns are tokenised separately, as in sampling.

    Args:
        row: A row with checked and normalised messages (`prepared_conversation`).
        section: Section of the config that names the columns of messages and tools.
        tokenizer: Hugging Face tokenizer of the model.
        stops: The tokens that end a turn.
        bad: Counts the row if it has special tokens in its texts.

    Raises:
        RowError: the template rejects the row, renders nothing of the assistant, or rewrites
            earlier turns, so that the assistant's tokens are unknown.
        ConfigError: the tokenizer has no chat template.
    """
    column = str(section.messages_key)
    messages = row.values[column]
    if not tokenizer.chat_template:
        raise ConfigError(
            f"data.messages_key ({column}): {row.where} has chat messages, but the tokenizer has "
            "no chat template. Use a chat model."
        )
    messages = [
        each | {"content": stops.bare(each["content"])} if each["role"] == "assistant" else each
        for each in messages
    ]
    for place, message in enumerate(messages):
        if place > 0 and is_learned(message) and (text := stops.inside(message)):
            raise _refused(
                row, column, f"the stop token {text} inside an answer, which it would cut"
            )
    tools, chat = cast("Any", tools_of(row, section)), chat_format(section, row)
    template = tokenizer.get_chat_template(tools=tools)
    read = _marked if _MARKS_ASSISTANT.search(template) else _by_prefixes
    try:
        tools = hidden(tokenizer, tools, chat.in_messages)
        messages = hidden(tokenizer, messages, chat.in_messages)
        messages = as_read(tokenizer, messages, tools)
        check_roles(tokenizer, messages, tools)
        check_tools(tokenizer, tools)
        check_variables(tokenizer, chat.kwargs)
        found = read(messages, tokenizer, tools, chat)
        last = max(at for at, each in enumerate(messages) if is_learned(each))
        learns = None
        if found:
            if has_hidden(found[0]):
                bad.count_special_tokens(row)
            ids, runs = _tokenised(found, tokenizer)
            learns = stops.learned(ids, _learned(runs, messages), messages[: last + 1])
    except Exception as error:  # templates can raise anything
        key = "data.messages_key"
        raise template_error(row, key, column, messages, section, tokenizer, error) from error
    if learns is None:
        raise _refused(
            row,
            column,
            "a turn of the assistant that the template renders differently when later turns "
            "follow. Mark the assistant's text in the template by {% generation %}, or give the "
            "last answer as a response (data.response_key)",
        )
    ids, mask = (np.asarray(each) for each in learns)
    learned = np.flatnonzero(mask)
    if not len(learned) or not learned[0]:
        raise _refused(row, column, "no assistant message after a prompt")
    first, last = learned[0], learned[-1] + 1
    kept = mask[first:last].astype(bool)
    tokens = ids.astype(np.int32)
    return Example(tokens[:first], tokens[first:last], None if kept.all() else kept)


_Turns = tuple[str, list[int]]
"""The rendered conversation, and the character offsets of assistant turns: begin, end, ..."""


def _marked(
    messages: Any, tokenizer: PreTrainedTokenizerBase, tools: Any, chat: ChatFormat
) -> _Turns:
    """Return the assistant's turns as the template's own `{% generation %}` tags mark them."""
    # `return_assistant_tokens_mask` of apply_chat_template is not used: transformers 5.19 marks
    # everything after a turn if no token holds the turn's last character
    # (huggingface/transformers#47325).
    special: Any = tokenizer.special_tokens_map
    rendered: Any = render_jinja_template(
        [messages],
        tools=tools,
        chat_template=tokenizer.get_chat_template(tools=tools),
        return_assistant_tokens_mask=True,
        **special | chat.kwargs,
    )
    (whole,), (spans,) = rendered
    return whole, [place for span in spans for place in span]


def _by_prefixes(
    messages: Any, tokenizer: PreTrainedTokenizerBase, tools: Any, chat: ChatFormat
) -> _Turns | None:
    """Find the assistant's turns by rendering prefixes.

    The result is None if the template rewrites turns.
    """
    whole, cuts = render(tokenizer, messages, tools=tools, chat=chat), []
    for place, message in enumerate(messages):
        if message["role"] == "assistant" and place:
            before: Any = tokenizer.apply_chat_template(  # `render` would continue the message
                messages[:place],
                tools=tools,
                add_generation_prompt=True,
                tokenize=False,
                **chat.kwargs,
            )
            after = render(tokenizer, messages[: place + 1], tools=tools, chat=chat)
            if not (after.startswith(before) and whole.startswith(after)):
                return None
            cuts += [len(before), len(after)]
    return whole, cuts


def _tokenised(turns: _Turns, tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[Run]]:
    """Return the token ids and the assistant's runs in them. Turns are tokenised separately."""
    whole, cuts = turns
    parts = [whole[begin:stop] for begin, stop in pairwise([0, *cuts, len(whole)])]
    encoded = ids_behind(tokenizer, parts, [None, *parts[:-1]])
    ends = np.cumsum([len(part) for part in encoded]).tolist()
    runs = list(pairwise(ends))[::2]  # others, assistant, others, ...
    return [token for part in encoded for token in part], runs


def is_learned(message: Message) -> bool:
    """Return whether the loss covers a message: it is the assistant's and not excluded."""
    return message["role"] == "assistant" and "weight" not in message


def _learned(runs: list[Run], messages: Sequence[Message]) -> list[Run]:
    """Return the runs of the messages that the loss covers.

    Raises:
        ValueError: messages are excluded, and the template does not mark one run per answer.
    """
    if not any("weight" in message for message in messages):
        return runs
    answers = [m for place, m in enumerate(messages) if place and m["role"] == "assistant"]
    if len(answers) != len(runs):
        raise ValueError(
            f"it marks {len(runs)} texts of the assistant in {len(answers)} messages, so those "
            "that are excluded from the loss are unknown"
        )
    return [run for run, message in zip(runs, answers, strict=True) if is_learned(message)]


def _refused(row: Row, column: str, what: str) -> RowError:
    return RowError(
        f"data.messages_key ({column}): {row.where} has {what}. Correct the row or remove it."
    )
