"""Step 4 beside the others: rollouts of the next steps are collected while the learner updates."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from raypo.collectives import Workers
from raypo.metrics.clock import Clock, Span
from raypo.rollout.refill import Collected

Collect = Callable[[Clock, Workers], Collected]
"""Collects this worker's share of the next step's rollouts; all workers call it together."""


class Resumable(Protocol):
    """What rollouts are drawn from."""

    def state_dict(self) -> dict[str, Any]:
        """Its position."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on at a position."""
        ...


class Closed(Exception):
    """The run has ended, and nobody will train what is still collected."""


class Rollouts(Protocol):
    """Where a step's rollouts come from."""

    def take(self, step: int, clock: Clock) -> Collected:
        """This worker's share of them; all workers call it together."""
        ...


@dataclass(frozen=True)
class RolloutsInTurn:
    """Collected when they are asked for: `rollout.mode: sync`."""

    collect: Collect
    workers: Workers

    def take(self, step: int, clock: Clock) -> Collected:
        """See `Rollouts`."""
        return self.collect(clock, self.workers)


@dataclass(eq=False)
class RolloutsAhead:
    """Rollouts of the next steps, collected in order by a thread of each worker.

    The batch of step k is begun when the engines hold weights of version k - 1 - max_staleness or
    later, and its update starts from version k - 1. So no token that is trained is staler than
    that, whatever takes how long. Batches stay whole and in the order of the prompt stream: a slow
    answer is waited for and not overtaken, so what is trained has the lengths of what is sampled.

    Example: with `max_staleness` 1, the batch of step 3 is sampled under version 1 at the earliest,
    that is, while step 2 updates from version 1 to version 2.
    """

    stream: Resumable
    """What is drawn from; nobody else does."""
    max_staleness: int
    """Weight versions between the first token of a batch and the update that trains it."""
    settles: bool
    """Before each push, wait for the next batch as a whole: then a run does not depend on timing,
    and each batch is of one version."""
    num_steps: int
    workers: Workers
    """A process group that nobody else uses: collecting runs beside the main thread."""
    _version: int = -1
    _last_step: int = 0
    """The last step whose batch was taken."""
    _batches: dict[int, Future[Collected]] = field(default_factory=dict)
    """By step, those that were not taken yet."""
    _before: dict[int, dict[str, Any]] = field(default_factory=dict)
    """By step, where the stream stood before its batch."""
    _spans: list[Span] = field(default_factory=list)
    """Of what was collected since the last look."""
    _pausing: bool = False
    _sampling: bool = False
    _closed: bool = False
    _changed: threading.Condition = field(default_factory=threading.Condition)
    """Guards everything above."""

    def begin(self, collect: Collect, *, version: int, last_step: int) -> None:
        """Start to collect for the steps after `last_step`; the engines hold this version."""
        self._version, self._last_step = version, last_step
        first = last_step + 1 + len(self._batches)
        for step in range(first, self.num_steps + 1):
            self._batches[step] = Future()
        threading.Thread(target=self._run, args=(collect, first), daemon=True).start()

    def take(self, step: int, clock: Clock) -> Collected:
        """This worker's share of a step's rollouts, as soon as it is whole.

        Raises:
            Exception: whatever ended the collecting.
        """
        with self._changed:
            batch = self._batches[step]
        collected = batch.result()
        with self._changed:
            del self._batches[step]
            self._before.pop(step, None)
            self._last_step = step
        clock.lap("time/wait_for_rollouts_s")
        return collected

    @contextmanager
    def round(self, clock: Clock) -> Iterator[None]:
        """In the thread that collects: draw, sample and judge; waits while `paused`."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or not self._pausing)
            if self._closed:
                raise Closed
            self._sampling = True
        clock.lap("perf/engine_idle_s")
        try:
            yield
        finally:
            with self._changed:
                self._sampling = False
                self._changed.notify_all()

    @contextmanager
    def paused(self) -> Iterator[float]:
        """In the main thread: nobody samples meanwhile; what is being sampled is waited for.

        Yields:
            Seconds that this took.

        Raises:
            Exception: whatever ended the collecting. It is not kept for `take`: other workers may
                wait for this one by then.
        """
        started = time.perf_counter()
        if self.settles and (following := self._batches.get(self._last_step + 1)):
            following.result()
        with self._changed:
            self._pausing = True
            self._changed.wait_for(lambda: not self._sampling)
        try:
            yield time.perf_counter() - started
        finally:
            with self._changed:
                self._pausing = False
                self._changed.notify_all()

    def spans(self) -> list[Span]:
        """What the collecting did since it was last asked."""
        with self._changed:
            spans, self._spans = self._spans, []
        return spans

    def arrived(self, version: int) -> None:
        """The engines hold a new version."""
        with self._changed:
            self._version = version
            self._changed.notify_all()

    def close(self) -> None:
        """Collect no more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def save(self, directory: Path, workers: Workers) -> None:
        """Write the whole batches that were not trained yet; the others are sampled again.

        Args:
            workers: Of the main thread; all call it together.
        """
        with self._changed:  # so no batch is begun meanwhile
            whole = [step for step, batch in self._batches.items() if _is_whole(batch)]
            first = self._last_step + 1
            following = first + min(workers.gather(len(whole)))
            state = {
                "batches": {step: self._batches[step].result() for step in range(first, following)},
                "before": {step: self._before[step] for step in range(first, following)},
                "stream": self._before.get(following, self.stream.state_dict()),
            }
        with _file(directory, workers.rank).open("wb") as file:
            pickle.dump(state, file)

    def position(self) -> dict[str, Any]:
        """Where the stream stood before the first batch that was not trained."""
        with self._changed:
            return self._before.get(self._last_step + 1, self.stream.state_dict())

    def restore(self, directory: Path, workers: Workers) -> None:
        """Read what `save` wrote, before `begin`."""
        if not (path := _file(directory, workers.rank)).exists():
            return  # of a run that collected in turn
        with path.open("rb") as file:
            state = pickle.load(file)
        self.stream.load_state_dict(state["stream"])
        self._before |= state["before"]
        for step, collected in state["batches"].items():
            self._batches[step] = Future()
            self._batches[step].set_result(collected)

    def _run(self, collect: Collect, first: int) -> None:
        for step in range(first, self.num_steps + 1):
            batch, clock = self._batches[step], Clock()
            try:
                self._admit(step)
                collected = collect(clock, self.workers)
            except BaseException as error:  # the main thread tells it
                for each in range(step, self.num_steps + 1):
                    self._batches[each].set_exception(error)
                return
            laps = {name.replace("time/", "perf/"): s for name, s in clock.laps.items()}
            collected.figures.update(laps)
            with self._changed:
                self._spans += clock.spans
            batch.set_result(collected)

    def _admit(self, step: int) -> None:
        """Wait until the engines' weights are new enough for a step's batch."""
        with self._changed:
            oldest = step - 1 - self.max_staleness
            self._changed.wait_for(lambda: self._closed or self._version >= oldest)
            if self._closed:
                raise Closed
            self._before[step] = self.stream.state_dict()


def _is_whole(batch: Future[Collected]) -> bool:
    return batch.done() and batch.exception() is None


def _file(directory: Path, rank: int) -> Path:
    return directory / f"rollouts_ahead_{rank}.pkl"
