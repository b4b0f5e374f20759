"""The text of a response while it is sampled."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from tokenizers.decoders import DecodeStream

from raypo.tools.calls import MARKS, PYTHON_TAG, ToolCall, ToolError, Tools, parse_tool_calls

_WHOLE_CALLS = ("{", "[", PYTHON_TAG)
"""What a response that is nothing but a tool call begins with."""


class ResponseText:
    """Decodes tokens as they come, and tells no text that may still turn out to be something else.

    That is: half a character, the beginning of a stop string, and where tools may be called, what
    may be the call of one.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        stop: Sequence[str] = (),
        stop_token_ids: Sequence[int] = (),
        tools: Tools | None = None,
    ) -> None:
        """Begin.

        Args:
            tokenizer: A fast one of transformers.
            stop: Texts that end the response and are no part of it.
            stop_token_ids: Tokens that end it; no part of the text either.
            tools: That may be called. Special tokens are then text: to some models the marks of a
                call are special.
        """
        self._backend = tokenizer.backend_tokenizer
        self._stream = DecodeStream(skip_special_tokens=tools is None)
        self._stop, self._stop_ids, self._tools = tuple(stop), frozenset(stop_token_ids), tools
        self._marks = self._stop if tools is None else (*stop, *MARKS)
        self._num_told = 0
        self.text = ""
        """All of it so far."""
        self.is_stopped = False
        """Whether a stop string came."""

    def add(self, token_ids: Sequence[int]) -> int:
        """Take further tokens; how many of them: less than all where a stop string came."""
        for number, token_id in enumerate(token_ids, start=1):
            if token_id in self._stop_ids:
                continue
            known = len(self.text)
            self.text += self._stream.step(self._backend, int(token_id)) or ""
            found = [self.text.find(each, max(0, known - len(each))) for each in self._stop]
            if ends := [place for place in found if place >= 0]:
                self.text, self.is_stopped = self.text[: min(ends)], True
                return number
        return len(token_ids)

    def news(self) -> str:
        """The text that can be told now and was not told before."""
        return self._told_until(self._safe_end())

    def finish(self) -> tuple[str, list[ToolCall]]:
        """The rest of the text at the end of the response, and its tool calls.

        What calls no tool as it should is text.
        """
        calls: list[ToolCall] = []
        if self._tools is not None:
            with suppress(ToolError):
                calls = parse_tool_calls(self.text, self._tools)
        return self._told_until(self._safe_end() if calls else len(self.text)), calls

    def _told_until(self, end: int) -> str:
        told, self._num_told = self.text[self._num_told : end], max(end, self._num_told)
        return told

    def _safe_end(self) -> int:
        if self._tools is not None:
            if self.text.lstrip().startswith(_WHOLE_CALLS) or not self.text.strip():
                return 0
            if begun := [self.text.index(mark) for mark in MARKS if mark in self.text]:
                return min(begun)
        longest = max(map(len, self._marks), default=0)
        for size in range(min(longest - 1, len(self.text)), 0, -1):
            if any(each.startswith(self.text[-size:]) for each in self._marks):
                return len(self.text) - size
        return len(self.text)
