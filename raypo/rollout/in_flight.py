"""Requests that stay in flight during weight pushes: they neither delay a push nor get lost.

Concurrency. The worker's main thread pushes (`Pushes.push`). Other threads and event loops sample
ahead through `EnginesInFlight`, whose coroutines run on the background event loop of the process.
They send no new requests during a push. After the push, they resend each request that an engine
lost or returned unfinished.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from raypo.cluster.actors import NoReplicaLeft
from raypo.concurrency import background_future
from raypo.deployment.spec import SharedCall
from raypo.serving.client import Completions, Engines, OnCompletion
from raypo.serving.requests import Completion, SamplingRequest


class Pushes:
    """Counter of the main thread's pushes. Other threads of the worker wait for a push to end."""

    def __init__(self) -> None:
        self._count = 0
        self._is_running = False
        self._changed = threading.Condition()

    @contextmanager
    def push(self) -> Iterator[None]:
        """Hold back new requests of other threads during this context. The main thread calls it."""
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
        """Do the same as `wait` without blocking the event loop."""
        return await asyncio.to_thread(self.wait) if self._is_running else self._count


@dataclass(frozen=True)
class EnginesInFlight:
    """Engines whose requests stay in flight while weights are pushed.

    If no engine is left for a request, but a push is running or has run since the request was sent,
    the request is retried after that push. Without such a push, the error is raised.
    """

    engines: Engines
    pushes: Pushes

    @property
    def preferred(self) -> tuple[int, ...]:
        """Indices of this worker's engines."""
        return self.engines.preferred

    def generate(
        self,
        requests: Sequence[SamplingRequest],
        on_completion: OnCompletion | None = None,
        shared: SharedCall | None = None,
    ) -> Completions:
        """Sample requests like `submit`. An exclusive batch would wait for all running requests."""
        assert shared is None, "no worker waits for others while requests are in flight"
        return self.submit(requests, on_completion)

    def submit(
        self, requests: Sequence[SamplingRequest], on_completion: OnCompletion | None = None
    ) -> Completions:
        """Sample requests that join the running batch at any step."""
        return background_future(self._sample_all(requests, on_completion))

    def per_engine(self) -> list[EnginesInFlight]:
        """Return a client for each of this worker's engines."""
        return [EnginesInFlight(each, self.pushes) for each in self.engines.per_engine()]

    async def _sample_all(
        self, requests: Sequence[SamplingRequest], on_completion: OnCompletion | None
    ) -> list[Completion]:
        completions: dict[int, Completion] = {}
        while missing := [n for n in range(len(requests)) if n not in completions]:

            def report(n: int, completion: Completion, missing: list[int] = missing) -> None:
                if on_completion is not None and _is_complete(completion):
                    on_completion(missing[n], completion)

            pushes_before = await self.pushes.wait_async()
            batch = self.engines.submit([requests[n] for n in missing], on_completion and report)
            try:
                values = await asyncio.wrap_future(batch)
            except NoReplicaLeft:
                if await self.pushes.wait_async() == pushes_before:
                    raise
            else:
                arrived = zip(missing, values, strict=True)
                completions |= {n: each for n, each in arrived if _is_complete(each)}
        return [completions[n] for n in range(len(requests))]


def _is_complete(completion: Completion) -> bool:
    """Return whether a completion is finished. If a push paused it, it has to be sampled again.

    Raises:
        RuntimeError: the engine cancelled the request, or its time was up.
    """
    if completion.finish_reason in ("cancelled", "timeout"):
        raise RuntimeError(
            f"an engine has ended a request early ({completion.finish_reason}): the engine now "
            "serves another attempt of this run, or the request has timed out."
        )
    return completion.finish_reason != "paused"
