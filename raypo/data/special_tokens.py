"""Special tokens in texts, like `<|im_end|>` in a question or in the output of a tool.

Only the chat template may write them. Otherwise a text could end its turn and begin another one.
`hidden` replaces them with placeholders before a text is rendered, and `encoded` tokenises
placeholders as ordinary text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import lru_cache
from typing import Any, NamedTuple

_OPEN, _CLOSE = "\ufdd0", "\ufdd1"  # noncharacters: Unicode keeps them out of all texts
_PLACEHOLDER = re.compile(f"{_OPEN}((?:[0-9a-f]{{2}})+){_CLOSE}")
"""Placeholder of a special token: its bytes in hexadecimal, which no template changes."""


class SpecialTokenError(ValueError):
    """A text has a special token that is refused. The message names the key."""


def hidden(tokenizer: Any, value: Any, mode: str) -> Any:
    """Return a value with placeholders for the special tokens in all its strings, at every depth.

    Args:
        tokenizer: Hugging Face tokenizer.
        value: A text, chat messages or tools.
        mode: Value of `data.special_tokens_in_text`, except auto.

    Raises:
        SpecialTokenError: a special token is in a text, and the mode is `refuse`, or the tokenizer
            cannot tokenise it as text.
    """
    if mode == "tokens":
        return value
    return _hidden(value, *_tokens_of(tokenizer), mode == "refuse")


def hidden_in_text(tokenizer: Any, text: str, mode: str) -> str:
    """Return a text to which no chat template applies, like `hidden`. auto means refuse.

    A beginning-of-sequence token at the start is left in place.
    """
    mode = "refuse" if mode == "auto" else mode
    begin = tokenizer.bos_token
    if begin and text.startswith(begin):
        return begin + hidden(tokenizer, text.removeprefix(begin), mode)
    return hidden(tokenizer, text, mode)


def has_hidden(text: str) -> bool:
    """Return whether a text may contain placeholders."""
    return _OPEN in text


def shown(text: str) -> str:
    """Return a text with its special tokens in place of the placeholders."""
    if not has_hidden(text):
        return text
    return _PLACEHOLDER.sub(lambda match: bytes.fromhex(match[1]).decode(errors="replace"), text)


def encoded(
    tokenizer: Any, text: str, before: str | None, encode: Callable[..., list[list[int]]]
) -> list[int]:
    """Tokenise a text with placeholders.

    The text is cut at its special tokens. A part with placeholders is tokenised by a copy of the
    tokenizer that reads special tokens as text; the others as usual.

    Args:
        tokenizer: Hugging Face tokenizer.
        text: The text.
        before: Text before it, as in `ids_behind`.
        encode: The function `ids_behind`.
    """
    tokens, as_text = _tokens_of(tokenizer)
    ids: list[int] = []
    usual = ""
    # Every second part is a special token.
    for part in [*tokens.around.split(text), ""] if tokens.around else [text, ""]:
        if not has_hidden(part):
            usual += part
            continue
        if usual:
            ids += encode(tokenizer, [usual], [before])[0]
            before, usual = usual, ""
        # Some tokenizers write a space even after special tokens, as at the beginning of a text.
        begins = before is None or (
            encode(tokenizer, ["a"], [before]) == encode(tokenizer, ["a"], [None])
        )
        ids += encode(as_text(), [shown(part)], [None if begins else ""])[0]
        before = part
    return ids + (encode(tokenizer, [usual], [before])[0] if usual else [])


class _Tokens(NamedTuple):
    """Patterns of a tokenizer's special tokens. None if it has none."""

    alone: re.Pattern[str] | None
    around: re.Pattern[str] | None
    """Special tokens as one group, with the white space that they swallow."""


@lru_cache(maxsize=8)
def _tokens_of(tokenizer: Any) -> tuple[_Tokens, Callable[[], Any]]:
    """Return the patterns, and a function that returns the copy for texts. It is made if needed."""
    special = [token for token in tokenizer.added_tokens_decoder.values() if token.special]
    special.sort(key=lambda token: -len(token.content))

    @lru_cache(maxsize=1)
    def as_text() -> Any:
        # A copy, because the tokenizer has one switch for all threads.
        copy = deepcopy(tokenizer)
        copy.split_special_tokens = True
        return copy

    def spaced(token: Any) -> str:
        before, after = (r"\s*" if swallows else "" for swallows in (token.lstrip, token.rstrip))
        return f"{before}{re.escape(token.content)}{after}"

    if not special:
        return _Tokens(None, None), as_text
    alone = re.compile("|".join(re.escape(token.content) for token in special))
    return _Tokens(alone, re.compile(f"({'|'.join(map(spaced, special))})")), as_text


def _hidden(value: Any, tokens: _Tokens, as_text: Callable[[], Any], is_refused: bool) -> Any:
    def placeholder(match: re.Match[str]) -> str:
        if is_refused:
            raise SpecialTokenError(
                f"has the special token {match[0]} in its text. Remove it, or set "
                "data.special_tokens_in_text: tokens if it is meant (in a prompt that a chat "
                "template has rendered, for example), text if it is not"
            )
        copy = as_text()
        ids = copy(match[0], add_special_tokens=False)["input_ids"]
        if not ids or set(ids) & set(copy.all_special_ids):
            raise SpecialTokenError(
                f"has the special token {match[0]} in its text, which this tokenizer cannot read "
                "as text. Remove it"
            )
        return f"{_OPEN}{match[0].encode().hex()}{_CLOSE}"

    if isinstance(value, str):
        return tokens.alone.sub(placeholder, value) if tokens.alone else value
    if isinstance(value, Mapping):
        return {
            _hidden(key, tokens, as_text, is_refused): _hidden(each, tokens, as_text, is_refused)
            for key, each in value.items()
        }
    if isinstance(value, list | tuple):
        return [_hidden(each, tokens, as_text, is_refused) for each in value]
    return value
