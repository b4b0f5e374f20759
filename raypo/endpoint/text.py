"""Text and tool calls of a sampled response."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from raypo.data.stop_tokens import without_end
from raypo.tools.calls import ToolCall, ToolError, Tools, split_tool_calls


def text_and_calls(
    tokenizer: Any,
    token_ids: Sequence[int] | np.ndarray,
    *,
    stop: Sequence[str] = (),
    stop_token_ids: Sequence[int] = (),
    tools: Tools | None = None,
) -> tuple[str, list[ToolCall]]:
    """Return a response's text without its tool calls, and the calls; a malformed call stays text.

    Args:
        tokenizer: A Hugging Face tokenizer.
        token_ids: Token ids of the response.
        stop: Stop strings; the text ends before them.
        stop_token_ids: Stop tokens; not part of the text either.
        tools: Tools that may be called. If set, the text keeps special tokens, because the marks
            of a call are special tokens for some models. None means no tool calls.
    """
    kept = without_end(np.asarray(token_ids, np.int64), stop_token_ids)
    text = tokenizer.decode(kept.tolist(), skip_special_tokens=tools is None)
    text = text[: min((text.find(each) for each in stop if each in text), default=len(text))]
    if tools is not None:
        with suppress(ToolError):
            said, calls = split_tool_calls(text, tools)
            return (said, calls) if calls else (text, [])
    return text, []
