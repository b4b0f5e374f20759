"""The policy as an episode sees it: ids in, a turn out, and every call recorded."""

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
"""The code of an error that says so."""


class EpisodeLimit(Exception):
    """An episode may have no further turn: `rollout.max_turns`, `rollout.max_episode_tokens`, or
    it is over."""

    code = LIMIT


def is_limit(error: BaseException | None) -> bool:
    """Whether an error comes of `EpisodeLimit`, also by way of an endpoint's client."""
    if error is None or getattr(error, "code", None) == LIMIT:
        return error is not None
    inner = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    return any(map(is_limit, (*inner, error.__cause__ or error.__context__)))


Said = str | list[dict[str, Any]]
"""A conversation as people write it: one text, or chat messages."""


@dataclass(frozen=True)
class Reply:
    """One turn of the policy."""

    text: str
    """Without special tokens; with them but for the end of the turn, where tools may be called:
    to some models the marks of a call are special."""
    token_ids: np.ndarray  # int32 [T], as sampled
    conversation: np.ndarray  # int32, all before it, and it: what a next turn goes on from
    finish_reason: str
    """stop | length."""

    @property
    def message(self) -> dict[str, str]:
        """It as a chat message, to be appended to those before it."""
        return {"role": "assistant", "content": self.text}


@dataclass(frozen=True)
class Told:
    """A conversation in words, up to the end of one of its turns."""

    words: Said
    tools: Tools
    """That the template told the policy of."""
    length: int
    """In tokens."""
    is_open: bool
    """Whether the turn can be gone on with as it is: it was cut off, and has a text."""

    def begins(self, asked: Said, tools: Tools) -> bool:
        """Whether what is asked goes on from here."""
        words = self.words
        is_first_part = type(words) is type(asked) and asked[: len(words)] == words
        return is_first_part and tools == self.tools and (self.is_open or len(words) < len(asked))


@dataclass
class Recorded:
    """A conversation: what becomes one row that is trained. Ids after the prompt are in step."""

    prompt_ids: np.ndarray  # int32 [P]
    response_ids: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))  # [T]
    mask: np.ndarray = field(default_factory=lambda: np.zeros(0, bool))  # [T], True: sampled
    log_probs: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))  # [T]
    rewards: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))  # [T]
    turn_index: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))  # [T], or -1
    finish_reason: str = "stop"
    """Of its last turn."""
    is_cut_off: bool = False
    """Whether a limit of the run, and none that the agent had set, ended that."""
    versions: list[tuple[int, int]] = field(default_factory=list)
    """The first token of each turn, and of each change meanwhile, and the version of the weights
    that sampled it."""
    told: list[Told] = field(default_factory=list)
    """After each turn that was asked for in words: all that was said."""
    is_busy: bool = False

    @property
    def ids(self) -> np.ndarray:
        """All of it."""
        return np.concatenate([self.prompt_ids, self.response_ids])

    def goes_on_as(self, ids: np.ndarray) -> bool:
        """Whether `ids` begin with it, and it can be extended."""
        mine = self.ids
        return not self.is_busy and len(mine) <= len(ids) and np.array_equal(mine, ids[: len(mine)])

    def remember(self, said: Said, reply: str, tools: Tools = None, **message: Any) -> None:
        """What it is in words: what was asked, and its last turn.

        Args:
            said: What was asked.
            reply: The turn's text, with a stop string that ended it: it is in the ids.
            tools: That the template told of.
            message: What else the turn's message has.
        """
        if isinstance(said, str):
            words = said + reply
        else:
            words = [*said, {"role": "assistant", "content": reply, **message}]
        is_open = bool(reply) and self.finish_reason == "length"
        self.told.append(Told(_comparable(words), tools, len(self.ids), is_open))

    def append(self, ids: np.ndarray, completion: Completion | None) -> None:
        """What was sampled, or (None) what an environment wrote."""
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

    A call whose ids begin with a recorded conversation goes on with it: what came after is not the
    policy's, and masked. Any other call begins a conversation of its own, and so does one of
    several that go on from the same turn.
    """

    ask: Callable[[np.ndarray, int, int, Sequence[str]], Awaitable[Completion]]
    """Of ids, the number of the call, most new tokens, and further texts that end the turn."""
    decode: Callable[[np.ndarray, bool], str]
    """Of ids, and whether special tokens are text."""
    tokens: TurnTokens
    max_turns: int
    max_episode_tokens: int
    max_tokens: int
    """Of prompt and response together."""
    max_new_tokens: int
    """Of a turn."""
    vocabulary_size: int
    rows: list[Recorded] = field(default_factory=list)
    """Its conversations, in the order of their first calls."""
    num_calls: int = 0
    num_waiting: int = 0
    """Calls that wait for their answers."""
    asking_s: float = 0.0
    """Seconds that some did."""
    work_time: WorkTime | None = None
    """Of an agent, which rests while it waits for answers."""
    endpoint: Callable[[], str] | None = None
    """Starts the server that `base_url` names, where there is none."""
    api_key: str = ""
    """By which that knows this episode."""
    prompt: str | None = None
    """What it began with, where that is not the prompt of the data."""
    is_cut_off: bool = False
    """Whether a limit ended it."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What the environment or the agent measured."""
    tool_uses: list[ToolUse] = field(default_factory=list)
    _since: float = 0.0

    @property
    def base_url(self) -> str:
        """Where it is served by OpenAI's protocol until the episode is over.

        For `openai.AsyncOpenAI(base_url=policy.base_url, api_key=policy.api_key)`: what it is asked
        there is recorded as with `generate`.
        """
        assert self.endpoint is not None, "only an agent is given a policy"
        return self.endpoint()

    def hear(self, use: ToolUse) -> None:
        """A tool was called."""
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
            prompt: The whole conversation so far: a text, chat messages, or token ids. What was
                sampled is found again in it, and not tokenised once more: append `reply.message`
                to messages, `reply.text` to a text, or go on from the ids in `reply.conversation`.
            tools: That may be called; the chat template tells the policy of them, where the prompt
                is messages.
            max_new_tokens: Most tokens of the turn, where the run's `rollout.max_new_tokens` is
                more.
            stop: Texts that end the turn, beside `rollout.stop`; the turn has them in its text, as
                in its ids.

        Raises:
            EpisodeLimit: the episode has had all its turns, or there is no room for a token.
            ValueError: one of the arguments is no such thing.
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
        """Sample one turn after ids, and record it.

        Args:
            ids: int32, the whole conversation so far.
            max_new_tokens: Fewer than the run's, if that is wanted.
            stop: Texts that end the turn, beside the run's.

        Returns:
            row: The conversation; the turn is its end.
            completion: The turn.

        Raises:
            EpisodeLimit: the episode has had all its turns, or there is no room for a token.
            ValueError: there are no ids, or one that the policy does not know, `max_new_tokens` is
                below 1, or a stop is no text.
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
        """int32: what was sampled before by its ids, and what is new tokenised.

        Raises:
            ValueError: it is empty, or the chat template refuses it.
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
        """While it waits for an answer, nobody else is slow."""
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
    """Without the ids of tool calls: an endpoint makes them up."""
    if isinstance(said, str):
        return said
    return [
        message | {"tool_calls": [{k: v for k, v in call.items() if k != "id"} for call in calls]}
        if (calls := message.get("tool_calls"))
        else message
        for message in said
    ]
