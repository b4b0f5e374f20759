"""Requests that stay in flight while weights are pushed: none delays the push, and none is lost.

Concurrency. The worker's main thread pushes (`Pushes.push`). Other threads and event loops sample
ahead through `EnginesInFlight`; they send nothing new during a push, and retry after it what an
engine gave back or lost.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from raypo.cluster.actors import NoReplicaLeft
from raypo.pending import PendingBatch
from raypo.serving.client import Engines
from raypo.serving.requests import Completion, SamplingRequest


class Pushes:
    """Counts the pushes of this worker's main thread, and makes its other threads wait for them."""

    def __init__(self) -> None:
        self._count = 0
        self._is_running = False
        self._changed = threading.Condition()

    @contextmanager
    def push(self) -> Iterator[None]:
        """Hold back new requests of other threads; called by the main thread."""
        with self._changed:
            self._is_running = True
        try:
            yield
        finally:
            with self._changed:
                self._is_running = False
                self._count += 1
                self._changed.notify_all()

    def wait(self) -> int:
        """Wait until no push is running; return the number of pushes so far."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_running)
            return self._count

    async def wait_async(self) -> int:
        """Wait as `wait` does, without blocking the event loop."""
        return await asyncio.to_thread(self.wait) if self._is_running else self._count


@dataclass(frozen=True)
class EnginesInFlight(Engines):
    """Engines whose requests stay in flight while weights are pushed.

    A request that is lost with an engine, while no other engine can load the weights, is retried
    after the push.
    """

    engines: Engines
    pushes: Pushes

    def generate(self, requests: Sequence[SamplingRequest]) -> PendingBatch[Completion]:
        """Sample requests as `submit` does: a batch of its own would wait for all that run."""
        return _RetriedBatch(self.engines, self.pushes, requests)

    def submit(self, requests: Sequence[SamplingRequest]) -> PendingBatch[Completion]:
        """Sample requests that join the running batch at any step."""
        return _RetriedBatch(self.engines, self.pushes, requests)

    async def sample(self, request: SamplingRequest) -> Completion:
        """Sample one request, which joins the running batch; no thread blocks."""
        while True:
            pushes_before = await self.pushes.wait_async()
            try:
                completion = await self.engines.sample(request)
            except NoReplicaLeft:
                if await self.pushes.wait_async() == pushes_before:
                    raise
            else:
                if _is_complete(completion):
                    return completion

    def per_engine(self) -> list[EnginesInFlight]:
        """Return a client for each of this worker's engines; itself if there is one."""
        return [EnginesInFlight(each, self.pushes) for each in self.engines.per_engine()]


class _RetriedBatch:
    """Future of a batch; requests that come back incomplete are sent once more."""

    def __init__(
        self, engines: Engines, pushes: Pushes, requests: Sequence[SamplingRequest]
    ) -> None:
        self._engines, self._pushes, self._requests = engines, pushes, requests
        self._completions: dict[int, Completion] = {}
        self._send()

    def result(self) -> list[Completion]:
        while len(self._completions) < len(self._requests):
            try:
                values = dict(enumerate(self._attempt.batch.result()))
            except NoReplicaLeft:
                if self._pushes.wait() == self._attempt.pushes_before:
                    raise
            else:
                self._completions |= self._attempt.complete(values)
            self._send()
        return [self._completions[index] for index in range(len(self._requests))]

    def partial(self) -> dict[int, Completion]:
        attempt = self._attempt
        return attempt.complete(attempt.batch.partial())

    def _send(self) -> None:
        missing = [n for n in range(len(self._requests)) if n not in self._completions]
        if missing:
            pushes_before = self._pushes.wait()
            batch = self._engines.submit([self._requests[index] for index in missing])
            self._attempt = _Attempt(missing, pushes_before, batch)


@dataclass(frozen=True)
class _Attempt:
    indices: list[int]
    """Indices, among all requests, of those that were sent."""
    pushes_before: int
    batch: PendingBatch[Completion]

    def complete(self, values: Mapping[int, Completion]) -> dict[int, Completion]:
        """Return the completions that are complete, by their index among all requests."""
        return {self.indices[n]: each for n, each in values.items() if _is_complete(each)}


def _is_complete(completion: Completion) -> bool:
    """Return whether a completion came to its end; otherwise it has to be sampled again.

    Raises:
        RuntimeError: it was withdrawn, so it must not count as one that ended.
    """
    if completion.finish_reason in ("cancelled", "timeout"):
        raise RuntimeError(
            f"an engine has given a request back ({completion.finish_reason}): it answers another "
            "attempt of this run, or its time was up."
        )
    return completion.finish_reason != "paused"
