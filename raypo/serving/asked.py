"""Requests on their way through an engine: who waits for them, and what the loop knows of each."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from raypo.serving.requests import Completion, SamplingRequest


class Promise(Future[Completion]):
    """An answer on its way."""

    def __init__(self, give_back: Callable[[Promise], None]) -> None:
        super().__init__()
        self._give_back = give_back
        self.set_running_or_notify_cancel()  # it is answered all the same

    def cancel(self) -> bool:
        """Have the request given back before the next step."""
        self._give_back(self)
        return super().cancel()


@dataclass(eq=False)
class Asked:
    """A request from its arrival to its answer."""

    request: SamplingRequest
    answer: Promise
    deadline: float
    """On the clock of `time.monotonic`; inf: none."""
    number: int = 0
    """Order of its arrival."""
    has_place: bool = False
    """Whether it takes one of the places of those that wait to join."""
    waits: bool = False
    """Whether it is in the queue."""
    name: str | None = None
    """What vLLM calls it, while vLLM has it."""
    versions: list[tuple[int, int]] = field(default_factory=list)
    """Of the weights, each with the first token that they were to sample."""
    scheduled: Any = None
    """What vLLM's scheduler has of it; it knows its preemptions also when it has ended."""
    num_preemptions: int = 0
    """Those that were counted."""


@dataclass(eq=False)
class Lot:
    """Requests that enter vLLM at once: one that joins what runs, or a batch that runs alone."""

    asked: list[Asked]
    alone: bool
