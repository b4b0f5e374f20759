"""Rollouts that background threads sample ahead of the update (`rollout.mode` other than sync).

Concurrency, on each worker:

- The main thread trains: it calls `take` for each step, and `settle` and `arrived` around a push.
- One thread (`_fill_steps`) fills one step after the other. It waits until the weights are new
  enough and the trainer is close enough, then takes rollouts and filters groups.
- If several batches may be in flight (`overlaps`), a second thread (`_start_chunks`) starts chunks
  of prompts in order. Each chunk is sampled and scored in a thread of its own.

All state is guarded by `_changed`. The threads use a process group of their own, because their
collective operations run concurrently with those of the main thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from raypo.collectives import Workers, as_tensor
from raypo.config import PPOConfig
from raypo.metrics.clock import Clock, Span
from raypo.rollout.collect import samples_of
from raypo.rollout.dynamic_sampling import Collected, StepBatch
from raypo.rollout.prompt_source import PromptSource
from raypo.rollout.sample_counts import SampleCounts
from raypo.rollout.saved_batches import read_batches, write_batches
from raypo.types import Prompt, Rollout

SampleAndScore = Callable[[Sequence[Prompt], Clock, Workers], list[Rollout]]
"""Function that samples and scores this worker's prompts. All workers call it together, in the
order of the steps."""


class Closed(Exception):
    """The run has ended. Rollouts that are still being sampled will not be trained."""


@dataclass(frozen=True)
class _Chunk:
    """Consecutive draws that are sampled at the same time."""

    first: int
    """Index of the chunk's first draw."""
    until: int
    """Index of the first draw after the chunk."""
    version: int
    """Version of the engines' weights when the chunk was started."""
    scored: Future[tuple[list[Rollout], Clock]] = field(default_factory=Future)


@dataclass(eq=False)
class AsyncRollouts:
    """Rollouts that threads of each worker sample ahead of the update, in the order of steps.

    Prompts are drawn in order. A step takes the next `prompts_per_step` of them, and one more for
    each group that `ppo.filter` drops. A prompt is drawn only when the engines' weights are new
    enough for the last step that may train it. No trained token is therefore staler than
    `max_staleness`, whatever the timing.

    Within that bound, the number of batches in flight adapts to the learner. It grows by one when
    the learner has to wait for a batch. It shrinks by one when both the batch that the learner
    takes and the next batch are complete. A slow response delays its step; it is not replaced by a
    later one. The lengths of trained responses are therefore distributed like all sampled lengths.

    Example: with `max_staleness` 1 and no filter, the prompts of step 3 are drawn under version 1
    at the earliest, that is, while step 2 updates from version 1 to version 2.
    """

    prompts: PromptSource
    """Source of the prompts. Nothing else draws from it."""
    sample_and_score: SampleAndScore
    new_batch: Callable[[], StepBatch]
    prompts_per_step: int
    max_staleness: int
    """Most weight versions between the first token of a response and the update that trains it."""
    overlaps: bool
    """True if several batches may be in flight at the same time, even during pushes."""
    settles: bool
    """True if a push waits until the next batch is complete. Results then do not depend on timing,
    and each batch is sampled with one version of the weights."""
    num_steps: int
    workers: Workers
    """The workers, in a process group that only the background threads use. The main thread has
    its own group."""
    _version: int = -1
    _last_step: int = 0
    """The last step whose batch was taken."""
    _filling: int = 0
    """The last step whose batch is being filled or is complete."""
    _front: int = 0
    """Index of the first draw that no step has taken."""
    _depth: int = 1
    """Number of batches that may be in flight ahead of the trainer: 1 to `max_staleness` + 1."""
    _chunks: list[_Chunk] = field(default_factory=list)
    """Chunks with draws that no step has taken yet, in order."""
    _batches: dict[int, Future[Collected]] = field(default_factory=dict)
    """Batches that the trainer has not taken yet, by step."""
    _begins: dict[int, int] = field(default_factory=dict)
    """Index of the first draw of each batch that is being filled or is complete, by step."""
    _spans: list[Span] = field(default_factory=list)
    """Time spans of sampling and scoring since the last call of `spans`."""
    _ended: BaseException | None = None
    """The error that stopped sampling, or `Closed`."""
    _changed: threading.Condition = field(default_factory=threading.Condition)
    """Guards all fields above."""

    @classmethod
    def from_config(
        cls,
        config: PPOConfig,
        prompts: PromptSource,
        sample_and_score: SampleAndScore,
        workers: Workers,
    ) -> AsyncRollouts | None:
        """Create the background sampling of a run, or return None if `rollout.mode` is sync.

        All workers call this together.

        Args:
            config: The run's config.
            prompts: Source of the prompts.
            sample_and_score: Function that the background threads call.
            workers: The workers in the process group of the main thread.
        """
        section = config.rollout
        if section.mode == "sync":
            return None
        return cls(
            prompts,
            sample_and_score,
            partial(StepBatch.from_config, config),
            prompts_per_step=section.prompts_per_step,
            max_staleness=section.staleness,
            overlaps=section.has_requests_in_flight,
            settles=section.mode == "one_step_off",
            num_steps=config.num_steps,
            workers=workers.beside(),
        )

    def begin(self, *, last_step: int) -> None:
        """Start to sample for the steps after `last_step`.

        Args:
            last_step: The last completed step. The engines hold its weights.
        """
        self._version = self._last_step = last_step
        self._filling = last_step + len(self._batches)
        self._front = self._drawn
        for step in range(self._filling + 1, self.num_steps + 1):
            self._batches[step] = Future()
        threads = (self._fill_steps, self._start_chunks) if self.overlaps else (self._fill_steps,)
        for each in threads:
            threading.Thread(target=self._or_end, args=(each,), daemon=True).start()

    def take(self, step: int, clock: Clock) -> Collected:
        """Wait for this worker's share of a step's rollouts, and return it.

        Raises:
            Exception: the error that stopped sampling.
        """
        with self._changed:
            batch, following = self._batches[step], self._batches.get(step + 1)
            if not batch.done():
                self._depth = min(self._depth + 1, self.max_staleness + 1)
                self._changed.notify_all()
            elif following and following.done():
                self._depth = max(self._depth - 1, 1)
        collected = batch.result()
        with self._changed:
            del self._batches[step]
            self._begins.pop(step, None)
            self._last_step = step
            self._changed.notify_all()
        clock.lap("time/wait_for_rollouts_s")
        return collected

    def settle(self) -> dict[str, float]:
        """Wait until the next batch is complete, if `settles`.

        The main thread calls this before a push.

        Returns:
            The seconds that it waited, as the metric `perf/wait_for_engines_s`.

        Raises:
            Exception: the error that stopped sampling. `take` would raise it too late, because
                other workers may already wait for this one by then.
        """
        began = time.perf_counter()
        if self.settles and (following := self._batches.get(self._last_step + 1)):
            following.result()
        return {"perf/wait_for_engines_s": time.perf_counter() - began}

    def arrived(self, version: int) -> None:
        """Record that the engines now hold this version of the weights."""
        with self._changed:
            self._version = version
            self._changed.notify_all()

    def spans(self) -> list[Span]:
        """Return the time spans of sampling and scoring since the last call.

        The name of each span contains the weight version of its chunk.
        """
        with self._changed:
            spans, self._spans = self._spans, []
        return spans

    def counts(self, batch: Collected) -> tuple[int, int, int]:
        """Count the samples of a step's batch and reset the counts (`SampleCounts.of_step`)."""
        with self._changed:
            return self.prompts.counts(batch)

    def pass_rates(self, batch: Collected, workers: Workers) -> dict[str, float]:
        """Merge old outcomes in the curriculum, and return its metrics after a step.

        Args:
            batch: This worker's rollouts of the step.
            workers: Process group of the main thread. All workers call this together.
        """
        with self._changed:
            rates = self.prompts.settled(self._begins.get(self._last_step + 1, self._front))
        return rates | self.prompts.step_pass_rate(batch, workers)

    def tell_unused(self, tell: Callable[[str], None], workers: Workers) -> None:
        """Report the number of samples requested ahead that are not trained, unless it is 0."""
        if left := workers.sum(as_tensor(self.prompts.sample_counts.carried)):
            tell(f"{int(left)} samples were asked for ahead and are not trained")

    def close(self) -> None:
        """Stop sampling."""
        self._end(Closed())

    def save(self, directory: Path, workers: Workers) -> None:
        """Write the complete batches that no step has taken yet.

        A resumed run samples the incomplete batches again.

        Args:
            directory: Folder of the checkpoint.
            workers: Process group of the main thread. All workers call this together.
        """
        with self._changed:  # no batch may start before the state is collected
            whole = [step for step, batch in self._batches.items() if _is_complete(batch)]
            first = self._last_step + 1
            following = first + min(workers.gather(len(whole)))
            kept = {step: self._batches[step].result() for step in range(first, following)}
            counts = self.prompts.sample_counts
            num_kept = sum(len(samples_of(each.scored)) for each in kept.values())
            state = {
                "begins": {step: self._begins[step] for step in kept},
                "stream": self._before(following),
                "sample_counts": asdict(replace(counts, lost=counts.carried - num_kept)),
            }
        write_batches(_file(directory, workers.rank), kept, state)

    def position(self) -> dict[str, Any]:
        """Return the position of the prompt stream before the first batch that was not taken."""
        with self._changed:
            return self._before(self._last_step + 1)

    def load_state_dict(self, state: Mapping[str, Any], workers: Workers) -> None:
        """Restore the position of the prompt stream from a checkpoint's state."""
        self.prompts.load_state_dict(state, workers)

    def restore(self, directory: Path, workers: Workers) -> None:
        """Read the file that `save` wrote, before `begin`."""
        if not (path := _file(directory, workers.rank)).exists():
            return  # a run with mode sync wrote the checkpoint
        batches, state = read_batches(path, self.prompts.stream.items)
        self.prompts.stream.load_state_dict(state["stream"])
        self.prompts.sample_counts = SampleCounts(**state["sample_counts"])
        self._begins |= {int(step): draw for step, draw in state["begins"].items()}
        for step, collected in batches.items():
            self._batches[step] = Future()
            self._batches[step].set_result(collected)

    def _fill_steps(self) -> None:
        for step in range(self._filling + 1, self.num_steps + 1):
            with self._changed:
                self._wait_for(lambda step=step: self._may_fill(step))
                self._filling, self._begins[step] = step, self._front
            laps: dict[str, float] = {}
            next_ones = self._next_begun if self.overlaps else self._next_in_turn
            filling = self.new_batch()
            while filling.num_wanted:
                scored = next_ones(filling.num_wanted, laps)
                outcomes = self.prompts.outcomes(scored, self.workers)
                with self._changed:
                    self.prompts.learn(outcomes, until=self._front)
                filling.add(scored, self.workers)
            collected = filling.collected(self.workers)
            collected.metrics.update(laps)
            with self._changed:
                self._batches[step].set_result(collected)
                self._changed.notify_all()

    def _may_fill(self, step: int) -> bool:
        """Return whether the trainer needs the step soon and the weights are new enough for it."""
        is_new_enough = self.overlaps or self._version >= step - 1 - self.max_staleness
        return is_new_enough and step <= self._last_step + self._depth

    def _next_in_turn(self, num_prompts: int, laps: dict[str, float]) -> list[Rollout]:
        """Sample the next draws now; return this worker's rollouts."""
        with self._changed:
            chunk, prompts = self._draw(num_prompts)
            self._front = chunk.until
        self._score(chunk, prompts)
        return self._finished(chunk, laps)

    def _next_begun(self, num_prompts: int, laps: dict[str, float]) -> list[Rollout]:
        """Wait for the chunks that sample the next draws; return this worker's rollouts."""
        with self._changed:
            first, until = self._front, self._front + num_prompts
            self._front = until
            self._changed.notify_all()
            self._wait_for(lambda: self._drawn >= until)
            chunks = [each for each in self._chunks if each.first < until]
        scored = [one for each in chunks for one in self._finished(each, laps)]
        with self._changed:
            self._chunks = [each for each in self._chunks if each.until > until]
        return [each for each in scored if first <= each.group_index < until]

    def _start_chunks(self) -> None:
        """Start one chunk after the other. All workers start the same chunks."""
        while True:
            with self._changed:
                self._wait_for(self._may_start)
                chunk, prompts = self._draw(self._num_next)
                self._chunks.append(chunk)
                self._changed.notify_all()
            threading.Thread(target=self._score, args=(chunk, prompts), daemon=True).start()

    @property
    def _num_next(self) -> int:
        """Number of prompts of the next chunk.

        It is `prompts_per_step`, except in the last step: there it is the number still missing.
        """
        is_last = self._filling == self.num_steps
        return self._front - self._drawn if is_last else self.prompts_per_step

    def _may_start(self) -> bool:
        """Return whether a chunk is needed and the weights are new enough for its last step."""
        last = self._drawn + self._num_next - 1
        step = self._filling + 1 + (last - self._front) // self.prompts_per_step
        is_due = step <= min(self._last_step + self._depth, self.num_steps)
        is_needed = (is_due or self._drawn < self._front) and self._num_next > 0
        return is_needed and self._version >= step - 1 - self.max_staleness

    def _draw(self, num_prompts: int) -> tuple[_Chunk, Sequence[Prompt]]:
        chunk = _Chunk(self._drawn, self._drawn + num_prompts, self._version)
        return chunk, self.prompts.draw(num_prompts, self.workers)

    def _score(self, chunk: _Chunk, prompts: Sequence[Prompt]) -> None:
        clock = Clock()
        try:
            chunk.scored.set_result((self.sample_and_score(prompts, clock, self.workers), clock))
        except BaseException as error:  # raised in the thread that fills the step
            chunk.scored.set_exception(error)

    def _finished(self, chunk: _Chunk, laps: dict[str, float]) -> list[Rollout]:
        """Wait for a chunk, and return its rollouts.

        The times of a chunk count for the first step that takes any of its draws.
        """
        scored, clock = chunk.scored.result()
        for name, seconds in clock.laps.items():
            name = name.replace("time/", "perf/")
            laps[name] = laps.get(name, 0.0) + seconds
        clock.laps.clear()
        with self._changed:
            for name, begin, end in clock.spans:
                named = f"{name.removesuffix('_s')}_v{chunk.version}_s"
                self._spans.append((named, begin, end))
            clock.spans.clear()
        return scored

    def _or_end(self, work: Callable[[], None]) -> None:
        """Run a thread's work. An error stops the other threads, and `take` raises it."""
        try:
            work()
        except BaseException as error:
            self._end(error)

    def _end(self, error: BaseException) -> None:
        with self._changed:
            self._ended = self._ended or error
            for batch in self._batches.values():
                if not batch.done():
                    batch.set_exception(self._ended)
            self._changed.notify_all()

    def _wait_for(self, condition: Callable[[], bool]) -> None:
        self._changed.wait_for(lambda: self._ended is not None or condition())
        if self._ended is not None:
            raise self._ended

    @property
    def _drawn(self) -> int:
        """Index of the next draw."""
        return self.prompts.drawn

    def _before(self, step: int) -> dict[str, Any]:
        """Return the position of the prompt stream before a step's batch."""
        return self.prompts.position(self._begins.get(step, self._front))


def _is_complete(batch: Future[Collected]) -> bool:
    return batch.done() and batch.exception() is None


def _file(directory: Path, rank: int) -> Path:
    return directory / f"rollouts_ahead_{rank}.npz"
