"""The policy as one episode uses it: it samples turns and records every conversation as ids.

It samples and records in the event loop of the episodes. Plain methods of agents, in other threads,
may read `base_url` and `api_key`, and their tools call `hear`.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from raypo.data.turns import Observation, Tools, TurnTokens, is_ids, messages_of
from raypo.rollout.work_time import WorkTime
from raypo.serving.requests import Completion
from raypo.types import ToolUse

LIMIT = "episode_limit"
"""Error code of `EpisodeLimit`, also in HTTP responses of the endpoint."""


class EpisodeLimit(Exception):
    """An episode may have no further turn, because of a limit or because it is over.

    The limits are `rollout.max_turns` and `rollout.max_episode_tokens`.
    """

    code = LIMIT


def is_limit(error: BaseException | None) -> bool:
    """Return whether an error was caused by `EpisodeLimit`, also through an HTTP client's error."""
    if error is None or getattr(error, "code", None) == LIMIT:
        return error is not None
    inner = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    return any(map(is_limit, (*inner, error.__cause__ or error.__context__)))


Said = str | list[dict[str, Any]]
"""A conversation that is not tokenised: one text, or chat messages."""


@dataclass(frozen=True)
class Reply:
    """One turn of the policy."""

    text: str
    """Text without special tokens. If tools may be called, only the end-of-turn token is left out,
    because the marks of a tool call are special tokens in some models."""
    token_ids: np.ndarray  # int32 [T], as sampled
    conversation: np.ndarray  # int32, everything so far with this turn, to continue from
    finish_reason: str
    """stop | length."""

    @property
    def message(self) -> dict[str, str]:
        """The turn as a chat message, to append to the conversation."""
        return {"role": "assistant", "content": self.text}


@dataclass(frozen=True)
class ConversationPrefix:
    """Prefix of a conversation, up to the end of one of its turns, as text or messages."""

    words: Said
    tools: Tools
    """Tools that the chat template was given."""
    length: int
    """Length of the prefix in tokens."""
    is_open: bool
    """True if the turn was cut off and has a text, so that the policy can continue it."""

    def begins(self, asked: Said, tools: Tools) -> bool:
        """Return whether a request continues this prefix."""
        words = self.words
        is_first_part = type(words) is type(asked) and asked[: len(words)] == words
        return is_first_part and tools == self.tools and (self.is_open or len(words) < len(asked))


@dataclass
class Recorded:
    """A conversation, which becomes one training row. Arrays marked [T] are aligned."""

    prompt_ids: np.ndarray  # int32 [P]
    response_ids: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))  # [T]
    mask: np.ndarray = field(default_factory=lambda: np.zeros(0, bool))  # [T], True if sampled
    log_probs: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))  # [T]
    rewards: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))  # [T]
    turn_index: np.ndarray = field(
        default_factory=lambda: np.zeros(0, np.int32)
    )  # [T], -1 if not sampled
    finish_reason: str = "stop"
    """Finish reason of the last turn."""
    is_cut_off: bool = False
    """True if a limit of the run, not one that the agent set, cut off the last turn."""
    versions: list[tuple[int, int]] = field(default_factory=list)
    """`(position, weight version)` of the first token of each turn, and of each change of version
    within a turn."""
    told: list[ConversationPrefix] = field(default_factory=list)
    """Prefixes up to each turn that was requested by text or messages."""
    is_busy: bool = False
    """True while a turn of this conversation is being sampled."""

    @property
    def ids(self) -> np.ndarray:
        """Prompt and response ids."""
        return np.concatenate([self.prompt_ids, self.response_ids])

    def goes_on_as(self, ids: np.ndarray) -> bool:
        """Return whether `ids` begin with this conversation, and it can be extended now."""
        mine = self.ids
        return not self.is_busy and len(mine) <= len(ids) and np.array_equal(mine, ids[: len(mine)])

    def remember(self, said: Said, reply: str, tools: Tools = None, **message: Any) -> None:
        """Remember this conversation as text or messages, with its last turn.

        Args:
            said: The prompt of the turn.
            reply: The turn's text. It includes a stop string that ended it, as the ids do.
            tools: Tools that the chat template was given.
            message: Further fields of the turn's message.
        """
        if isinstance(said, str):
            words = said + reply
        else:
            words = [*said, {"role": "assistant", "content": reply, **message}]
        is_open = bool(reply) and self.finish_reason == "length"
        self.told.append(ConversationPrefix(_comparable(words), tools, len(self.ids), is_open))

    def append(self, ids: np.ndarray, completion: Completion | None) -> None:
        """Append ids: of a sampled turn, or of an environment if `completion` is None."""
        length = len(ids)
        by_policy = completion is not None
        log_probs = completion.log_probs if by_policy else np.zeros(length, np.float32)
        if by_policy:
            begin = len(self.response_ids)
            later = ((begin + first, version) for first, version in completion.later_versions)
            self.versions += [(begin, completion.weight_version), *later]
            self.finish_reason = completion.finish_reason
        self.response_ids = np.concatenate([self.response_ids, ids]).astype(np.int32)
        self.mask = np.concatenate([self.mask, np.full(length, by_policy)])
        self.log_probs = np.concatenate([self.log_probs, log_probs])
        self.rewards = np.concatenate([self.rewards, np.zeros(length, np.float32)])
        turn = 1 + self.turn_index.max(initial=-1) if by_policy else -1
        self.turn_index = np.concatenate([self.turn_index, np.full(length, turn, np.int32)])


@dataclass(eq=False)
class Policy:
    """The policy in one episode.

    A call whose ids begin with a recorded conversation continues it. The ids in between were not
    sampled, so they are masked out of the loss. Any other call begins a new conversation. Of
    several calls that continue the same turn, one continues it, and the others begin new ones.
    """

    ask: Callable[[np.ndarray, int, int, Sequence[str]], Awaitable[Completion]]
    """Function `(ids, number of the call, most new tokens, stop texts)` that samples a turn."""
    decode: Callable[[np.ndarray, bool], str]
    """Function `(ids, with special tokens)` that returns their text."""
    tokens: TurnTokens
    max_turns: int
    max_episode_tokens: int
    max_tokens: int
    """Most tokens of a conversation, prompt and response together."""
    max_new_tokens: int
    """Most new tokens of a turn."""
    vocabulary_size: int
    rows: list[Recorded] = field(default_factory=list)
    """Conversations of the episode, in the order of their first calls."""
    num_calls: int = 0
    num_waiting: int = 0
    """Number of calls in flight."""
    asking_s: float = 0.0
    """Seconds in which at least one call was in flight."""
    work_time: WorkTime | None = None
    """Time limit and quota of an agent; paused while it waits for the policy."""
    endpoint: Callable[[], str] | None = None
    """Function that returns the endpoint's URL, and starts its server if necessary."""
    api_key: str = ""
    """API key that identifies this episode at the endpoint."""
    prompt: str | None = None
    """First prompt as text, if it is not the prompt of the data."""
    is_cut_off: bool = False
    """True if a limit ended the episode."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the environment or the agent."""
    tool_uses: list[ToolUse] = field(default_factory=list)
    _since: float = 0.0

    @property
    def base_url(self) -> str:
        """URL of an OpenAI-compatible endpoint of this policy, valid until the episode is over.

        Use `openai.AsyncOpenAI(base_url=policy.base_url, api_key=policy.api_key)`. Requests are
        recorded as those of `generate`.
        """
        assert self.endpoint is not None, "only an agent is given a policy"
        return self.endpoint()

    def hear(self, use: ToolUse) -> None:
        """Record the use of a tool."""
        self.tool_uses.append(replace(use, turn=self.num_calls))

    async def generate(
        self,
        prompt: Observation,
        *,
        tools: Tools = None,
        max_new_tokens: int | None = None,
        stop: str | Sequence[str] = (),
    ) -> Reply:
        """Sample one turn.

        Args:
            prompt: The whole conversation so far: a text, chat messages, or token ids. Earlier
                turns keep the ids that were sampled; they are not tokenised again. To continue,
                append `reply.message` to the messages or `reply.text` to the text, or extend the
                ids in `reply.conversation`.
            tools: Tools that may be called. If the prompt is messages, the chat template gets them.
            max_new_tokens: Most tokens of the turn, if lower than `rollout.max_new_tokens`.
            stop: Texts that end the turn, besides `rollout.stop`. They are part of the turn's text
                and ids.

        Returns:
            The turn.

        Raises:
            EpisodeLimit: the episode has no turns left, or no room for another token.
            ValueError: an argument is invalid.
        """
        stop = (stop,) if isinstance(stop, str) else stop
        if is_ids(prompt):
            said, ids = None, np.asarray(prompt, np.int32)
        else:
            said = prompt if isinstance(prompt, str) else messages_of(prompt)
            ids = self.ids_of(said, tools)
        row, completion = await self.sample(ids, max_new_tokens=max_new_tokens, stop=stop)
        reply = Reply(
            self.decode(completion.token_ids, tools is not None),
            completion.token_ids,
            row.ids,
            completion.finish_reason,
        )
        if said is not None:
            row.remember(said, reply.text, tools)
        return reply

    async def sample(
        self, ids: np.ndarray, *, max_new_tokens: int | None = None, stop: Sequence[str] = ()
    ) -> tuple[Recorded, Completion]:
        """Sample one turn after `ids`, and record it.

        Args:
            ids: int32, the whole conversation so far.
            max_new_tokens: Most tokens of the turn, if lower than `rollout.max_new_tokens`.
            stop: Texts that end the turn, besides `rollout.stop`.

        Returns:
            row: The conversation, which ends with the turn.
            completion: The turn.

        Raises:
            EpisodeLimit: the episode has no turns left, or no room for another token.
            ValueError: `ids` is empty or has an id outside the vocabulary, `max_new_tokens` is
                below 1, or a stop is not a non-empty text.
        """
        if not len(ids):
            raise ValueError("the prompt has no tokens")
        if max_new_tokens is not None and max_new_tokens < 1:
            raise ValueError(f"max_new_tokens ({max_new_tokens}): a turn has a token. Raise it.")
        if not all(isinstance(each, str) and each for each in stop):
            raise ValueError(f"stop ({list(stop)}): only a text that is not empty ends a turn.")
        if ids.min() < 0 or ids.max() >= self.vocabulary_size:
            raise ValueError(
                f"token ids of the policy lie in 0 to {self.vocabulary_size - 1}, and those of "
                f"the prompt in {ids.min()} to {ids.max()}"
            )
        row = next((row for row in self.rows if row.goes_on_as(ids)), None)
        taken = len(ids) - len(row.prompt_ids) if row else 0
        room = min(self.max_episode_tokens - taken, self.max_tokens - len(ids))
        if self.num_calls >= self.max_turns:
            raise EpisodeLimit(f"the episode has had {self.num_calls} turns (rollout.max_turns)")
        if room < 1:
            raise EpisodeLimit(
                f"after {len(ids)} tokens, {taken} of them behind its prompt, there is no room for "
                f"a turn: a conversation may have {self.max_tokens} "
                f"(data.max_prompt_tokens and rollout.max_episode_tokens), and "
                f"{self.max_episode_tokens} behind its prompt (rollout.max_episode_tokens)"
            )
        if row is None:
            row = Recorded(ids)
            self.rows.append(row)
        number, self.num_calls = self.num_calls, self.num_calls + 1
        row.is_busy = True
        most = min(room, self.max_new_tokens, max_new_tokens or room)
        try:
            async with self._waiting():
                completion = await self.ask(ids, number, most, stop)
        finally:
            row.is_busy = False
        row.append(ids[len(row.ids) :], None)
        row.append(completion.token_ids, completion)
        by_length = completion.finish_reason == "length"
        row.is_cut_off = by_length and most == min(room, self.max_new_tokens)
        return row, completion

    def ids_of(self, said: Said, tools: Tools = None) -> np.ndarray:
        """Return a conversation as ids (int32). Recorded turns keep theirs; the rest is tokenised.

        Raises:
            ValueError: the conversation is empty, or the chat template refuses it.
        """
        asked = _comparable(said)
        known = [(told, row) for row in self.rows for told in row.told if told.begins(asked, tools)]
        if not known:
            text, ids = self.tokens.first(said, chat=not isinstance(said, str), tools=tools)
            self.prompt = self.prompt or text
            return ids
        told, row = max(known, key=lambda each: len(each[0].words))
        before, place = row.ids[: told.length], len(told.words)
        if place == len(said):
            return before
        calls = () if isinstance(said, str) else said[place - 1].get("tool_calls") or ()
        between = self.tokens.between(before, said[place:], chat=False, tools=tools, calls=calls)
        return np.concatenate([before, between])

    @asynccontextmanager
    async def _waiting(self) -> AsyncIterator[None]:
        """Measure the time of a call; the agent's time limit is paused meanwhile."""
        self.num_waiting += 1
        if self.num_waiting == 1:
            self._since = time.perf_counter()
        if self.work_time is not None:
            self.work_time.rest()
        try:
            yield
        finally:
            self.num_waiting -= 1
            if self.num_waiting == 0:
                self.asking_s += time.perf_counter() - self._since
            if self.work_time is not None:
                await self.work_time.go_on()


def _comparable(said: Said) -> Said:
    """Return the messages without ids of tool calls, because the endpoint makes those up."""
    if isinstance(said, str):
        return said
    return [
        message | {"tool_calls": [{k: v for k, v in call.items() if k != "id"} for call in calls]}
        if (calls := message.get("tool_calls"))
        else message
        for message in said
    ]
