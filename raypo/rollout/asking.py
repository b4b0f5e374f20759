"""How engines are asked: which of them is asked what, with whom, and who hears of it meanwhile."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from raypo.cluster.actors import NoReplicaLeft
from raypo.collectives import Workers, as_tensor
from raypo.deployed import AnswerOfEntries, MethodOfEntries
from raypo.serving.requests import Completion, SamplingRequest

LISTEN_EVERY_S = 0.1
"""What one that listens leaves an engine between two questions."""

Heard = Callable[[int, Completion], None]
"""Is told the place of a request and its response, from any thread, perhaps more than once."""


class Sampler(Protocol):
    """What sampling asks of engines."""

    @property
    def generate(self) -> MethodOfEntries[[list[SamplingRequest]], Completion]:
        """One response a request, in the order given."""
        ...

    async def join(self, request: SamplingRequest) -> Completion:
        """One response, which joins what is being sampled; no thread waits for it."""
        ...

    def each_preferred(self) -> Sequence[Sampler]:
        """This worker's engines, one by one; itself where it has but one."""
        ...


class SharedSampler(Sampler, Protocol):
    """Engines that several workers may ask."""

    @property
    def preferred(self) -> tuple[int, ...]:
        """Numbers of this worker's engines."""
        ...

    def each_preferred(self) -> Sequence[SharedSampler]:
        """This worker's engines, one by one; itself where it has but one."""
        ...

    def known_as(self, id: str, part: Sequence[int]) -> Sampler:
        """For one call that others make too, each of whom gets a part of its answer."""
        ...


class Ask(Protocol):
    """How a worker asks its engines for all responses at once."""

    def __call__(
        self, requests: list[SamplingRequest], *, heard: Heard | None = None
    ) -> list[Completion]:
        """One response a request, in the order given."""
        ...


@dataclass(frozen=True)
class PushAgain:
    """What all workers do together when no engine is left that holds the weights."""

    push: Callable[[], object]
    workers: Workers


def ask(
    requests: list[SamplingRequest], engine: Sampler, *, heard: Heard | None = None
) -> list[Completion]:
    """All at once, each of this worker's engines an equal lot; the answers in the order given.

    Args:
        heard: Is told of responses that are there before others of their lot.
    """
    engines = engine.each_preferred()
    lots = _equal_lots(requests, len(engines))
    pending = [one.generate.remote(lot) for one, lot in zip(engines, lots, strict=True) if lot]
    return _answers(pending, [len(lot) for lot in lots], heard)


def ask_together(
    requests: list[SamplingRequest],
    engine: SharedSampler,
    *,
    workers: Workers,
    heard: Heard | None = None,
) -> list[Completion]:
    """Ask as `ask` does, but join all workers' requests to an engine, in the order of ranks.

    So an engine of several workers does not sample their lots one after the other, and whichever
    comes first, the lot is the same. All workers call it together. Each of them asks for the whole
    lot under one id, which an engine works on once: so each looks after the engine, and none waits
    for another one's answers.
    """
    engines = engine.each_preferred()
    names = [one.preferred for one in engines]
    lots = dict(zip(names, _equal_lots(requests, len(engines)), strict=True))
    shares = workers.gather((uuid.uuid4().hex, lots))
    pending: list[AnswerOfEntries[Completion]] = []
    for one in engines:
        parts = [lots_of_it.get(one.preferred, []) for _, lots_of_it in shares]
        if not parts[workers.rank]:
            continue
        first = sum(map(len, parts[: workers.rank]))
        own = range(first, first + len(parts[workers.rank]))
        shared = one.known_as(f"{shares[0][0]}:{one.preferred}", own)
        pending.append(shared.generate.remote([each for part in parts for each in part]))
    return _answers(pending, [len(lot) for lot in lots.values()], heard)


def ask_or_push(
    requests: list[SamplingRequest],
    asks: Ask,
    push_again: PushAgain | None,
    heard: Heard | None = None,
) -> list[Completion]:
    """Ask by `asks`; where one worker has no engine left, all push the weights again first."""
    try:
        completions, lost = asks(requests, heard=heard), None
    except NoReplicaLeft as error:
        if push_again is None:
            raise
        completions, lost = [], error
    if push_again is None or not push_again.workers.sum(as_tensor(lost is not None)):
        return completions
    push_again.push()
    again = asks(requests if lost else [], heard=heard)
    return again if lost else completions


def _equal_lots(requests: list[SamplingRequest], count: int) -> list[list[SamplingRequest]]:
    size = -(-len(requests) // count)
    return [requests[i * size : (i + 1) * size] for i in range(count)]


def _answers(
    pending: Sequence[AnswerOfEntries[Completion]], sizes: Sequence[int], heard: Heard | None
) -> list[Completion]:
    """All answers, in their order; meanwhile `heard` is told of those that are there."""
    ended = threading.Event()
    if heard is not None:
        first = 0
        for answer, size in zip(pending, filter(None, sizes), strict=True):
            args = (answer, first, heard, ended)
            threading.Thread(target=_listen, args=args, daemon=True).start()
            first += size
    try:
        return [completion for answer in pending for completion in answer.result()]
    finally:
        ended.set()


def _listen(
    answer: AnswerOfEntries[Completion], first: int, heard: Heard, ended: threading.Event
) -> None:
    while not ended.wait(LISTEN_EVERY_S):
        for place, completion in answer.news().items():
            heard(first + place, completion)
