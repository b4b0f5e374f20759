"""What a response says, and which tools it calls."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from raypo.data.stop_tokens import without_end
from raypo.tools.calls import ToolCall, ToolError, Tools, split_tool_calls


def text_and_calls(
    tokenizer: Any,
    token_ids: Sequence[int],
    *,
    stop: Sequence[str] = (),
    stop_token_ids: Sequence[int] = (),
    tools: Tools | None = None,
) -> tuple[str, list[ToolCall]]:
    """The text of a response without the calls in it, and these; what is no proper call is text.

    Args:
        tokenizer: Of transformers.
        token_ids: The response.
        stop: Texts that end it and are no part of it.
        stop_token_ids: Tokens that end it; no part of the text either.
        tools: That may be called. Special tokens are then text: to some models the marks of a call
            are special.
    """
    kept = without_end(np.asarray(token_ids, np.int64), stop_token_ids)
    text = tokenizer.decode(kept.tolist(), skip_special_tokens=tools is None)
    text = text[: min((text.find(each) for each in stop if each in text), default=len(text))]
    if tools is not None:
        with suppress(ToolError):
            said, calls = split_tool_calls(text, tools)
            return (said, calls) if calls else (text, [])
    return text, []
