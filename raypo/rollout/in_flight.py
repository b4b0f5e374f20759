"""Requests that are under way when weights are pushed: none is waited for, and none is lost."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from raypo.cluster.actors import NoReplicaLeft
from raypo.deployed import AnswerOfEntries, MethodOfEntries
from raypo.serving.requests import Completion, SamplingRequest


class Joinable(Protocol):
    """Engines that requests can join at any step."""

    @property
    def submit(self) -> MethodOfEntries[[list[SamplingRequest]], Completion]:
        """One response a request, in the order given."""
        ...

    async def join(self, request: SamplingRequest) -> Completion:
        """One response; no thread waits for it."""
        ...

    def each_preferred(self) -> Sequence[Joinable]:
        """This worker's engines, one by one; itself where it has but one."""
        ...


class Pushes:
    """The pushes of this worker's main thread, for its threads that ask engines."""

    def __init__(self) -> None:
        self._count = 0
        self._is_under_way = False
        self._changed = threading.Condition()

    @contextmanager
    def push(self) -> Iterator[None]:
        """In the main thread: who asks anew waits meanwhile."""
        with self._changed:
            self._is_under_way = True
        try:
            yield
        finally:
            with self._changed:
                self._is_under_way = False
                self._count += 1
                self._changed.notify_all()

    def wait(self) -> int:
        """Wait for the end of a push that is under way; how many there were."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_under_way)
            return self._count

    async def end(self) -> int:
        """As `wait`, in an event loop."""
        return await asyncio.to_thread(self.wait) if self._is_under_way else self._count


@dataclass(frozen=True)
class EnginesInFlight:
    """Engines whose requests stay under way while weights are pushed.

    What is lost with an engine while nothing is kept that another one could load is asked anew when
    the push has ended.
    """

    engine: Joinable
    pushes: Pushes

    @property
    def generate(self) -> MethodOfEntries[[list[SamplingRequest]], Completion]:
        """One response a request, in the order given; they join what is being sampled."""
        return self

    submit = generate

    async def join(self, request: SamplingRequest) -> Completion:
        """One response; no thread waits for it."""
        while True:
            asked_after = await self.pushes.end()
            try:
                completion = await self.engine.join(request)
            except NoReplicaLeft:
                if await self.pushes.end() == asked_after:
                    raise
            else:
                if _is_whole(completion):
                    return completion

    def remote(self, requests: list[SamplingRequest]) -> AnswerOfEntries[Completion]:
        """Ask; see `generate`."""
        return _Answer(self, requests)

    def each_preferred(self) -> list[EnginesInFlight]:
        """This worker's engines, one by one; itself where it has but one."""
        return [EnginesInFlight(each, self.pushes) for each in self.engine.each_preferred()]


class _Answer:
    def __init__(self, engines: EnginesInFlight, requests: list[SamplingRequest]) -> None:
        self._engines, self._requests = engines, requests
        self._answers: dict[int, Completion] = {}
        self._ask()

    def result(self) -> list[Completion]:
        while len(self._answers) < len(self._requests):
            try:
                answers = dict(enumerate(self._asked.answer.result()))
            except NoReplicaLeft:
                if self._engines.pushes.wait() == self._asked.after:
                    raise
            else:
                self._answers |= self._asked.whole(answers)
            self._ask()
        return [self._answers[number] for number in range(len(self._requests))]

    def news(self) -> dict[int, Completion]:
        asked = self._asked
        return asked.whole(asked.answer.news())

    def _ask(self) -> None:
        left = [n for n in range(len(self._requests)) if n not in self._answers]
        if left:
            after = self._engines.pushes.wait()
            requests = [self._requests[number] for number in left]
            answer = self._engines.engine.submit.remote(requests)
            self._asked = _Asked(left, after, answer)


@dataclass(frozen=True)
class _Asked:
    places: list[int]
    """Among all requests, those that were not answered before."""
    after: int
    """Pushes that there had been."""
    answer: AnswerOfEntries[Completion]

    def whole(self, answers: Mapping[int, Completion]) -> dict[int, Completion]:
        """Responses by place among all requests, without what was given back before its end."""
        return {self.places[number]: each for number, each in answers.items() if _is_whole(each)}


def _is_whole(completion: Completion) -> bool:
    """Whether it came to its end; else it is asked for anew.

    Raises:
        RuntimeError: it was withdrawn, so no one may take it for one that ended.
    """
    if completion.finish_reason in ("cancelled", "timeout"):
        raise RuntimeError(
            f"an engine has given a request back ({completion.finish_reason}): it answers another "
            "attempt of this run, or its time was up."
        )
    return completion.finish_reason != "paused"
