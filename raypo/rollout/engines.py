"""The engines as the rollout controller calls them: its requests outlive pushes and lost engines.

Concurrency. The main thread pushes weights (`Pushes.push`). Threads and event loops that sample use
`PolicyEngines`, whose coroutines run on the background event loop of the process. They send no new
requests during a push. After the push, they resend the requests that an engine lost or returned
unfinished.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

from raypo.cluster.actors import NoReplicaLeft
from raypo.concurrency import background_future
from raypo.serving.client import Completions, EngineClient, OnCompletion
from raypo.serving.requests import Completion, SamplingRequest


class Engines(Protocol):
    """Protocol of the engines, for all code that samples."""

    @property
    def joins(self) -> bool:
        """True if all requests join running batches."""
        ...

    def per_engine(self) -> Sequence[Engines]:
        """Return one client for each engine."""
        ...

    def generate(
        self, requests: Sequence[SamplingRequest], on_completion: OnCompletion | None = None
    ) -> Completions:
        """Sample an exclusive batch: no other request shares its steps (`Engine.submit`).

        If requests stay in flight during pushes, they join the running batch instead: an exclusive
        batch would wait for all of them.

        Args:
            requests: The batch.
            on_completion: Callback `(index, completion)` for completions that are ready before the
                whole batch is. Called from any thread, possibly twice for one index.
        """
        ...

    def submit(self, requests: Sequence[SamplingRequest]) -> Completions:
        """Sample requests that join the running batch at any step (`Engine.submit`)."""
        ...


class Pushes:
    """The weight pushes of the main thread, which the threads that sample wait for."""

    def __init__(self) -> None:
        self._count = 0
        self._is_running = False
        self._wanted: NoReplicaLeft | None = None
        self._waiting: list[Future[None]] = []
        self._changed = threading.Condition()

    @contextmanager
    def push(self) -> Iterator[None]:
        """Hold back new requests during this context. The main thread calls it."""
        with self._changed:
            self._is_running, self._wanted = True, None
        try:
            yield
        finally:
            with self._changed:
                self._is_running = False
                self._count += 1
                self._changed.notify_all()
                waiting, self._waiting = self._waiting, []
            for end in waiting:
                if end.set_running_or_notify_cancel():
                    end.set_result(None)

    def wait_for(self, answer: Future[Any], *, may_push: bool) -> bool:
        """Wait until a future is done, or until sampling needs another push to go on.

        Args:
            answer: The future.
            may_push: Whether the learner still holds the weights that were pushed last.

        Returns:
            True if the future is done, False if the weights have to be pushed again.

        Raises:
            NoReplicaLeft: no engine has the weights, and they cannot be pushed again.
        """
        answer.add_done_callback(lambda _: self._notify())
        with self._changed:
            self._changed.wait_for(lambda: answer.done() or self._wanted is not None)
            if answer.done() or may_push or self._wanted is None:
                return answer.done()
            raise self._wanted

    async def pushed(self, *, after: int = -1, wanted: NoReplicaLeft | None = None) -> int:
        """Wait until no push is running and more than `after` pushes have ended.

        Args:
            after: A number of pushes.
            wanted: The error of a request that goes on after such a push.

        Returns:
            The number of pushes so far.
        """
        while True:
            with self._changed:
                if not self._is_running and self._count > after:
                    return self._count
                if wanted is not None and not self._is_running:
                    self._wanted = wanted
                    self._changed.notify_all()
                end: Future[None] = Future()
                self._waiting.append(end)
            await asyncio.wrap_future(end)

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()


@dataclass(frozen=True)
class PolicyEngines:
    """Engines whose requests go on after a push if no engine is left that holds the weights."""

    engines: EngineClient
    pushes: Pushes | None = None
    """Pushes of the run. None means that the weights are never pushed again."""
    joins: bool = False
    """True if all requests join running batches."""

    def per_engine(self) -> list[PolicyEngines]:
        """Return one client for each engine."""
        return [replace(self, engines=engine) for engine in self.engines.per_engine()]

    def generate(
        self, requests: Sequence[SamplingRequest], on_completion: OnCompletion | None = None
    ) -> Completions:
        """Sample an exclusive batch, unless requests join running batches (`Engines.generate`)."""
        ask = self.engines.submit if self.joins else self.engines.generate
        return background_future(self._sample_all(ask, requests, on_completion))

    def submit(self, requests: Sequence[SamplingRequest]) -> Completions:
        """Sample requests that join the running batch at any step."""
        return background_future(self._sample_all(self.engines.submit, requests, None))

    async def _sample_all(
        self,
        ask: Callable[[Sequence[SamplingRequest], OnCompletion | None], Completions],
        requests: Sequence[SamplingRequest],
        on_completion: OnCompletion | None,
    ) -> list[Completion]:
        completions: dict[int, Completion] = {}
        while missing := [n for n in range(len(requests)) if n not in completions]:

            def report(n: int, completion: Completion, missing: list[int] = missing) -> None:
                if on_completion is not None and _is_complete(completion):
                    on_completion(missing[n], completion)

            pushes_before = await self.pushes.pushed() if self.pushes else 0
            try:
                batch = ask([requests[n] for n in missing], on_completion and report)
                values = await asyncio.wrap_future(batch)
            except NoReplicaLeft as error:
                if self.pushes is None:
                    raise
                await self.pushes.pushed(after=pushes_before, wanted=error)
            else:
                arrived = zip(missing, values, strict=True)
                completions |= {n: value for n, value in arrived if _is_complete(value)}
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
