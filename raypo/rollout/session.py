"""Record one episode's conversations with the policy, as the token ids that were sampled.

A request is the whole conversation so far: token ids, a text, or chat messages. Two rules make
training exact. Sampled tokens are never tokenised again.

1. A text or messages become ids (`Session.ids_of`). If the request begins with a recorded
   conversation, that part keeps its recorded ids, and only the rest is tokenised. The longest such
   conversation is used. Messages are compared one by one, texts character by character. Without a
   recorded prefix, the whole request is tokenised.
2. Ids are assigned to a row (`Session.sample`). If they begin with the ids of a row that has no
   call in flight, the longest such row is continued. The ids between the end of the row and the new
   turn were not sampled, so they are masked. Otherwise a new row begins.

So each sampled token is trained once, after exactly the tokens that the engine read before it. If
several calls continue the same turn, one of them continues its row, and the others begin new rows.

Concurrency. A session samples and records in the event loop of the episodes. Threads of agents may
read `base_url` and `api_key`, and their tools call `record_tool`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np

from raypo.config import RolloutSection
from raypo.data.prepared_rows import TEMPLATE_KWARGS
from raypo.data.stop_tokens import without_end
from raypo.data.turns import Observation, Tools, TurnTokens, is_ids, messages_of
from raypo.endpoint.agent_endpoint import AgentEndpoint
from raypo.rollout.collect import Sampling, request_of
from raypo.rollout.policy import EpisodeLimit, Reply
from raypo.rollout.turn_sampler import PolicyCalls
from raypo.rollout.work_time import WorkTime
from raypo.serving.requests import Completion, validate_request
from raypo.types import Episode, Prompt, Rollout, ToolUse

Words = str | list[dict[str, Any]]
"""An untokenised conversation: one text, or chat messages."""


@dataclass
class Turn:
    """One sampled turn of a row."""

    begin: int
    """Position of the turn's first token in the row."""
    completion: Completion
    is_cut_off: bool
    """True if a limit of the run cut the turn off, rather than a limit that the agent set."""
    reward: float = 0.0
    words: Words | None = None
    """Untokenised conversation up to the end of the turn, or None if the request was token ids."""
    tools: Tools = None
    """Tools that were passed to the chat template."""
    is_open: bool = False
    """True if the turn was cut off and has a text, so that the policy can continue it."""

    @property
    def end(self) -> int:
        """Position after the turn's last token in the row."""
        return self.begin + len(self.completion.token_ids)

    def remember(self, words: Words, text: str, tools: Tools = None, **message: Any) -> None:
        """Remember the untokenised conversation, so that a later request can continue it.

        Args:
            words: The prompt of the turn.
            text: The turn's text, including the stop string that ended it, as in the ids.
            tools: Tools that were passed to the chat template.
            message: Further fields of the turn's message.
        """
        if isinstance(words, str):
            self.words = words + text
        else:
            self.words = _comparable([*words, {"role": "assistant", "content": text, **message}])
        self.tools = tools
        self.is_open = bool(text) and self.completion.finish_reason == "length"

    def is_continued_by(self, words: Words, tools: Tools) -> bool:
        """Return whether a request begins with the conversation up to the end of this turn."""
        mine = self.words
        if mine is None or type(words) is not type(mine) or tools != self.tools:
            return False
        return words[: len(mine)] == mine and (self.is_open or len(words) > len(mine))


@dataclass(eq=False)
class Row:
    """A conversation, which becomes one training row."""

    ids: np.ndarray  # int32 [P + T], prompt and response
    num_prompt: int  # P
    turns: list[Turn] = field(default_factory=list)
    is_busy: bool = False
    """True while a turn of this conversation is being sampled."""

    def is_continued_by(self, ids: np.ndarray) -> bool:
        """Return whether ids begin with this conversation, and no turn of it is in flight."""
        return not self.is_busy and np.array_equal(self.ids, ids[: len(self.ids)])

    def add(self, ids: np.ndarray, completion: Completion, *, is_cut_off: bool) -> Turn:
        """Append a sampled turn, and return it. `ids` are all tokens before the turn."""
        turn = Turn(len(ids), completion, is_cut_off)
        self.ids = np.concatenate([ids, completion.token_ids]).astype(np.int32)
        self.turns.append(turn)
        return turn

    @property
    def is_cut_off(self) -> bool:
        """True if a limit of the run cut a turn off, and no other turn continues its text."""
        begins = {turn.begin for turn in self.turns if turn.end > turn.begin}
        return any(turn.is_cut_off and turn.end not in begins for turn in self.turns)

    def arrays(self) -> dict[str, Any]:
        """Return a rollout's token ids, values per token, turn indices and weight versions."""
        length, versions = len(self.ids) - self.num_prompt, []
        mask, turn_index = np.zeros(length, bool), np.full(length, -1, np.int32)
        log_probs, rewards = np.zeros(length, np.float32), np.zeros(length, np.float32)
        for number, turn in enumerate(self.turns):
            begin, end = turn.begin - self.num_prompt, turn.end - self.num_prompt
            mask[begin:end], turn_index[begin:end] = True, number
            log_probs[begin:end] = turn.completion.log_probs
            rewards[end - 1 : end] = turn.reward
            versions += [(begin, turn.completion.weight_version)]
            versions += [(begin + at, version) for at, version in turn.completion.later_versions]
        changes = tuple(now for before, now in pairwise(versions) if now[1] != before[1])
        return {
            "prompt_ids": self.ids[: self.num_prompt],
            "response_ids": self.ids[self.num_prompt :],
            "response_mask": mask,
            "log_probs": log_probs,
            "turn_rewards": rewards,
            "turn_index": turn_index,
            "weight_version": versions[0][1] if versions else -1,
            "later_versions": changes,
        } | self._experts()

    def _experts(self) -> dict[str, np.ndarray]:
        """Return the experts of prompt and response, if the engine has recorded them.

        A turn brings those of all tokens before it, of which those of earlier turns stay: their
        weights may be older. Tokens that no turn has read are after the last sampled one.
        """
        parts: list[np.ndarray] = []
        known = 0
        for experts in (turn.completion.experts for turn in self.turns):
            if experts is not None:
                parts.append(experts[known:])
                known = len(experts)
        if not parts:
            return {}
        experts = np.concatenate(parts)
        unread = np.zeros_like(experts, shape=(len(self.ids) - known, *experts.shape[1:]))
        prompt, response = np.split(np.concatenate([experts, unread]), [self.num_prompt])
        return {"prompt_experts": prompt, "response_experts": response}


@dataclass(frozen=True)
class EpisodeSettings:
    """Settings that all episodes of a run share."""

    section: RolloutSection
    tokenizer: Any
    tokens: TurnTokens
    max_tokens: int
    """Longest conversation, prompt and response together, in tokens."""
    vocabulary_size: int
    """Vocabulary size of the policy."""


@dataclass(eq=False)
class Session:
    """Access to the policy in one episode. An agent gets it as its argument `policy`."""

    settings: EpisodeSettings
    prompt: Prompt
    sample_index: int
    sampling: Sampling
    calls: PolicyCalls
    endpoint: AgentEndpoint | None = None
    """HTTP endpoint for the agent. None in the episode of an environment."""
    api_key: str = ""
    """API key that identifies this episode at the endpoint."""
    work_time: WorkTime | None = None
    """Time limit and quota of an agent; paused while it waits for the policy."""
    rows: list[Row] = field(default_factory=list)
    """Conversations of the episode, in the order of their first calls."""
    num_calls: int = 0
    first_text: str | None = None
    """Text of the first prompt. None means that it is the prompt from the data."""
    first_messages: list[dict[str, Any]] | None = None
    """Chat messages of the first prompt, if `first_text` is rendered from messages."""
    is_cut_off: bool = False
    """True if a limit ended the episode."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the environment or the agent."""
    tool_uses: list[ToolUse] = field(default_factory=list)

    @property
    def tokens(self) -> TurnTokens:
        """Tokenisation of this episode's observations."""
        return self.settings.tokens.with_variables((self.prompt.row or {}).get(TEMPLATE_KWARGS))

    @property
    def base_url(self) -> str:
        """URL of an OpenAI-compatible endpoint of this policy, valid until the episode ends.

        Use `openai.AsyncOpenAI(base_url=policy.base_url, api_key=policy.api_key)`. Requests are
        recorded like calls of `generate`.
        """
        assert self.endpoint is not None, "only an agent is given a policy"
        return self.endpoint.base_url()

    def record_tool(self, use: ToolUse) -> None:
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
            max_new_tokens: Most tokens of the turn. `rollout.max_new_tokens` applies as well.
            stop: Texts that end the turn, besides `rollout.stop`. They are part of the turn's text
                and ids.

        Returns:
            The turn.

        Raises:
            EpisodeLimit: the episode has no turns left, or no room for another token.
            ValueError: an argument is invalid.
        """
        stop = (stop,) if isinstance(stop, str) else stop
        words: Any = prompt if isinstance(prompt, str) or is_ids(prompt) else messages_of(prompt)
        ids = self.ids_of(words, tools)
        row, turn = await self.sample(ids, max_new_tokens=max_new_tokens, stop=stop)
        sampled = turn.completion
        text = self._text_of(sampled.token_ids, with_special=tools is not None)
        if not is_ids(words):
            turn.remember(words, text, tools)
        return Reply(text, sampled.token_ids, row.ids[: turn.end], sampled.finish_reason)

    def ids_of(self, words: Any, tools: Tools = None) -> np.ndarray:
        """Return the token ids (int32) of a text, messages or ids. Recorded turns keep their ids.

        Raises:
            ValueError: the conversation is empty, or the chat template refuses it.
        """
        if is_ids(words):
            return np.asarray(words, np.int32)
        tokens, comparable = self.tokens, _comparable(words)
        recorded = [
            (len(turn.words or ""), turn.end, row)
            for row in self.rows
            for turn in row.turns
            if turn.is_continued_by(comparable, tools)
        ]
        if not recorded:
            text, ids = tokens.first(words, chat=not isinstance(words, str), tools=tools)
            if self.first_text is None:
                self.first_text = text
                self.first_messages = None if isinstance(words, str) else words
            return ids
        length, end, row = max(recorded, key=lambda candidate: candidate[0])
        before = row.ids[:end]
        if length == len(words):
            return before
        calls = () if isinstance(words, str) else words[length - 1].get("tool_calls") or ()
        between = tokens.between(before, words[length:], chat=False, tools=tools, calls=calls)
        return np.concatenate([before, between])

    async def sample(
        self, ids: np.ndarray, *, max_new_tokens: int | None = None, stop: Sequence[str] = ()
    ) -> tuple[Row, Turn]:
        """Sample one turn after `ids` (int32), the whole conversation so far, and record it.

        Arguments and errors are those of `generate`.

        Returns:
            The row that the turn has been added to, and the turn.
        """
        settings, continued = self.settings, [r for r in self.rows if r.is_continued_by(ids)]
        row = max(continued, key=lambda row: len(row.ids), default=None)
        room = min(self._room(ids, row), self.sampling.max_new_tokens)
        num_tokens = room if max_new_tokens is None else min(room, max_new_tokens)
        request = replace(
            request_of(self.prompt, self.sample_index, self.sampling, self.num_calls),
            prompt_ids=ids,
            max_new_tokens=num_tokens,
            stop=(*self.sampling.stop, *stop),
        )
        validate_request(
            request, vocabulary_size=settings.vocabulary_size, max_model_len=settings.max_tokens
        )
        if row is None:
            self.rows.append(row := Row(ids, len(ids)))
        order = self.prompt.group_index, self.sample_index, self.num_calls
        self.num_calls += 1
        row.is_busy = True
        if self.work_time is not None:
            self.work_time.pause()
        try:
            completion = await self.calls.sample(request, order)
            by_length = completion.finish_reason == "length"
            return row, row.add(ids, completion, is_cut_off=by_length and num_tokens == room)
        finally:
            row.is_busy = False
            if self.work_time is not None:
                await self.work_time.resume()

    def rollouts(self, episode: Episode) -> list[Rollout]:
        """Return a rollout for each row that has a sampled token.

        If no row has one, return a rollout for the first row, or for the bare prompt.
        """
        prompt, is_agents = self.prompt, self.settings.section.has_agent
        messages = prompt.messages if self.first_text is None else self.first_messages
        rows = [row for row in self.rows if any(turn.end > turn.begin for turn in row.turns)]
        rows = rows or [*self.rows, Row(prompt.token_ids, len(prompt.token_ids))][:1]
        rollouts = []
        for number, row in enumerate(rows):
            arrays = row.arrays()
            decoded = self.settings.tokenizer.decode(arrays["prompt_ids"]) if number else None
            rollout = Rollout(
                prompt=decoded or self.first_text or prompt.text,
                response=self._text_of(arrays["response_ids"]),
                label=prompt.label,
                prompt_index=prompt.index,
                sample_index=self.sample_index,
                finish_reason="length" if self.is_cut_off or row.is_cut_off else "stop",
                group_index=prompt.group_index,
                messages=messages if decoded is None else None,
                data_source=prompt.data_source,
                row=prompt.row,
                episode=episode,
                row_index=number,
                **arrays,
            )
            rollouts.append(replace(rollout, turn_rewards=None) if is_agents else rollout)
        return rollouts

    def _room(self, ids: np.ndarray, row: Row | None) -> int:
        """Return the number of tokens that a turn after `ids` may have."""
        section, max_tokens = self.settings.section, self.settings.max_tokens
        if self.num_calls >= section.max_turns:
            raise EpisodeLimit(f"the episode has had {self.num_calls} turns (rollout.max_turns)")
        assert section.max_episode_tokens is not None
        taken = len(ids) - row.num_prompt if row else 0
        room = min(section.max_episode_tokens - taken, max_tokens - len(ids))
        if room < 1:
            raise EpisodeLimit(
                f"after {len(ids)} tokens, {taken} of them after the prompt, there is no room "
                f"for another turn: a conversation may have {max_tokens} tokens "
                "(data.max_prompt_tokens and rollout.max_episode_tokens), of which "
                f"{section.max_episode_tokens} after the prompt (rollout.max_episode_tokens)"
            )
        return room

    def _text_of(self, ids: np.ndarray, *, with_special: bool = False) -> str:
        ids = without_end(ids, self.sampling.stop_token_ids)
        return self.settings.tokenizer.decode(ids, skip_special_tokens=not with_special)


def _comparable(words: Words) -> Words:
    """Return the messages without empty fields, and with only the functions of tool calls.

    The endpoint invents the ids of calls, and clients may return calls with or without `type` and
    `index`. Some return messages with empty fields of their own, such as `annotations: []`.
    """
    if isinstance(words, str):
        return words
    return [
        {
            key: [call.get("function") for call in value] if key == "tool_calls" else value
            for key, value in message.items()
            if value or key == "content"
        }
        for message in words
    ]
