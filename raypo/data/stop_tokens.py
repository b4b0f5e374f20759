"""Token ids of prompts and responses: no end token after a prompt, exactly one after a response.

Models have several stop tokens (Llama 3, Gemma 3, GLM), and the chat template decides which of
them ends a turn. All code that ends, masks or compares a response uses `StopTokens`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from raypo.data.chat_messages import USUAL_FORMAT, ChatFormat, Message, render, strings_of
from raypo.data.special_tokens import encoded, has_hidden

Run = tuple[int, int]
"""Range of an assistant turn: the index of its first token, and the index after its last token."""


@dataclass(frozen=True)
class StopTokens:
    """The tokens that end a response, and the rules for applying them."""

    tokenizer: Any
    ids: Sequence[int]
    chat: ChatFormat = USUAL_FORMAT
    _after: dict[bool, int] = field(default_factory=dict)
    """Cache of `after`; the key is True if the last turn calls a tool."""

    @property
    def default(self) -> int:
        """Stop token to append to plain text.

        It is the end-of-sequence token if that is a stop token, else the first stop token.
        """
        end = self.tokenizer.eos_token_id
        return end if end in self.ids else self.ids[0]

    @cached_property
    def texts(self) -> tuple[str, ...]:
        """Texts of those stop tokens that a text can contain: the tokenizer's added tokens."""
        added = self.tokenizer.added_tokens_decoder
        return tuple(str(added[each]) for each in self.ids if each in added)

    def inside(self, message: Message) -> str | None:
        """Return the text of a stop token that a message contains, or None if there is none."""
        strings = strings_of({k: v for k, v in message.items() if k != "role"})
        return next((text for text in self.texts if any(text in each for each in strings)), None)

    def bare(self, text: str) -> str:
        """Return a text without the stop tokens at its end and the white space after them."""
        while end := next((each for each in self.texts if text.rstrip().endswith(each)), None):
            text = text.rstrip().removesuffix(end)
        return text

    def end_of(self, text: str) -> str:
        """Return the first of the stop tokens at the end of a text, or "" if there is none."""
        behind = text[len(self.bare(text)) :]
        return next((each for each in self.texts if behind.startswith(each)), "")

    def ended(self, ids: Sequence[int], default: int) -> np.ndarray:
        """Return ids up to and including the first stop token. Without one, append the default."""
        for place, token in enumerate(ids):
            if token in self.ids:
                return np.asarray(ids[: place + 1], np.int32)
        return np.asarray([*ids, default], np.int32)

    def learned(
        self, ids: Sequence[int], runs: Sequence[Run], messages: Sequence[Message]
    ) -> tuple[list[int], list[bool]]:
        """Return ids and their loss mask: True in each run, through the run's first stop token.

        A stop token directly after a run is trained too. `{% generation %}` tags may exclude it,
        and in some templates (GLM) it is the mark of the next role. If the template writes no stop
        token after the last run, `after(messages)` replaces the ids that follow the run.

        Args:
            ids: Token ids of a whole conversation.
            runs: The assistant's turns in it.
            messages: The conversation, up to the assistant's last message.
        """
        ids, mask = list(ids), [False] * len(ids)
        for begin, stop in runs:
            inside = next((at for at in range(begin, stop) if ids[at] in self.ids), None)
            last = stop - 1 if inside is None else inside
            if inside is None and stop < len(ids) and ids[stop] in self.ids:
                last = stop
            elif inside is None and (begin, stop) == runs[-1]:
                ids[stop:], mask[stop:], last = [self.after(messages)], [False], stop
            mask[begin : last + 1] = [True] * (last + 1 - begin)
        return ids, mask

    def after(self, messages: Sequence[Message]) -> int:
        """Return the stop token for a last turn to which the template adds none.

        If the next message begins with a stop token (as in GLM), that token is returned. Otherwise,
        the default is returned. The next message is a tool's if the turn calls a tool, else a
        user's.
        """
        calls = messages[-1].get("tool_calls")
        if bool(calls) in self._after:
            return self._after[bool(calls)]
        following: Message = {"role": "user", "content": "."}
        if calls:
            known = {"tool_call_id": calls[0].get("id"), "name": calls[0]["function"]["name"]}
            following = {"role": "tool", "content": ".", **known}
        try:
            whole = render(self.tokenizer, messages, chat=self.chat)
            longer = render(self.tokenizer, [*messages, following], chat=self.chat)
        except Exception:  # templates can raise anything; this one allows no next message
            return self.default
        (ids,) = ids_behind(self.tokenizer, [longer.removeprefix(whole)])
        is_mark = longer.startswith(whole) and ids and ids[0] in self.ids
        self._after[bool(calls)] = ids[0] if is_mark else self.default
        return self._after[bool(calls)]


def without_end(ids: np.ndarray, stop_token_ids: Sequence[int]) -> np.ndarray:
    """Return a sampled turn, int [T], without the stop token at its end, if it has one."""
    return ids[:-1] if len(ids) and int(ids[-1]) in stop_token_ids else ids


def prompt_ids(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """Tokenise text prompts with the special tokens that the tokenizer writes before a text.

    Special tokens that the tokenizer appends are removed, because a model does not answer a prompt
    that has ended. A text that begins with a beginning-of-sequence token gets no second one.
    """
    begin, end = _added(tokenizer)
    usual = ["" if has_hidden(text) else text for text in texts]
    whole: Any = tokenizer(usual, verbose=False)["input_ids"]
    found = []
    for text, ids in zip(texts, whole, strict=True):
        if has_hidden(text):
            ids = begin + encoded(tokenizer, text, None, ids_behind)
        if end and ids[-len(end) :] == end:
            ids = ids[: -len(end)]
        if begin and ids[len(begin) : 2 * len(begin)] == begin:
            ids = ids[len(begin) :]
        found.append(ids)
    return found


def _added(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Return the special tokens that a tokenizer writes before and after a text."""
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole = tokenizer("a")["input_ids"]
    for begin in range(len(whole) - len(plain) + 1):
        if plain and whole[begin : begin + len(plain)] == plain:
            return whole[:begin], whole[begin + len(plain) :]
    return [], []


def ids_behind(
    tokenizer: Any, texts: Sequence[str], before: Sequence[str | None] | None = None
) -> list[list[int]]:
    """Tokenise texts that follow other text, without the tokenizer's special tokens.

    SentencePiece tokenizers write a space before the first word of their input; some of them also
    write one after each special token. In the middle of a text, the model would learn to write a
    space that it never samples.

    Args:
        tokenizer: Hugging Face tokenizer.
        texts: The texts to tokenise.
        before: Text before each of the texts. Only a special token at its end matters. None in
            the list means that nothing comes before that text. If `before` itself is None, each
            text follows ordinary text.
    """
    if any(map(has_hidden, texts)):
        before = before or [""] * len(texts)
        usual = ids_behind(tokenizer, ["" if has_hidden(text) else text for text in texts], before)
        return [
            encoded(tokenizer, text, behind, ids_behind) if has_hidden(text) else ids
            for text, behind, ids in zip(texts, before, usual, strict=True)
        ]
    plain: Any = tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
    if not _writes_a_space(tokenizer):
        return plain
    special = [str(token) for token in tokenizer.added_tokens_decoder.values()]
    found = []
    for text, alone, behind in zip(texts, plain, before or [""] * len(texts), strict=True):
        if behind is None:
            found.append(alone)
            continue
        anchor = next((token for token in special if behind.endswith(token)), "\n")
        begin = tokenizer(anchor, add_special_tokens=False)["input_ids"]
        ids = tokenizer(anchor + text, add_special_tokens=False, verbose=False)["input_ids"]
        found.append(ids[len(begin) :] if ids[: len(begin)] == begin else alone)
    return found


@lru_cache(maxsize=8)
def _writes_a_space(tokenizer: Any) -> bool:
    """Return whether a tokenizer adds a space before the first word of a text."""
    ids = tokenizer("a", add_special_tokens=False)["input_ids"]
    return bool(ids) and tokenizer.convert_ids_to_tokens(ids)[0][0] in "▁Ġ"
