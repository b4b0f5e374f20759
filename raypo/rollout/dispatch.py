"""Dispatch sampling requests to engines, optionally as one batch that several workers share.

Concurrency. The calling thread sends one call to each of this worker's engines and waits for the
values. The callback for early completions runs in other threads (`EngineClient`).
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from raypo.cluster.actors import NoReplicaLeft
from raypo.collectives import Workers, as_tensor
from raypo.serving.client import Engines, OnCompletion
from raypo.serving.requests import Completion, SamplingRequest


class Dispatch(Protocol):
    """Samples a whole batch for one worker: `dispatch` or `dispatch_shared`, with its engines."""

    def __call__(
        self, requests: list[SamplingRequest], *, on_completion: OnCompletion | None = None
    ) -> list[Completion]:
        """Return one completion for each request, in the order given."""
        ...


@dataclass(frozen=True)
class PushAgain:
    """The push that all workers repeat together if no engine is left that holds the weights."""

    push: Callable[[], object]
    workers: Workers


def dispatch(
    requests: list[SamplingRequest],
    engines: Engines,
    *,
    on_completion: OnCompletion | None = None,
) -> list[Completion]:
    """Split the requests evenly over this worker's engines, and wait for all completions.

    Args:
        on_completion: Gets completions that are ready before others of their engine's batch.

    Returns:
        One completion for each request, in the order given.
    """
    own = engines.per_engine()
    pending: list[Future[list[Completion]]] = []
    first = 0
    for one, batch in zip(own, _equal_batches(requests, len(own)), strict=True):
        if batch:
            pending.append(one.generate(batch, _shifted(on_completion, first)))
        first += len(batch)
    return _results(pending)


def dispatch_shared(
    requests: list[SamplingRequest],
    engines: Engines,
    *,
    workers: Workers,
    on_completion: OnCompletion | None = None,
) -> list[Completion]:
    """Dispatch as `dispatch` does, but merge the requests of all workers that share an engine.

    An engine that several workers share thereby samples one batch, in the order of ranks, whichever
    worker's call arrives first. All workers call this together. Each of them sends the whole batch
    under one id, and the engine samples it once: so each worker can detect a lost engine by itself,
    and none has to forward completions to another.
    """
    own = engines.per_engine()
    keys = [one.preferred for one in own]
    batches = dict(zip(keys, _equal_batches(requests, len(own)), strict=True))
    of_workers = workers.gather((uuid.uuid4().hex, batches))
    pending: list[Future[list[Completion]]] = []
    num_sent = 0
    for one in own:
        parts = [theirs.get(one.preferred, []) for _, theirs in of_workers]
        if not parts[workers.rank]:
            continue
        first = sum(map(len, parts[: workers.rank]))
        part = range(first, first + len(parts[workers.rank]))
        shared = one.sharing_call(f"{of_workers[0][0]}:{one.preferred}", part)
        whole = [each for part in parts for each in part]
        pending.append(shared.generate(whole, _shifted(on_completion, num_sent)))
        num_sent += len(part)
    return _results(pending)


def dispatch_or_push_again(
    requests: list[SamplingRequest],
    dispatch: Dispatch,
    push_again: PushAgain | None,
    on_completion: OnCompletion | None = None,
) -> list[Completion]:
    """Dispatch the requests; if any worker has no engine left, all push the weights and retry.

    All workers call this together if `push_again` is given.
    """
    completions: list[Completion] = []
    is_lost = False
    try:
        completions = dispatch(requests, on_completion=on_completion)
    except NoReplicaLeft:
        if push_again is None:
            raise
        is_lost = True
    if push_again is None or not push_again.workers.sum(as_tensor(is_lost)):
        return completions
    push_again.push()
    # Workers that have their completions take part with no request, since all dispatch together.
    retried = dispatch(requests if is_lost else [], on_completion=on_completion)
    return retried if is_lost else completions


def _equal_batches(requests: list[SamplingRequest], count: int) -> list[list[SamplingRequest]]:
    size = -(-len(requests) // count)
    return [requests[i * size : (i + 1) * size] for i in range(count)]


def _shifted(on_completion: OnCompletion | None, first: int) -> OnCompletion | None:
    """Return the callback for a batch whose first request has this index among all requests."""
    if on_completion is None:
        return None
    return lambda index, completion: on_completion(first + index, completion)


def _results(pending: Sequence[Future[list[Completion]]]) -> list[Completion]:
    """Wait for all completions, in their order; if one batch fails, cancel the others."""
    try:
        return [completion for batch in pending for completion in batch.result()]
    except BaseException:
        for batch in pending:
            batch.cancel()
        raise
