"""Step 4 for episodes of several turns: many episodes run concurrently and share the engines.

Concurrency. A worker has one event loop in a thread of its own (`EventLoop`). All episodes of all
batches run there as tasks. The thread that calls `Episodes.play` blocks until its batch is done;
this is the main thread, or a background thread if rollouts are collected ahead. Plain methods of
environments and agents run in further threads, or in the processes of an `EnvironmentPool`.
Agents may also send requests to the thread of an HTTP server (`Sessions`).

A task that needs a turn of the policy awaits a future in the batch's `_Table`. With
`rollout.turns: in_step` the table waits until every episode awaits one, and samples all turns as
one batch in a thread; otherwise it sends each request at once. Only the event loop touches the
table, so it needs no lock.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, TypeVar
from weakref import WeakSet

import numpy as np

from raypo.cluster.actors import NoReplicaLeft
from raypo.collectives import as_tensor
from raypo.config import OnlineConfig, RolloutSection
from raypo.custom.errors import text_of
from raypo.data.stop_tokens import without_end
from raypo.data.stream import Draw
from raypo.data.turns import TurnTokens
from raypo.models.loading import vocabulary_size
from raypo.rollout.collect import PushAgain, Sampling, request_of
from raypo.rollout.event_loop import EventLoop, tasks_of
from raypo.rollout.players import Agents, Environments, Player
from raypo.rollout.policy import EpisodeLimit, Policy, Recorded
from raypo.serving.client import Engines
from raypo.serving.requests import Completion, SamplingRequest
from raypo.tools.calls import heard
from raypo.types import Episode, Rollout

T = TypeVar("T")


@dataclass(eq=False)
class Episodes:
    """Runs an episode for each sample; `sample` uses it instead of sampling one response each."""

    player: Player
    tokenizer: Any
    tokens: TurnTokens
    section: RolloutSection
    max_tokens: int
    """Longest conversation, prompt and response together, in tokens."""
    vocabulary_size: int
    """Vocabulary size of the policy."""
    _loop: EventLoop = field(init=False)
    """Event loop of all episodes, of every batch."""
    _waited_s: float = 0.0

    def __post_init__(self) -> None:
        self._loop = EventLoop(self.section.step_timeout_s)

    def waited_s(self) -> float:
        """Return the seconds that training batches waited for environments since the last call."""
        waited, self._waited_s = self._waited_s, 0.0
        return waited

    def close(self) -> None:
        """End the player's processes, and the event loop with all its tasks."""
        self.player.close()
        self._loop.close()

    def play(
        self,
        draws: Sequence[Draw],
        engine: Engines,
        sampling: Sampling,
        push_again: PushAgain | None,
    ) -> list[Rollout]:
        """Run `samples_per_prompt` episodes for each draw, all concurrently.

        Every turn has its own seed, so an episode does not depend on the others.

        Args:
            draws: This worker's draws.
            engine: The engines.
            sampling: Sampling parameters.
            push_again: Repeats the last push if no engine is left. All workers call `play`
                together if it is given.

        Returns:
            The rollouts of all episodes, in the order of draws and samples.

        Raises:
            NoReplicaLeft: no engine is left, also after another push.
            LoopStandsStill: user code blocked the event loop for too long.
        """
        table, loop = _Table(engine, in_step=self.section.goes_in_step), self._loop
        seats = [
            _Slot(self, draw, number, sampling, table)
            for draw in draws
            for number in range(sampling.samples_per_prompt)
        ]
        try:
            lost = loop.run(table.until_over(seats))
            if push_again and push_again.workers.sum(as_tensor(lost is not None)):
                push_again.push()
                lost = lost and loop.run(table.until_over())
            if lost:
                raise lost
        finally:
            loop.call_soon(table.clear)
        if sampling.stream == 0:  # 0 is training; evaluations do not count
            self._waited_s += table.waited_s
        return [rollout for seat in seats for rollout in seat.rollouts]


def open_episodes(
    config: OnlineConfig, policy: str, tokenizer: Any, stop_token_ids: Sequence[int]
) -> Episodes | None:
    """Return the episodes of a config. None if each prompt gets a single response.

    Args:
        config: The run's config.
        policy: Folder or hub id of the policy.
        tokenizer: The policy's tokenizer.
        stop_token_ids: Tokens that end a turn.
    """
    section = config.rollout
    if not section.is_episodic:
        return None
    tokens = TurnTokens(tokenizer, stop_token_ids)
    if section.environment:
        player: Environments | Agents = Environments(section, tokens)
    else:
        from raypo.rollout.sessions import Sessions  # packages of the extra serve

        player = Agents(section, Sessions(tokenizer, stop_token_ids, section))
    return Episodes(
        player,
        tokenizer,
        tokens,
        section,
        max_tokens=config.max_model_len,
        vocabulary_size=vocabulary_size(policy),
    )


@dataclass(eq=False)
class _Call:
    """One request for a turn, with the future of its completion."""

    order: tuple[int, int, int]
    """Sort key within a batch: draw, sample and turn."""
    request: SamplingRequest
    seat: _Slot
    answer: asyncio.Future[Completion] = field(default_factory=asyncio.Future)


class _Table:
    """Queue of one batch's requests, which are sent at once or, in step, all together."""

    def __init__(self, engine: Engines, *, in_step: bool) -> None:
        self._engines, self._in_step = engine.per_engine(), in_step
        self._tasks: WeakSet[asyncio.Task[Any]] = WeakSet()
        """All tasks of the batch, also those that the user's code created."""
        self._playing: set[asyncio.Task[None]] = set()
        self._asking: set[asyncio.Task[None]] = set()
        self._calls: list[_Call] = []
        """Calls that are not sent yet."""
        self._lost: list[_Call] = []
        """Calls that failed because no engine is left."""
        self._why_lost: NoReplicaLeft | None = None
        self._failure: BaseException | None = None
        self._changed = asyncio.Event()
        self._num_thinking = 0
        """Number of running episodes that do not wait for the policy."""
        self.waited_s = 0.0
        """Seconds in which no call was in flight, because episodes waited for environments."""

    async def until_over(self, seats: Sequence[_Slot] = ()) -> NoReplicaLeft | None:
        """Run until all episodes are over, or no engine is left.

        Args:
            seats: Episodes to start. Empty to continue after a push.

        Returns:
            The error if no engine is left; call this again once there is one. None if all
            episodes are over.
        """
        tasks_of.set(self._tasks)
        self._num_thinking += len(seats)
        # All turns of an episode go to one engine, so that its prefix cache is used.
        for number, seat in enumerate(seats):
            seat.engine = self._engines[number * len(self._engines) // len(seats)]
            self._begin(self._playing, seat.play())
        self._calls, self._lost, self._why_lost = self._calls + self._lost, [], None
        while self._calls or self._num_thinking or self._asking:
            if self._calls and not self._waits():
                await asyncio.sleep(0)  # let tasks that are ready add their calls to this batch
                if not self._waits():
                    self._ask_all()
                continue
            begin, is_idle = time.perf_counter(), not self._asking
            await self._next_change()
            self.waited_s += time.perf_counter() - begin if is_idle else 0.0
        while self._playing and not self._lost:  # episodes that are over may still be closing
            await self._next_change()
        return self._why_lost

    async def ask(self, call: _Call) -> Completion:
        """Queue a call and wait for its completion.

        Raises:
            EpisodeLimit: the episode is over, and the call comes from a task that it left behind.
        """
        if call.seat.is_over:
            raise EpisodeLimit("the episode is over")
        if not call.seat.waiting:
            self._num_thinking -= 1
        call.seat.waiting |= {call}
        self._calls.append(call)
        self._changed.set()
        try:
            return await call.answer
        finally:
            self._waits_no_more(call)

    def leave(self, seat: _Slot) -> None:
        """Mark an episode as over, and cancel its calls."""
        seat.is_over = True
        if not seat.waiting:
            self._num_thinking -= 1
        self._changed.set()
        for call in seat.waiting:
            call.answer.cancel()

    def clear(self) -> None:
        """Cancel all tasks that are left."""
        for task in list(self._tasks):
            task.cancel()

    def _waits(self) -> bool:
        return self._in_step and bool(self._num_thinking or self._asking)

    def _ask_all(self) -> None:
        calls = sorted((c for c in self._calls if not c.answer.done()), key=lambda c: c.order)
        self._calls = []
        if self._in_step and calls:
            self._begin(self._asking, self._ask(calls))
            return
        for call in calls:
            task = self._begin(self._asking, self._ask([call]))
            # Stop sampling if the episode no longer waits for the completion.
            call.answer.add_done_callback(lambda _, task=task: task.cancel())

    async def _ask(self, lot: list[_Call]) -> None:
        try:
            if self._in_step:
                completions = await asyncio.to_thread(self._together, lot)
            else:
                completions = [await each.seat.engine.sample(each.request) for each in lot]
        except NoReplicaLeft as error:
            self._lost, self._why_lost = self._lost + lot, error
            return
        for call, completion in zip(lot, completions, strict=True):
            if not call.answer.done():
                self._waits_no_more(call)
                call.answer.set_result(completion)

    def _together(self, calls: list[_Call]) -> list[Completion]:
        """Sample one batch per engine; return the completions in the order of the calls."""
        lots = [[call for call in calls if call.seat.engine is each] for each in self._engines]
        pending = [
            (lot, engine.generate([call.request for call in lot]))
            for engine, lot in zip(self._engines, lots, strict=True)
            if lot
        ]
        answers = {
            call: completion
            for lot, response in pending
            for call, completion in zip(lot, response.result(), strict=True)
        }
        return [answers[call] for call in calls]

    def _waits_no_more(self, call: _Call) -> None:
        seat = call.seat
        if call in seat.waiting:
            seat.waiting -= {call}
            if not seat.waiting and not seat.is_over:
                self._num_thinking += 1

    def _begin(
        self, where: set[asyncio.Task[None]], work: Coroutine[Any, Any, None]
    ) -> asyncio.Task[None]:
        def ended(task: asyncio.Task[None]) -> None:
            where.discard(task)
            if not task.cancelled():
                self._failure = self._failure or task.exception()
            self._changed.set()

        task = asyncio.create_task(work)
        where.add(task)
        task.add_done_callback(ended)
        return task

    async def _next_change(self) -> None:
        self._changed.clear()
        await self._changed.wait()
        if self._failure is not None:
            raise self._failure


@dataclass(eq=False)
class _Slot:
    """One episode of a batch."""

    episodes: Episodes
    draw: Draw
    sample_index: int
    sampling: Sampling
    table: _Table
    engine: Engines = field(init=False)
    waiting: frozenset[_Call] = frozenset()
    """Calls in flight or queued."""
    is_over: bool = False
    rollouts: list[Rollout] = field(default_factory=list)
    """One rollout for each conversation of the episode, once it is over."""

    async def play(self) -> None:
        """Run the episode. An error of the user's code fails this episode and no other."""
        section, player = self.episodes.section, self.episodes.player
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
        heard.set(policy.hear)
        it, begin = player.begin(), time.perf_counter()
        score, error = await _outcome(player.run(it, self.draw.prompt, policy))
        self.table.leave(self)
        took = time.perf_counter() - begin - policy.asking_s
        _, unclosed = await _outcome(it.close())
        error = error or unclosed
        score = math.nan if score is None or error else score
        episode = Episode(
            score, policy.num_calls, took, error, policy.metrics, tuple(policy.tool_uses)
        )
        # Drop conversations without a sampled token, but keep one row, so that a failed episode
        # has a rollout too.
        told = [row for row in policy.rows if row.mask.any()]
        rows = told or [*policy.rows, Recorded(self.draw.prompt.token_ids)][:1]
        self.rollouts = [self._rollout(policy, episode, *each) for each in enumerate(rows)]

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

    def _decode(self, ids: np.ndarray, with_special: bool = False) -> str:
        ids = without_end(ids, self.sampling.stop_token_ids)
        return self.episodes.tokenizer.decode(ids, skip_special_tokens=not with_special)

    def _rollout(self, policy: Policy, episode: Episode, number: int, row: Recorded) -> Rollout:
        prompt, is_agents = self.draw.prompt, self.episodes.section.agent is not None
        text = self.episodes.tokenizer.decode(row.prompt_ids) if number else policy.prompt
        is_cut_off = policy.is_cut_off or (is_agents and row.is_cut_off)
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
            row=prompt.row,
            episode=episode,
            row_index=number,
            turn_rewards=None if is_agents else row.rewards,
            turn_index=row.turn_index,
        )


async def _outcome(work: Coroutine[Any, Any, T]) -> tuple[T | None, str | None]:
    """Return the result of the user's coroutine, or its error as text."""
    try:
        return await work, None
    except GeneratorExit:
        raise
    except BaseException as failure:  # also from native code: a Rust panic is no Exception
        return None, f"{type(failure).__name__}: {text_of(failure)}"
