"""Where the rollouts of the steps come from: in turn with the updates, or ahead of them."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from raypo.collectives import Workers
from raypo.data.stream import Draw, ShuffledStream
from raypo.metrics.clock import Clock, Span
from raypo.rollout.accounts import Ledger
from raypo.rollout.collect import next_draws, samples_of
from raypo.rollout.refill import Collected
from raypo.types import Prompt, ScoredRollout

Scored = Callable[[Sequence[Draw], Clock, Workers], list[ScoredRollout]]
"""Samples and judges this worker's draws; where rollouts are collected in order, all workers call
it together."""
Fill = Callable[[Callable[[int], list[ScoredRollout]], Workers], Collected]
"""Fills a step; all workers call it together. It is given what draws so many prompts over all
workers, and returns this worker's rollouts of them."""


class Closed(Exception):
    """The run has ended, and nobody will train what is still collected."""


@dataclass
class RolloutsInTurn:
    """Collected when they are asked for: `rollout.mode: sync`."""

    stream: ShuffledStream[Prompt]
    samples_per_prompt: int
    workers: Workers
    ledger: Ledger = field(default_factory=Ledger)
    _scored: Scored = field(init=False)
    _fill: Fill = field(init=False)

    def begin(self, scored: Scored, fill: Fill, *, last_step: int) -> None:
        """Know what samples and judges, and what fills a step."""
        self._scored, self._fill = scored, fill

    def take(self, step: int, clock: Clock) -> Collected:
        """This worker's share of a step's rollouts; all workers call it together."""

        def next_ones(num_prompts: int) -> list[ScoredRollout]:
            draws = next_draws(self.stream, num_prompts, self.workers)
            self.ledger.ask(len(draws) * self.samples_per_prompt)
            return self._scored(draws, clock, self.workers)

        collected = self._fill(next_ones, self.workers)
        self.ledger.take(collected)
        return collected

    def counts(self) -> tuple[int, int, int]:
        """See `Ledger.counts`."""
        return self.ledger.counts()

    def position(self) -> dict[str, Any]:
        """Where the stream stands."""
        return self.stream.state_dict()


@dataclass(frozen=True)
class _Chunk:
    """Prompts whose responses are sampled at the same time."""

    first: int
    """Number of its first draw."""
    until: int
    """Number of the first draw after it."""
    version: int
    """Of the weights that it was begun under."""
    scored: Future[tuple[list[ScoredRollout], Clock]] = field(default_factory=Future)


@dataclass(eq=False)
class RolloutsAhead:
    """Rollouts of the next steps, collected in order by threads of each worker.

    Prompts are drawn in order, and a step takes the next of them: as many as it has prompts, and
    for each group that `ppo.filter` leaves out one more. A prompt is only drawn when the engines'
    weights are new enough for the last step that may come to take it. So no token that is trained
    is staler than `max_staleness`, whatever takes how long and however often weights come while it
    is sampled. Within that bound no more is begun than the learner needs: a batch more than
    before when it has to wait for one, one less when the batch after next is whole already. A slow
    answer is waited for and not overtaken, so what is trained has the lengths of what is sampled.

    Example: with `max_staleness` 1 and no filter, the prompts of step 3 are drawn under version 1
    at the earliest, that is, while step 2 updates from version 1 to version 2.
    """

    stream: ShuffledStream[Prompt]
    """What is drawn from; nobody else does."""
    prompts_per_step: int
    samples_per_prompt: int
    max_staleness: int
    """Weight versions between the first token of a response and the update that trains it."""
    overlaps: bool
    """Several batches may be sampled at the same time, over pushes."""
    settles: bool
    """Before each push, wait for the next batch as a whole: then a run does not depend on timing,
    and each batch is of one version."""
    num_steps: int
    workers: Workers
    """A process group that nobody else uses: collecting runs beside the main thread."""
    ledger: Ledger = field(default_factory=Ledger)
    _scored: Scored = field(init=False)
    _fill: Fill = field(init=False)
    _version: int = -1
    _last_step: int = 0
    """The last step whose batch was taken."""
    _filling: int = 0
    """The last step whose batch takes prompts, or has taken them."""
    _front: int = 0
    """Number of the first draw that no step has taken."""
    _depth: int = 1
    """Batches after the last that was taken that are begun, as many as the bound admits."""
    _chunks: list[_Chunk] = field(default_factory=list)
    """In their order, those that were not taken as a whole."""
    _batches: dict[int, Future[Collected]] = field(default_factory=dict)
    """By step, those that were not taken yet."""
    _begins: dict[int, int] = field(default_factory=dict)
    """By step, the number of its first draw, of those that take prompts or are whole."""
    _spans: list[Span] = field(default_factory=list)
    """Of what was collected since the last look."""
    _ended: BaseException | None = None
    """Why nothing is begun any more."""
    _changed: threading.Condition = field(default_factory=threading.Condition)
    """Guards everything above."""

    def begin(self, scored: Scored, fill: Fill, *, last_step: int) -> None:
        """Start to collect for the steps after `last_step`, whose weights the engines hold."""
        self._scored, self._fill = scored, fill
        self._version = self._last_step = last_step
        self._filling = last_step + len(self._batches)
        self._front = self._drawn
        for step in range(self._filling + 1, self.num_steps + 1):
            self._batches[step] = Future()
        threads = (self._fill_steps, self._begin_chunks) if self.overlaps else (self._fill_steps,)
        for each in threads:
            threading.Thread(target=self._or_end, args=(each,), daemon=True).start()

    def take(self, step: int, clock: Clock) -> Collected:
        """This worker's share of a step's rollouts, as soon as it is whole.

        Raises:
            Exception: whatever ended the collecting.
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
            self.ledger.take(collected)
            self._last_step = step
            self._changed.notify_all()
        clock.lap("time/wait_for_rollouts_s")
        return collected

    def settle(self) -> None:
        """In the main thread, before a push: wait for the next batch, where that is meant.

        Raises:
            Exception: what ended the collecting. It is not kept for `take`: other workers may
                wait for this one by then.
        """
        if self.settles and (following := self._batches.get(self._last_step + 1)):
            following.result()

    def arrived(self, version: int) -> None:
        """The engines hold a new version."""
        with self._changed:
            self._version = version
            self._changed.notify_all()

    def spans(self) -> list[Span]:
        """What the collecting did since it was last asked; their names say the first version."""
        with self._changed:
            spans, self._spans = self._spans, []
        return spans

    def counts(self) -> tuple[int, int, int]:
        """See `Ledger.counts`."""
        with self._changed:
            return self.ledger.counts()

    def close(self) -> None:
        """Collect no more."""
        self._end(Closed())

    def save(self, directory: Path, workers: Workers) -> None:
        """Write the whole batches that were not trained yet; the others are sampled again.

        Args:
            workers: Of the main thread; all call it together.
        """
        with self._changed:  # so nothing is begun meanwhile
            whole = [step for step, batch in self._batches.items() if _is_whole(batch)]
            first = self._last_step + 1
            following = first + min(workers.gather(len(whole)))
            kept = {step: self._batches[step].result() for step in range(first, following)}
            num_kept = sum(len(samples_of(each.scored)) for each in kept.values())
            state = {
                "batches": kept,
                "begins": {step: self._begins[step] for step in kept},
                "stream": self._before(following),
                "ledger": replace(self.ledger, lost=self.ledger.carried - num_kept),
            }
        with _file(directory, workers.rank).open("wb") as file:
            pickle.dump(state, file)

    def position(self) -> dict[str, Any]:
        """Where the stream stood before the first batch that was not trained."""
        with self._changed:
            return self._before(self._last_step + 1)

    def restore(self, directory: Path, workers: Workers) -> None:
        """Read what `save` wrote, before `begin`."""
        if not (path := _file(directory, workers.rank)).exists():
            return  # of a run that collected in turn
        with path.open("rb") as file:
            state = pickle.load(file)
        self.stream.load_state_dict(state["stream"])
        self.ledger = state["ledger"]
        self._begins |= state["begins"]
        for step, collected in state["batches"].items():
            self._batches[step] = Future()
            self._batches[step].set_result(collected)

    def _fill_steps(self) -> None:
        for step in range(self._filling + 1, self.num_steps + 1):
            with self._changed:
                self._wait_for(lambda step=step: self._may_fill(step))
                self._filling, self._begins[step] = step, self._front
            laps: dict[str, float] = {}
            next_ones = self._next_begun if self.overlaps else self._next_in_turn
            collected = self._fill(partial(next_ones, laps=laps), self.workers)
            collected.metrics.update(laps)
            with self._changed:
                self._batches[step].set_result(collected)
                self._changed.notify_all()

    def _may_fill(self, step: int) -> bool:
        """The learner needs it; where it is sampled in turn, its weights have come."""
        is_new_enough = self.overlaps or self._version >= step - 1 - self.max_staleness
        return is_new_enough and step <= self._last_step + self._depth

    def _next_in_turn(self, num_prompts: int, laps: dict[str, float]) -> list[ScoredRollout]:
        """This worker's rollouts of the next draws, sampled now."""
        with self._changed:
            chunk, draws = self._draw(num_prompts)
            self._front = chunk.until
        self._score(chunk, draws)
        return self._finished(chunk, laps)

    def _next_begun(self, num_prompts: int, laps: dict[str, float]) -> list[ScoredRollout]:
        """This worker's rollouts of the next draws, which may be the first of a later step's."""
        with self._changed:
            first, until = self._front, self._front + num_prompts
            self._front = until
            self._changed.notify_all()
            self._wait_for(lambda: self._drawn >= until)
            chunks = [each for each in self._chunks if each.first < until]
        scored = [one for each in chunks for one in self._finished(each, laps)]
        with self._changed:
            self._chunks = [each for each in self._chunks if each.until > until]
        return [each for each in scored if first <= each.rollout.group_index < until]

    def _begin_chunks(self) -> None:
        """Chunk after chunk, on all workers the same."""
        while True:
            with self._changed:
                self._wait_for(self._may_begin)
                chunk, draws = self._draw(self._num_next)
                self._chunks.append(chunk)
                self._changed.notify_all()
            threading.Thread(target=self._score, args=(chunk, draws), daemon=True).start()

    @property
    def _num_next(self) -> int:
        """Prompts of the next chunk: as many as a step has, and for the last step what it lacks."""
        is_last = self._filling == self.num_steps
        return self._front - self._drawn if is_last else self.prompts_per_step

    def _may_begin(self) -> bool:
        """It is needed, and the engines' weights are new enough for whatever step may take it."""
        last = self._drawn + self._num_next - 1
        step = self._filling + 1 + (last - self._front) // self.prompts_per_step
        is_due = step <= min(self._last_step + self._depth, self.num_steps)
        is_needed = (is_due or self._drawn < self._front) and self._num_next > 0
        return is_needed and self._version >= step - 1 - self.max_staleness

    def _draw(self, num_prompts: int) -> tuple[_Chunk, Sequence[Draw]]:
        chunk = _Chunk(self._drawn, self._drawn + num_prompts, self._version)
        draws = next_draws(self.stream, num_prompts, self.workers)
        self.ledger.ask(len(draws) * self.samples_per_prompt)
        return chunk, draws

    def _score(self, chunk: _Chunk, draws: Sequence[Draw]) -> None:
        clock = Clock()
        try:
            chunk.scored.set_result((self._scored(draws, clock, self.workers), clock))
        except BaseException as error:  # whoever fills the step tells it
            chunk.scored.set_exception(error)

    def _finished(self, chunk: _Chunk, laps: dict[str, float]) -> list[ScoredRollout]:
        """Wait for a chunk; its laps are those of the first step that takes some of it."""
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
        """What ends one of the threads ends the others, and the step that waits for them."""
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
        """Number of the next draw."""
        return self.stream.state_dict()["position"]

    def _before(self, step: int) -> dict[str, Any]:
        """Where the stream stood before a step's batch: the next one's, or one that is there."""
        return self.stream.state_dict() | {"position": self._begins.get(step, self._front)}


def _is_whole(batch: Future[Collected]) -> bool:
    return batch.done() and batch.exception() is None


def _file(directory: Path, rank: int) -> Path:
    return directory / f"rollouts_ahead_{rank}.pkl"
