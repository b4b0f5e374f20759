"""Schedule the turns of a batch of episodes: each at once, or all in step as one batch.

Concurrency. Everything here runs in the event loop of the episodes, so nothing needs a lock. An
episode that calls the policy awaits the future of its call. With `rollout.turns: continuous`, each
call is sent at once, in a task of its own. With `in_step`, calls are queued until every episode
waits or has ended; then all calls are sampled as one batch, and a thread waits for the engines.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from raypo.rollout.engines import Engines
from raypo.rollout.policy import EpisodeLimit
from raypo.serving.requests import Completion, SamplingRequest


class TurnSampler:
    """Sampler of the turns of one batch of episodes.

    An episode is *thinking* while it neither waits for the policy nor has ended.
    """

    def __init__(self, *, in_step: bool, num_episodes: int) -> None:
        """Start with all episodes thinking. Each episode has one `PolicyCalls`."""
        self.waited_s = 0.0
        """Seconds in which no call was in flight, because episodes waited for environments."""
        self._in_step = in_step
        self._queue: list[_Call] = []
        self._num_thinking = num_episodes
        """Number of episodes that are thinking."""
        self._num_in_flight = 0
        self._tasks: set[asyncio.Task[None]] = set()
        """Tasks that sample. The event loop itself keeps no strong reference."""
        self._failed: asyncio.Future[None] = asyncio.Future()
        """Future of the first error of an engine."""
        self._since = time.perf_counter()

    async def until_over(self, episodes: Sequence[asyncio.Task[Any]]) -> None:
        """Wait until all episodes have ended.

        Raises:
            Exception: an error of an engine.
        """
        if not episodes:
            return
        ending = asyncio.create_task(asyncio.wait(episodes))
        await asyncio.wait({ending, self._failed}, return_when=asyncio.FIRST_COMPLETED)
        ending.cancel()
        if self._failed.done():
            self._failed.result()

    def add(self, call: _Call) -> None:
        """Send a call at once, or with `in_step` queue it until all episodes wait."""
        self._queue.append(call)
        if not self._in_step:
            self._send()

    def count(self, *, thinking: int = 0, in_flight: int = 0) -> None:
        """Change the number of thinking episodes or of calls in flight by the given amounts."""
        now = time.perf_counter()
        if self._num_thinking and not self._num_in_flight:
            self.waited_s += now - self._since
        self._since = now
        self._num_thinking += thinking
        self._num_in_flight += in_flight
        if not self._num_thinking and not self._num_in_flight:
            # Wait two rounds of the loop, so that tasks that are ready add calls to this batch.
            loop = asyncio.get_running_loop()
            loop.call_soon(loop.call_soon, self._all_wait)

    def _all_wait(self) -> None:
        if not self._num_thinking and not self._num_in_flight:
            self._send()

    def _send(self) -> None:
        queue = sorted((c for c in self._queue if not c.answer.done()), key=lambda c: c.order)
        self._queue = []
        for calls in [queue] if self._in_step and queue else [[call] for call in queue]:
            task = asyncio.create_task(self._sample(calls))
            self._tasks.add(task)
            self.count(in_flight=1)
            task.add_done_callback(self._sampled)
            if not self._in_step:  # stop sampling if the episode no longer waits
                calls[0].answer.add_done_callback(lambda _, task=task: task.cancel())

    async def _sample(self, calls: list[_Call]) -> None:
        if self._in_step:
            completions = await asyncio.to_thread(_generate, calls)
        else:
            (call,) = calls
            completions = await asyncio.wrap_future(call.calls.engine.submit([call.request]))
        for call, completion in zip(calls, completions, strict=True):
            if not call.answer.done():
                # Count the episode as thinking from now on, even before its task runs.
                call.calls.end(call)
                call.answer.set_result(completion)

    def _sampled(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not self._failed.done():
            self._failed.set_exception(error)
        self.count(in_flight=-1)


class PolicyCalls:
    """One episode's calls of the policy."""

    def __init__(self, sampler: TurnSampler, engine: Engines) -> None:
        """Store the batch's sampler and the engine. All turns use its prefix cache."""
        self.engine = engine
        self.waited_s = 0.0
        """Seconds in which at least one call was in flight or queued."""
        self._sampler = sampler
        self._pending: set[_Call] = set()
        self._is_over = False
        self._since = 0.0

    async def sample(self, request: SamplingRequest, order: tuple[int, ...]) -> Completion:
        """Sample one turn. Requests of a batch are sorted by `order`.

        Raises:
            EpisodeLimit: the episode has ended. The call comes from a task that it left behind.
        """
        if self._is_over:
            raise EpisodeLimit("the episode is over")
        if not self._pending:
            self._since = time.perf_counter()
            self._sampler.count(thinking=-1)
        call = _Call(order, request, self)
        self._pending.add(call)
        self._sampler.add(call)
        try:
            return await call.answer
        finally:
            self.end(call)

    def end(self, call: _Call) -> None:
        """Mark a call as answered or withdrawn; repeated calls are ignored."""
        if call in self._pending:
            self._pending.discard(call)
            if not self._pending:
                self.waited_s += time.perf_counter() - self._since
                self._sampler.count(thinking=0 if self._is_over else 1)

    def close(self) -> None:
        """End the episode: cancel its calls and refuse new ones."""
        self._is_over = True
        if not self._pending:
            self._sampler.count(thinking=-1)
        for call in self._pending:
            call.answer.cancel()


@dataclass(eq=False)
class _Call:
    order: tuple[int, ...]
    request: SamplingRequest
    calls: PolicyCalls
    answer: asyncio.Future[Completion] = field(default_factory=asyncio.Future)


def _generate(calls: list[_Call]) -> list[Completion]:
    """Sample one batch per engine; return the completions in the order of the calls."""
    batches: dict[int, list[_Call]] = {}
    for call in calls:
        batches.setdefault(id(call.calls.engine), []).append(call)
    pending = [
        (batch, batch[0].calls.engine.generate([call.request for call in batch]))
        for batch in batches.values()
    ]
    completions = {
        call: completion
        for batch, response in pending
        for call, completion in zip(batch, response.result(), strict=True)
    }
    return [completions[call] for call in calls]
