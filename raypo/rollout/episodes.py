"""Step 4 with turns: many episodes at a time, and what the policy is asked in each of them."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any, Protocol

import numpy as np

from raypo.cluster.actors import NoReplicaLeft
from raypo.collectives import as_tensor
from raypo.config import OnlineConfig, RolloutSection
from raypo.data.stream import Draw
from raypo.data.turns import TurnTokens
from raypo.models.loading import vocabulary_size
from raypo.plan.estimate import max_model_len
from raypo.rollout.agent import Agents
from raypo.rollout.collect import PushAgain, Sampler, Sampling, ask, request_of
from raypo.rollout.environment import Environments, in_thread
from raypo.rollout.policy import EpisodeLimit, Policy, Recorded
from raypo.rollout.sessions import Sessions
from raypo.serving.requests import Completion, SamplingRequest
from raypo.types import Episode, Prompt, Rollout


class Player(Protocol):
    """Who decides what the policy is asked."""

    async def run(self, prompt: Prompt, policy: Policy, quota: asyncio.Semaphore) -> float:
        """One episode; its score. An exception fails it."""
        ...

    def close(self) -> None:
        """End what it has started."""
        ...


@dataclass(eq=False)
class Episodes:
    """Prompts become episodes; with it, `sample` plays instead of asking once."""

    player: Player
    tokenizer: Any
    tokens: TurnTokens
    section: RolloutSection
    max_tokens: int
    """Of prompt and response together."""
    vocabulary_size: int
    """Of the policy."""
    _waited_s: float = 0.0

    def waited_s(self) -> float:
        """Seconds that training's turns waited for environments, since this was last asked."""
        waited, self._waited_s = self._waited_s, 0.0
        return waited

    def close(self) -> None:
        """End the player's processes."""
        self.player.close()

    def play(
        self,
        draws: Sequence[Draw],
        engine: Sampler,
        sampling: Sampling,
        push_again: PushAgain | None,
    ) -> list[Rollout]:
        """`samples_per_prompt` episodes a draw, all at a time and in step: a turn of all that go
        on is one batch, which is sampled when each of them has asked.

        Every turn has a seed of its own, so an episode does not depend on the others.
        """
        with asyncio.Runner() as runner:
            runner.get_loop().set_default_executor(_Threads())
            table, quota = _Table(engine), asyncio.Semaphore(self.section.max_concurrent_steps)
            seats = [
                _Seat(self, draw, number, sampling, table)
                for draw in draws
                for number in range(sampling.samples_per_prompt)
            ]
            table.now_thinking(len(seats))
            tasks = [runner.get_loop().create_task(seat.play(quota)) for seat in seats]
            lost = runner.run(table.until_over())
            if push_again and push_again.workers.sum(as_tensor(lost is not None)):
                push_again.push()
                lost = lost and runner.run(table.until_over())
            if lost:
                raise lost
            if sampling.stream == 0:  # not of an evaluation
                self._waited_s += table.waited_s
            return [rollout for task in tasks for rollout in task.result()]


def open_episodes(
    config: OnlineConfig, policy: str, tokenizer: Any, stop_token_ids: Sequence[int]
) -> Episodes | None:
    """How a config's prompts are played; None where each is answered once.

    Args:
        config: Of the run.
        policy: Folder or hub id of the policy.
        tokenizer: The policy's.
        stop_token_ids: Tokens that end a turn.
    """
    section = config.rollout
    if not section.is_episodic:
        return None
    tokens = TurnTokens(tokenizer, stop_token_ids)
    return Episodes(
        Environments(section, tokens)
        if section.environment
        else Agents(section, Sessions(tokenizer, stop_token_ids, section)),
        tokenizer,
        tokens,
        section,
        max_tokens=max_model_len(config),
        vocabulary_size=vocabulary_size(policy),
    )


class _Threads(ThreadPoolExecutor):
    """Of `asyncio.to_thread` in an agent or an environment: what hangs there is not waited for."""

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        super().shutdown(wait=False, cancel_futures=cancel_futures)


@dataclass(eq=False)
class _Call:
    order: tuple[int, int, int]
    """Place in a round: by draw, sample and turn."""
    request: SamplingRequest
    seat: _Seat
    answer: asyncio.Future[Completion] = field(default_factory=asyncio.Future)


class _Table:
    """Where episodes wait for the policy until all of them do."""

    def __init__(self, engine: Sampler) -> None:
        self._engine = engine
        self._calls: list[_Call] = []
        self._changed = asyncio.Event()
        self.num_thinking = 0
        """Episodes that do not wait for the policy, and are not over."""
        self.waited_s = 0.0
        """Seconds that it waited for those."""

    async def ask(self, call: _Call) -> Completion:
        """Wait for the next round.

        Raises:
            EpisodeLimit: the episode is over; what it left behind goes on asking.
        """
        if call.seat.is_over:
            raise EpisodeLimit("the episode is over")
        call.seat.num_waiting += 1
        if call.seat.num_waiting == 1:
            self.now_thinking(-1)
        self._calls.append(call)
        try:
            return await call.answer
        except asyncio.CancelledError:
            self._calls = [each for each in self._calls if each is not call]
            if call.answer.cancelled():  # else the answer came in the same moment
                self._waits_no_more(call.seat)
            raise

    async def until_over(self) -> NoReplicaLeft | None:
        """Round after round until no episode waits.

        Returns:
            Why it could not go on: it can be called once more, when there is an engine again.
        """
        while True:
            begin = time.perf_counter()
            while self.num_thinking:
                self._changed.clear()
                await self._changed.wait()
            self.waited_s += time.perf_counter() - begin
            await asyncio.sleep(0)  # for others that the last one asks at the same time
            if not self._calls:
                return None
            calls, self._calls = sorted(self._calls, key=lambda call: call.order), []
            try:
                requests = [call.request for call in calls]
                completions = await in_thread(partial(ask, requests, self._engine))
            except NoReplicaLeft as error:
                self._calls += calls
                return error
            for call, completion in zip(calls, completions, strict=True):
                if not call.answer.done():
                    self._waits_no_more(call.seat)
                    call.answer.set_result(completion)

    def leave(self, seat: _Seat) -> None:
        """An episode is over; what it still waits for is not asked."""
        seat.is_over = True
        if seat.num_waiting == 0:
            self.now_thinking(-1)
        self._calls = [each for each in self._calls if each.seat is not seat]

    def now_thinking(self, more: int) -> None:
        """So many more episodes think, or fewer."""
        self.num_thinking += more
        self._changed.set()

    def _waits_no_more(self, seat: _Seat) -> None:
        seat.num_waiting -= 1
        if seat.num_waiting == 0 and not seat.is_over:
            self.now_thinking(1)


@dataclass(eq=False)
class _Seat:
    """One episode at the table."""

    episodes: Episodes
    draw: Draw
    sample_index: int
    sampling: Sampling
    table: _Table
    num_waiting: int = 0
    """Its calls that wait for an answer."""
    is_over: bool = False

    async def play(self, quota: asyncio.Semaphore) -> list[Rollout]:
        """The whole episode, by conversations; what raises fails it and no other."""
        section, prompt = self.episodes.section, self.draw.prompt
        assert section.max_episode_tokens is not None
        policy = Policy(
            self._ask,
            self._decode,
            self.episodes.tokens,
            max_turns=section.max_turns,
            max_episode_tokens=section.max_episode_tokens,
            max_tokens=self.episodes.max_tokens,
            max_new_tokens=self.sampling.max_new_tokens,
            vocabulary_size=self.episodes.vocabulary_size,
        )
        begin, score, error = time.perf_counter(), math.nan, None
        try:
            score = await self.episodes.player.run(prompt, policy, quota)
        except (KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as failure:  # of native code too: a panic of Rust is no Exception
            error = f"{type(failure).__name__}: {failure}"
        finally:
            self.table.leave(self)
        took = time.perf_counter() - begin - policy.asking_s
        episode = Episode(score, policy.num_calls, took, error)
        told = [row for row in policy.rows if row.mask.any()]
        rows = told or [*policy.rows, Recorded(self.draw.prompt.token_ids)][:1]
        return [self._rollout(policy, episode, *each) for each in enumerate(rows)]

    async def _ask(
        self, ids: np.ndarray, number: int, max_new_tokens: int, stop: Sequence[str]
    ) -> Completion:
        request = replace(
            request_of(self.draw, self.sample_index, self.sampling, number),
            prompt_ids=ids,
            max_new_tokens=max_new_tokens,
            stop=(*self.sampling.stop, *stop),
        )
        order = self.draw.group_index, self.sample_index, number
        return await self.table.ask(_Call(order, request, self))

    def _decode(self, ids: np.ndarray) -> str:
        return self.episodes.tokenizer.decode(ids, skip_special_tokens=True)

    def _rollout(self, policy: Policy, episode: Episode, number: int, row: Recorded) -> Rollout:
        prompt, is_agents = self.draw.prompt, self.episodes.section.agent is not None
        text = self.episodes.tokenizer.decode(row.prompt_ids) if number else policy.prompt
        is_cut_off = policy.is_cut_off or (is_agents and row.finish_reason == "length")
        return Rollout(
            prompt=text or prompt.text,
            response=self._decode(row.response_ids),
            prompt_ids=row.prompt_ids,
            response_ids=row.response_ids,
            log_probs=row.log_probs,
            response_mask=row.mask,
            label=prompt.label,
            prompt_index=prompt.index,
            sample_index=self.sample_index,
            finish_reason="length" if is_cut_off else "stop",
            weight_version=row.versions[0][1] if row.versions else -1,
            later_versions=tuple(
                now for before, now in pairwise(row.versions) if now[1] != before[1]
            ),
            group_index=self.draw.group_index,
            messages=prompt.messages,
            data_source=prompt.data_source,
            episode=episode,
            row_index=number,
            turn_rewards=None if is_agents else row.rewards,
            turn_index=row.turn_index,
        )
