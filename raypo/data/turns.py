"""Token ids between two turns of the policy.

Sampled tokens are never re-tokenised: an observation is tokenised once and appended.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from raypo.data.chat_messages import (
    USUAL_FORMAT,
    ChatFormat,
    Message,
    chat_messages,
    is_chat,
    render,
)
from raypo.data.special_tokens import hidden_in_text, shown
from raypo.data.stop_tokens import ids_behind, prompt_ids

Observation = str | Mapping[str, Any] | Sequence[Mapping[str, Any]] | Sequence[int] | np.ndarray
"""A text, one or several chat messages, or token ids."""
Tools = Sequence[Callable[..., Any] | dict[str, Any]] | None
"""Tools for the policy in the form that chat templates take: functions or their JSON schemas."""
_REPLY = "raypo-reply"
"""Placeholder for the policy's reply, to find the text that a chat template writes after it."""


class TurnTokens:
    """Tokenisation of observations for the policy. In a chat, the chat template renders them first.

    In a chat, a text observation is a user message. The ids between two turns are the text that the
    template writes from the end of an assistant message to the beginning of the next one. They
    depend neither on the reply nor on how the template renders earlier messages.
    """

    def __init__(
        self, tokenizer: Any, stop_token_ids: Sequence[int], chat: ChatFormat = USUAL_FORMAT
    ) -> None:
        """Store the arguments.

        Args:
            tokenizer: The policy's Hugging Face tokenizer.
            stop_token_ids: Tokens that end a turn of the policy.
            chat: Variables for the template, and the treatment of special tokens in texts.
        """
        self._tokenizer, self._chat = tokenizer, chat
        self._stop = frozenset(stop_token_ids)

    def with_variables(self, variables: Any) -> TurnTokens:
        """Return the same with more variables for the chat template, those of a row."""
        if not isinstance(variables, Mapping) or not variables:
            return self
        chat = replace(self._chat, kwargs={**self._chat.kwargs, **variables})
        return TurnTokens(self._tokenizer, tuple(self._stop), chat)

    def first(
        self, observation: Observation, *, chat: bool, tools: Tools = None
    ) -> tuple[str, np.ndarray]:
        """Return the first observation of an episode as text and ids, int32 [P].

        Args:
            observation: The first observation.
            chat: True if a text observation is a chat message.
            tools: Tools that the template describes to the policy.

        Raises:
            ValueError: the observation has no tokens, or the template rejects it.
        """
        if is_ids(observation):
            ids = np.asarray(observation, np.int32)
            return self._tokenizer.decode(ids), _checked(ids, observation)
        if not chat and isinstance(observation, str):
            (ids,) = prompt_ids(self._tokenizer, [self._hidden(observation)])
            return observation, _checked(ids, observation)
        text = self._rendered(messages_of(observation), tools)
        (ids,) = ids_behind(self._tokenizer, [text], [None])
        return shown(text), _checked(ids, observation)

    def between(
        self,
        reply_ids: np.ndarray,
        observation: Observation,
        *,
        chat: bool,
        tools: Tools = None,
        calls: Sequence[Mapping[str, Any]] = (),
    ) -> np.ndarray:
        """Return the ids that follow a turn of the policy: those of the rendered observation.

        If the policy has sampled the end of its turn, the template's own end of turn is left out.

        Args:
            reply_ids: The policy's turn, int [T].
            observation: The next observation.
            chat: True if a text observation is a chat message.
            tools: Tools that the template describes to the policy.
            calls: The turn's tool calls as chat templates take them, if known. They are used only
                for templates that reject a tool message without a call.

        Returns:
            ids: int32, empty for an empty text outside of a chat.

        Raises:
            ValueError: the template rejects the messages.
        """
        if is_ids(observation):
            return np.asarray(observation, np.int32)
        if not chat and isinstance(observation, str):
            return self._ids(self._hidden(observation))
        end = int(reply_ids[-1]) if len(reply_ids) and int(reply_ids[-1]) in self._stop else None
        messages = messages_of(observation)
        reply: dict[str, Any] = {"role": "assistant", "content": _REPLY}
        try:
            return self._after(reply, messages, tools, end)
        except Exception:
            if messages[0]["role"] != "tool":
                raise
        call = _stand_in(calls, messages[0])
        return self._after({"role": "assistant", "content": "", **call}, messages, tools, end)

    def _after(
        self,
        reply: dict[str, Any],
        messages: list[dict[str, Any]],
        tools: Tools,
        end: int | None,
    ) -> np.ndarray:
        """Return the template's ids after a reply, without the end of turn if it was sampled."""
        follows = self._ids(self._text_behind(reply, messages, tools))
        if end is not None:
            closing = self._ids(self._text_behind(reply, [], tools, goes_on=False))
            both = min(len(follows), len(closing))
            differs = np.flatnonzero(follows[:both] != closing[:both])
            ends = follows[: differs[0] if len(differs) else both].tolist()
            if end in ends:
                return follows[ends.index(end) + 1 :]
            if follows[:1].tolist() == [end]:  # the mark of the next message ends this one
                return follows[1:]
        if "tool_calls" in reply:  # skip the rest of the placeholder call
            special = np.isin(follows, self._tokenizer.all_special_ids)
            return follows[int(special.argmax()) :]
        return follows

    def _text_behind(
        self,
        reply: dict[str, Any],
        messages: list[dict[str, Any]],
        tools: Tools,
        *,
        goes_on: bool = True,
    ) -> str:
        """Return the text that the template writes after the placeholder reply."""
        said = [{"role": "user", "content": "."}, reply, *messages]
        text = self._rendered(said, tools, goes_on=goes_on)
        if _REPLY not in text:
            raise ValueError("the chat template leaves out what the assistant said")
        # A template may write the reply several times, and the messages may contain its text.
        count = text.count(_REPLY)
        if _REPLY in str(messages):
            count = self._rendered(said[:2], tools, goes_on=False).count(_REPLY)
        return text.split(_REPLY, count)[-1]

    def _rendered(
        self, messages: list[dict[str, Any]], tools: Tools, *, goes_on: bool = True
    ) -> str:
        if not self._tokenizer.chat_template:
            raise ValueError("these are chat messages, but the tokenizer has no chat template")
        return render(self._tokenizer, messages, prompting=goes_on, tools=tools, chat=self._chat)

    def _hidden(self, text: str) -> str:
        return hidden_in_text(self._tokenizer, text, self._chat.special_tokens)

    def _ids(self, text: str) -> np.ndarray:
        return np.asarray(ids_behind(self._tokenizer, [text])[0], np.int32)


def is_ids(observation: Any) -> bool:
    """Return whether an observation is a sequence of token ids."""
    if isinstance(observation, np.ndarray):
        return observation.ndim == 1 and np.issubdtype(observation.dtype, np.integer)
    return isinstance(observation, list | tuple) and all(
        isinstance(each, int | np.integer) and not isinstance(each, bool) for each in observation
    )


def messages_of(observation: Any) -> list[Message]:
    """Return an observation as normalised chat messages. A text becomes a user message.

    Raises:
        ValueError: the observation is of no supported type.
    """
    if isinstance(observation, str):
        return [{"role": "user", "content": observation}]
    messages = [observation] if isinstance(observation, Mapping) else observation
    if is_chat(messages):
        return chat_messages(messages)
    raise ValueError(
        "an observation must be a text, a chat message, a list of chat messages, or a list of "
        f"token ids, but this is {observation!r:.100} of type {type(observation).__name__}"
    )


def _stand_in(calls: Sequence[Mapping[str, Any]], answer: dict[str, Any]) -> dict[str, Any]:
    """Return tool calls for the reply, with the placeholder as the last call's arguments."""
    usual = {
        "id": answer.get("tool_call_id", "raypocall"),
        "function": {"name": answer.get("name", "tool")},
    }
    *before, last = [dict(call) for call in calls] or [usual]
    function = {"name": last["function"]["name"], "arguments": {"_": _REPLY}}
    return {"tool_calls": [*before, {**last, "type": "function", "function": function}]}


def _checked(ids: Any, observation: Observation) -> np.ndarray:
    if len(ids) == 0:
        raise ValueError(f"the first observation ({observation!r:.100}) has no tokens")
    return np.asarray(ids, np.int32)
