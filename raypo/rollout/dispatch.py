"""Dispatch sampling requests to engines, optionally as one batch that several workers share.

Concurrency. The calling thread sends one call to each of this worker's engines and waits for the
values. If the caller wants completions early, a daemon thread for each engine polls for them and
runs the callback; it ends when the last value is there.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from raypo.cluster.actors import NoReplicaLeft
from raypo.collectives import Workers, as_tensor
from raypo.pending import PendingBatch
from raypo.serving.client import Engines
from raypo.serving.requests import Completion, SamplingRequest

POLL_S = 0.1
"""Polling interval for early completions, in seconds."""

OnCompletion = Callable[[int, Completion], None]
"""Callback `(index, completion)`. Called from any thread, possibly twice for one index."""


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
    batches = _equal_batches(requests, len(own))
    pending = [one.generate(batch) for one, batch in zip(own, batches, strict=True) if batch]
    return _results(pending, [len(batch) for batch in batches], on_completion)


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
    pending: list[PendingBatch[Completion]] = []
    for one in own:
        parts = [theirs.get(one.preferred, []) for _, theirs in of_workers]
        if not parts[workers.rank]:
            continue
        first = sum(map(len, parts[: workers.rank]))
        part = range(first, first + len(parts[workers.rank]))
        shared = one.sharing_call(f"{of_workers[0][0]}:{one.preferred}", part)
        pending.append(shared.generate([each for part in parts for each in part]))
    return _results(pending, [len(batch) for batch in batches.values()], on_completion)


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


def _results(
    pending: Sequence[PendingBatch[Completion]],
    sizes: Sequence[int],
    on_completion: OnCompletion | None,
) -> list[Completion]:
    """Wait for all completions, in their order, and report early ones meanwhile."""
    is_over = threading.Event()
    if on_completion is not None:
        first = 0
        for batch, size in zip(pending, filter(None, sizes), strict=True):
            args = (batch, first, on_completion, is_over)
            threading.Thread(target=_poll, args=args, daemon=True).start()
            first += size
    try:
        return [completion for batch in pending for completion in batch.result()]
    finally:
        is_over.set()


def _poll(
    batch: PendingBatch[Completion],
    first: int,
    on_completion: OnCompletion,
    is_over: threading.Event,
) -> None:
    while not is_over.wait(POLL_S):
        for index, completion in batch.partial().items():
            on_completion(first + index, completion)
