"""Requests inside an engine, from arrival to answer, with their futures."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from raypo.serving.requests import Completion, SamplingRequest


class CompletionFuture(Future[Completion]):
    """Future of a completion. `cancel` aborts the request in the engine."""

    def __init__(self, give_back: Callable[[CompletionFuture], None]) -> None:
        super().__init__()
        self._give_back = give_back
        # A running future ignores `Future.cancel`: the loop answers it with its tokens so far.
        self.set_running_or_notify_cancel()

    def cancel(self) -> bool:
        """Abort the request before the next step; the future then gets its tokens so far.

        Returns:
            False, as for any running future.
        """
        self._give_back(self)
        return super().cancel()


@dataclass(eq=False)
class RequestState:
    """State of one request from its arrival to its answer."""

    request: SamplingRequest
    answer: CompletionFuture
    deadline: float
    """Time on the clock of `time.monotonic`. inf means no timeout."""
    number: int = 0
    """Order of arrival."""
    has_place: bool = False
    """True while it holds a slot of the queue's semaphore."""
    waits: bool = False
    """True while it is queued."""
    name: str | None = None
    """vLLM's internal request id. None if vLLM does not hold it."""
    versions: list[tuple[int, int]] = field(default_factory=list)
    """(index of the first token, weight version), one pair for each version it ran under."""
    scheduled: Any = None
    """The scheduler's request object. Its `num_preemptions` stays readable after the end."""
    num_preemptions: int = 0
    """Preemptions that are already added to the engine's count."""


@dataclass(eq=False)
class Batch:
    """Requests that enter vLLM together: a single one, or an exclusive batch."""

    asked: list[RequestState]
    alone: bool
