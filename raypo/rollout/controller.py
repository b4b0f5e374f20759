"""The batch of every step: drawn, sampled, scored and filtered by one process for all workers.

Concurrency. The controller's coroutines run on one event loop of the process (`raypo.concurrency`),
which alone touches its state. Sampling and scoring block, so each chunk of prompts has a thread of
its own. The main thread trains; it calls the public methods, and waits for their futures.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from raypo.concurrency import background_future, daemon_future
from raypo.metrics.clock import Clock, Span
from raypo.rollout.collect import samples_of
from raypo.rollout.prompt_source import PromptSource
from raypo.rollout.saved_batches import read_batches, write_batches
from raypo.rollout.step_batch import StepBatch
from raypo.types import Prompt, Rollout

SampleAndScore = Callable[[Sequence[Prompt], Clock], list[Rollout]]
"""Function that samples and scores some prompts. It blocks until all of them are scored."""

BATCHES = "rollouts_ahead.npz"
"""File of a checkpoint with the batches that were sampled ahead."""
T = TypeVar("T")


@dataclass(frozen=True)
class _Chunk:
    """Consecutive draws that are sampled at the same time."""

    first: int
    """Index of the chunk's first draw."""
    until: int
    """Index of the first draw after the chunk."""
    version: int
    """Version of the engines' weights when the chunk was started."""
    clock: Clock
    scored: asyncio.Future[list[Rollout]]


@dataclass(eq=False)
class RolloutController:
    """Source of the batch of each step, in the order of steps.

    Prompts are drawn in order. A step takes the next `prompts_per_step` of them, and one more for
    each group that `ppo.filter` drops. A prompt is drawn only when the engines' weights are new
    enough for the last step that may train it. No trained token is therefore staler than
    `max_staleness`, whatever the timing. Without `is_ahead`, a batch is begun when it is asked for.

    Within that bound, the number of batches in flight adapts to the learner. It grows by one when
    the learner has to wait for a batch. It shrinks by one when both the batch that the learner
    takes and the next batch are complete. A slow response delays its step; it is not replaced by a
    later one. The lengths of trained responses are therefore distributed like all sampled lengths.

    Example: with `max_staleness` 1 and no filter, the prompts of step 3 are drawn under version 1
    at the earliest, that is, while step 2 updates from version 1 to version 2.
    """

    source: PromptSource
    """Source of the prompts. Nothing else draws from it."""
    sample_and_score: SampleAndScore
    new_batch: Callable[[], StepBatch]
    num_steps: int
    prompts_per_step: int
    max_staleness: int = 0
    """Most weight versions between the first token of a response and the update that trains it."""
    is_ahead: bool = False
    """True if batches are sampled while the learner trains."""
    overlaps: bool = False
    """True if several batches may be in flight at the same time, even during pushes."""
    settles: bool = False
    """True if a push waits until the next batch is complete. Results then do not depend on timing,
    and each batch is sampled with one version of the weights."""
    _version: int = -1
    _asked: int = 0
    """The last step that the learner has asked for."""
    _last_step: int = 0
    """The last step whose batch was taken."""
    _filling: int = 0
    """The last step whose batch is being filled or is complete."""
    _front: int = 0
    """Index of the first draw that no step has taken."""
    _depth: int = 0
    """Number of batches that may be in flight ahead of the learner."""
    _chunks: list[_Chunk] = field(default_factory=list)
    """Chunks with draws that no step has taken yet, in order."""
    _batches: dict[int, StepBatch] = field(default_factory=dict)
    """Complete batches that the learner has not taken yet, by step."""
    _begins: dict[int, int] = field(default_factory=dict)
    """Index of the first draw of each batch that is being filled or is complete, by step."""
    _spans: list[Span] = field(default_factory=list)
    """Time spans of sampling and scoring ahead since the last call of `spans`."""
    _error: BaseException | None = None
    """The error that stopped sampling."""
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def begin(self, *, last_step: int) -> None:
        """Start to make the batches of the steps after `last_step`.

        Args:
            last_step: The last completed step. The engines hold its weights.
        """

        async def begin() -> None:
            self._version = self._asked = self._last_step = last_step
            self._filling = last_step + len(self._batches)
            self._front = self.source.drawn
            self._depth = int(self.is_ahead)
            work = [self._fill_steps(), *([self._start_chunks()] if self.overlaps else ())]
            self._tasks = [asyncio.create_task(self._or_stop(loop)) for loop in work]

        _run(begin()).result()

    def take(self, step: int) -> Future[StepBatch]:
        """Return a future of the batch of a step. Steps are taken in order.

        Raises:
            Exception: raised by the future: the error that stopped sampling.
        """
        return _run(self._take(step))

    def settle(self) -> Future[None]:
        """Return a future of the next batch's completion. Without `settles` it is done at once.

        Raises:
            Exception: raised by the future: the error that stopped sampling. `take` would raise it
                too late, because other workers may already wait for this one by then.
        """

        async def settle() -> None:
            following = self._last_step + 1
            if self.settles and following <= self.num_steps:
                await self._until(lambda: following in self._batches)

        return _run(settle())

    def arrived(self, version: int) -> None:
        """Record that the engines now hold this version of the weights."""

        async def arrived() -> None:
            self._version = version
            await self._notify()

        _run(arrived()).result()

    def spans(self) -> list[Span]:
        """Return the time spans of sampling and scoring ahead since the last call.

        The name of each span contains the weight version of its chunk.
        """

        async def spans() -> list[Span]:
            spans, self._spans = self._spans, []
            return spans

        return _run(spans()).result()

    def accounts(self, batch: StepBatch) -> tuple[dict[str, float], dict[str, float]]:
        """Return the counts of samples after a step, and the metrics of the curriculum.

        Args:
            batch: The batch of the step.

        Returns:
            The counts (`PromptSource.counts`) and the metrics (`PromptSource.pass_rates`).
        """

        async def accounts() -> tuple[dict[str, float], dict[str, float]]:
            following = self._begins.get(self._last_step + 1, self._front)
            return self.source.counts(batch), self.source.pass_rates(batch, following)

        return _run(accounts()).result()

    @property
    def num_unused(self) -> int:
        """Number of samples that were asked for ahead and that no step has taken."""
        return self.source.num_carried

    def close(self) -> None:
        """Stop sampling."""

        async def close() -> None:
            for task in self._tasks:
                task.cancel()

        _run(close()).result()

    def save(self, directory: Path) -> dict[str, Any]:
        """Write the complete batches that no step has taken yet, if sampling runs ahead.

        A resumed run samples the incomplete batches again.

        Args:
            directory: Folder of the checkpoint.

        Returns:
            The position of the prompt stream before the first batch that was not taken.
        """

        async def state() -> tuple[dict[int, StepBatch], dict[str, Any], dict[str, Any]]:
            batches: dict[int, StepBatch] = {}
            while (step := self._last_step + 1 + len(batches)) in self._batches:
                batches[step] = self._batches[step]
            num_saved = sum(len(samples_of(batch.scored)) for batch in batches.values())
            return (
                batches,
                {
                    "begins": {step: self._begins[step] for step in batches},
                    "stream": self._position(self._last_step + 1 + len(batches)),
                    "sample_counts": self.source.saved_counts(num_saved),
                },
                self._position(self._last_step + 1),
            )

        batches, further, position = _run(state()).result()
        if self.is_ahead:
            write_batches(directory / BATCHES, batches, further)
        return position

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the position of the prompt stream from a checkpoint's state, before `begin`."""
        self.source.load_state_dict(state)

    def restore(self, directory: Path) -> None:
        """Read the batches that `save` wrote, before `begin`."""
        path = directory / BATCHES
        if not self.is_ahead or not path.exists():  # this run, or the one that wrote it, is sync
            return
        batches, state = read_batches(path, self.source.stream.items)
        self.source.stream.load_state_dict(state["stream"])
        # Earlier versions saved some names with an underscore.
        counts = {name.lstrip("_"): count for name, count in state["sample_counts"].items()}
        self.source.load_counts(**counts)
        self._begins |= {int(step): draw for step, draw in state["begins"].items()}
        self._batches |= batches

    async def _take(self, step: int) -> StepBatch:
        self._asked = step
        if step not in self._batches:
            self._depth = min(self._depth + 1, self.max_staleness + 1) if self.is_ahead else 0
        elif step + 1 in self._batches:
            self._depth = max(self._depth - 1, 1)
        await self._notify()
        await self._until(lambda: step in self._batches)
        batch = self._batches.pop(step)
        self._begins.pop(step, None)
        self._last_step = step
        await self._notify()
        return batch

    async def _or_stop(self, work: Coroutine[Any, Any, None]) -> None:
        """Do some work. Its error stops all other work, and `take` and `settle` raise it."""
        try:
            await work
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self._error = self._error or error
            await self._notify()

    async def _fill_steps(self) -> None:
        for step in range(self._filling + 1, self.num_steps + 1):
            await self._until(partial(self._may_fill, step))
            self._filling, self._begins[step] = step, self._front
            batch = self.new_batch()
            while batch.num_wanted:
                following = self._begun if self.overlaps else self._in_turn
                scored = await following(batch.num_wanted, batch.clock)
                self.source.learn(scored, until=self._front)
                batch.add(scored)
            if self.is_ahead:
                laps = batch.clock.laps.items()
                batch.metrics |= {name.replace("time/", "perf/"): s for name, s in laps}
            self._batches[step] = batch
            await self._notify()

    def _may_fill(self, step: int) -> bool:
        """Return whether the learner needs the step soon and the weights are new enough for it."""
        is_new_enough = self.overlaps or self._version >= step - 1 - self.max_staleness
        return is_new_enough and step <= max(self._asked, self._last_step + self._depth)

    async def _in_turn(self, num_prompts: int, clock: Clock) -> list[Rollout]:
        """Sample and score the next draws now."""
        chunk = self._start(num_prompts)
        self._front = chunk.until
        return await self._finished(chunk, clock)

    async def _begun(self, num_prompts: int, clock: Clock) -> list[Rollout]:
        """Wait for the chunks of the next draws, and return the rollouts of these draws."""
        first, until = self._front, self._front + num_prompts
        self._front = until
        await self._notify()
        await self._until(lambda: self.source.drawn >= until)
        chunks = [chunk for chunk in self._chunks if chunk.first < until]
        scored = [rollout for chunk in chunks for rollout in await self._finished(chunk, clock)]
        self._chunks = [chunk for chunk in self._chunks if chunk.until > until]
        return [rollout for rollout in scored if first <= rollout.group_index < until]

    async def _start_chunks(self) -> None:
        """Start one chunk after the other."""
        while True:
            await self._until(self._may_start)
            self._chunks.append(self._start(self._num_next))
            await self._notify()

    @property
    def _num_next(self) -> int:
        """Number of prompts of the next chunk.

        It is `prompts_per_step`, except in the last step: there it is the number still missing.
        """
        is_last = self._filling == self.num_steps
        return self._front - self.source.drawn if is_last else self.prompts_per_step

    def _may_start(self) -> bool:
        """Return whether a chunk is needed and the weights are new enough for its last step."""
        last = self.source.drawn + self._num_next - 1
        step = self._filling + 1 + (last - self._front) // self.prompts_per_step
        is_due = step <= min(self._last_step + self._depth, self.num_steps)
        is_needed = (is_due or self.source.drawn < self._front) and self._num_next > 0
        return is_needed and self._version >= step - 1 - self.max_staleness

    def _start(self, num_prompts: int) -> _Chunk:
        first, clock = self.source.drawn, Clock()
        prompts = self.source.draw(num_prompts)
        work = daemon_future(partial(self.sample_and_score, prompts, clock), name="raypo-chunk")
        scored = asyncio.wrap_future(work)
        # A chunk may fail after another one has ended the run: nobody asks for its error.
        scored.add_done_callback(lambda done: done.cancelled() or done.exception())
        return _Chunk(first, first + num_prompts, self._version, clock, scored)

    async def _finished(self, chunk: _Chunk, clock: Clock) -> list[Rollout]:
        """Wait for a chunk, and return its rollouts.

        The times of a chunk count for the first step that takes any of its draws.
        """
        scored = await chunk.scored
        if self.is_ahead:
            self._spans += [
                (f"{name.removesuffix('_s')}_v{chunk.version}_s", begin, end)
                for name, begin, end in chunk.clock.spans
            ]
            chunk.clock.spans.clear()
        clock.join(chunk.clock)
        return scored

    async def _until(self, condition: Callable[[], bool]) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self._error is not None or condition())
        if self._error is not None:
            raise self._error

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _position(self, step: int) -> dict[str, Any]:
        """Return the position of the prompt stream before a step's batch."""
        return self.source.position(self._begins.get(step, self._front))


def _run(coroutine: Coroutine[Any, Any, T]) -> Future[T]:
    """Run a coroutine on the controller's event loop."""
    return background_future(coroutine, loop="raypo-rollouts")
