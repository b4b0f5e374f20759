"""Step 4 beside the others: rollouts of the next steps are collected while the learner updates."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from raypo.collectives import Workers
from raypo.data.stream import Draw, PromptStream
from raypo.metrics.clock import Clock, Span
from raypo.rollout.collect import samples_of
from raypo.rollout.refill import Collected
from raypo.types import Rollout

Sample = Callable[[Sequence[Draw]], list[Rollout]]
"""This worker's rollouts of draws."""
Collect = Callable[[Callable[[int], list[Rollout]], Clock, Workers], Collected]
"""Collects this worker's share of a step's rollouts; all workers call it together. It is given what
draws so many prompts over all workers and samples this worker's share."""


class Closed(Exception):
    """The run has ended, and nobody will train what is still collected."""


@dataclass(frozen=True)
class RolloutsInTurn:
    """Collected when they are asked for: `rollout.mode: sync`."""

    sample: Sample
    collect: Collect
    stream: PromptStream
    workers: Workers

    def take(self, step: int, clock: Clock) -> Collected:
        """This worker's share of a step's rollouts; all workers call it together."""
        return self.collect(self._sampled, clock, self.workers)

    def _sampled(self, num_prompts: int) -> list[Rollout]:
        return self.sample(_share(self.stream.take(num_prompts), self.workers))


@dataclass(frozen=True)
class _Begun:
    """A batch whose first prompts were drawn."""

    num_samples: int
    """Of this worker, in its first round."""
    rollouts: Future[tuple[list[Rollout], Span]]


@dataclass(eq=False)
class RolloutsAhead:
    """Rollouts of the next steps, collected in order by threads of each worker.

    The batch of step k is begun when the engines hold weights of version k - 1 - max_staleness or
    later, and its update starts from version k - 1. So no token that is trained is staler than
    that, whatever takes how long and however often weights come while it is sampled. Within that
    bound no more is begun than the learner needs: one batch more than before when it has to wait
    for one, one less when the batch after next is whole already. What was begun is sampled at the
    same time; batches stay whole and in the order of the prompt stream: a slow answer is waited for
    and not overtaken, so what is trained has the lengths of what is sampled.

    Example: with `max_staleness` 1, the batch of step 3 is begun under version 1 at the earliest,
    that is, while step 2 updates from version 1 to version 2.
    """

    stream: PromptStream
    """What is drawn from; nobody else does."""
    prompts_per_step: int
    samples_per_prompt: int
    max_staleness: int
    """Weight versions between the first token of a batch and the update that trains it."""
    settles: bool
    """Before each push, wait for the next batch as a whole: then a run does not depend on timing,
    and each batch is of one version."""
    is_refilled: bool
    """A batch may draw further prompts: then it does so before the next one draws its own."""
    num_steps: int
    workers: Workers
    """A process group that nobody else uses: collecting runs beside the main thread."""
    _version: int = -1
    _last_step: int = 0
    """The last step whose batch was taken."""
    _depth: int = 1
    """Batches after it that are begun, as many as the bound admits or fewer."""
    _begun: dict[int, _Begun] = field(default_factory=dict)
    """By step, those that were not taken yet."""
    _batches: dict[int, Future[Collected]] = field(default_factory=dict)
    """By step, those that were not taken yet."""
    _before: dict[int, dict[str, Any]] = field(default_factory=dict)
    """By step, where the stream stood before its batch."""
    _spans: list[Span] = field(default_factory=list)
    """Of what was collected since the last look."""
    _again: int = 0
    """Samples of this worker that were under way at a checkpoint, and are asked for once more."""
    _closed: bool = False
    _failed: BaseException | None = None
    """What ended the beginning of batches."""
    _changed: threading.Condition = field(default_factory=threading.Condition)
    """Guards everything above."""

    def begin(self, sample: Sample, collect: Collect, *, last_step: int) -> None:
        """Start to collect for the steps after `last_step`, whose weights the engines hold."""
        self._version = self._last_step = last_step
        first = last_step + 1 + len(self._batches)
        for step in range(first, self.num_steps + 1):
            self._batches[step] = Future()
        threading.Thread(target=self._begin_all, args=(sample, first), daemon=True).start()
        collects = threading.Thread(
            target=self._collect_each, args=(sample, collect, first), daemon=True
        )
        collects.start()

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
            self._before.pop(step, None)
            self._begun.pop(step, None)
            self._last_step = step
            self._changed.notify_all()
        clock.lap("time/wait_for_rollouts_s")
        return collected

    def settle(self) -> None:
        """In the main thread, before a push: wait for the next batch, where that is meant.

        Raises:
            Exception: whatever ended the collecting. It is not kept for `take`: other workers may
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
        """What the collecting did since it was last asked."""
        with self._changed:
            spans, self._spans = self._spans, []
        return spans

    def close(self) -> None:
        """Collect no more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def carried(self) -> tuple[int, int]:
        """This worker's samples that were asked for and not trained yet, and those asked again."""
        with self._changed:
            done = [batch.result() for batch in self._batches.values() if _is_whole(batch)]
            whole = sum(len(samples_of(each.scored)) for each in done)
            begun = self._begun.items()
            under_way = sum(
                each.num_samples for step, each in begun if not _is_whole(self._batches[step])
            )
            again, self._again = self._again, 0
        return whole + under_way, again

    def save(self, directory: Path, workers: Workers) -> None:
        """Write the whole batches that were not trained yet; the others are sampled again.

        Args:
            workers: Of the main thread; all call it together.
        """
        with self._changed:  # so no batch is begun meanwhile
            whole = [step for step, batch in self._batches.items() if _is_whole(batch)]
            first = self._last_step + 1
            following = first + min(workers.gather(len(whole)))
            lost = [each.num_samples for step, each in self._begun.items() if step >= following]
            state = {
                "batches": {step: self._batches[step].result() for step in range(first, following)},
                "before": {step: self._before[step] for step in range(first, following)},
                "stream": self._before.get(following, self.stream.state_dict()),
                "again": sum(lost),
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
        self._again = state["again"]
        for step, collected in state["batches"].items():
            self._batches[step] = Future()
            self._batches[step].set_result(collected)

    def _begin_all(self, sample: Sample, first: int) -> None:
        try:
            self._begin_each(sample, first)
        except BaseException as error:  # who collects the batches tells it
            with self._changed:
                self._failed = error
                self._changed.notify_all()

    def _begin_each(self, sample: Sample, first: int) -> None:
        for step in range(first, self.num_steps + 1):
            with self._changed:
                self._changed.wait_for(partial(self._may_begin, step))
                if self._closed:
                    return
                self._before[step] = self.stream.state_dict()
                draws = _share(self.stream.take(self.prompts_per_step), self.workers)
                begun = _Begun(len(draws) * self.samples_per_prompt, Future())
                self._begun[step] = begun
                self._changed.notify_all()
            # A thread of its own, that the process does not wait for at its end.
            args = (begun.rollouts, sample, draws)
            threading.Thread(target=_sample_into, args=args, daemon=True).start()

    def _may_begin(self, step: int) -> bool:
        """It is needed, the engines' weights are new enough, and nobody else draws before it."""
        before = self._batches.get(step - 1)
        is_in_turn = not self.is_refilled or before is None or before.done()
        is_new_enough = self._version >= step - 1 - self.max_staleness
        is_needed = step <= self._last_step + self._depth
        return self._closed or (is_needed and is_new_enough and is_in_turn)

    def _collect_each(self, sample: Sample, collect: Collect, first: int) -> None:
        for step in range(first, self.num_steps + 1):
            batch = self._batches[step]
            try:
                collected = self._collect(sample, collect, step)
            except BaseException as error:  # the main thread tells it
                for each in range(step, self.num_steps + 1):
                    self._batches[each].set_exception(error)
                return
            with self._changed:
                batch.set_result(collected)
                self._changed.notify_all()

    def _collect(self, sample: Sample, collect: Collect, step: int) -> Collected:
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or self._failed is not None or step in self._begun
            )
            if self._closed:
                raise Closed
            if step not in self._begun:
                assert self._failed is not None
                raise self._failed
            begun, clock = self._begun[step], Clock()
        rounds: list[Span] = []
        waited_s = 0.0

        def sampled(num_prompts: int) -> list[Rollout]:
            nonlocal waited_s
            if rounds:
                draws = _share(self.stream.take(num_prompts), self.workers)
                rollouts, span = _sampled(sample, draws)
            else:  # begun before, perhaps beside the batches before it
                asked = time.perf_counter()
                rollouts, span = begun.rollouts.result()
                waited_s = time.perf_counter() - asked
            rounds.append(span)
            return rollouts

        collected = collect(sampled, clock, self.workers)
        laps = {name.replace("time/", "perf/"): s for name, s in clock.laps.items()}
        first_s = rounds[0][2] - rounds[0][1]
        laps["perf/generate_s"] = laps.get("perf/generate_s", 0.0) - waited_s + first_s
        collected.figures.update(laps)
        with self._changed:
            self._spans += rounds + [each for each in clock.spans if "generate" not in each[0]]
        return collected


def _share(draws: Sequence[Draw], workers: Workers) -> Sequence[Draw]:
    return draws[workers.rank :: workers.count]


def _sampled(sample: Sample, draws: Sequence[Draw]) -> tuple[list[Rollout], Span]:
    begin = time.time()
    return sample(draws), ("perf/generate_s", begin, time.time())


def _sample_into(
    answer: Future[tuple[list[Rollout], Span]], sample: Sample, draws: Sequence[Draw]
) -> None:
    try:
        answer.set_result(_sampled(sample, draws))
    except BaseException as error:  # whoever collects the batch tells it
        answer.set_exception(error)


def _is_whole(batch: Future[Collected]) -> bool:
    return batch.done() and batch.exception() is None


def _file(directory: Path, rank: int) -> Path:
    return directory / f"rollouts_ahead_{rank}.pkl"
