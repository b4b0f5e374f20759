"""Types that agents see: the policy's replies, and the error at a limit."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

LIMIT = "episode_limit"
"""Error code of `EpisodeLimit`, in Python and in HTTP responses of the endpoint."""


class EpisodeLimit(Exception):
    """The episode can have no further turn, because it has reached a limit or has ended.

    The limits are `rollout.max_turns` and `rollout.max_episode_tokens`.
    """

    code = LIMIT


def is_limit(error: BaseException | None) -> bool:
    """Return whether `EpisodeLimit` caused an error, directly or through an HTTP client's error."""
    if error is None or getattr(error, "code", None) == LIMIT:
        return error is not None
    inner = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    # A KeyError, for example, that is raised while a limit is handled is a fault of the agent.
    is_fault = error.__suppress_context__ or type(error).__module__ == "builtins"
    return any(map(is_limit, (*inner, error.__cause__, None if is_fault else error.__context__)))


@dataclass(frozen=True)
class Reply:
    """One turn of the policy."""

    text: str
    """Text without special tokens. If tools may be called, only the end-of-turn token is left out,
    because the marks of a tool call are special tokens in some models."""
    token_ids: np.ndarray  # int32 [T], as sampled
    conversation: np.ndarray  # int32, all tokens up to the end of this turn
    finish_reason: str
    """`stop` or `length`."""

    @property
    def message(self) -> dict[str, str]:
        """The turn as a chat message, to append to the conversation."""
        return {"role": "assistant", "content": self.text}
