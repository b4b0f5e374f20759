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

from raypo.cluster.actors import NoReplicaLeft
from raypo.collectives import Workers, as_tensor
from raypo.pending import PendingBatch
from raypo.serving.client import Engines
from raypo.serving.requests import Completion, SamplingRequest

POLL_S = 0.1
"""Polling interval for early completions, in seconds."""

OnCompletion = Callable[[int, Completion], None]
"""Callback `(index, completion)`. Called from any thread, possibly twice for one index."""


@dataclass(frozen=True)
class PushAgain:
    """The push that all workers repeat together if no engine is left that holds the weights."""

    push: Callable[[], object]
    workers: Workers


def dispatch(
    requests: list[SamplingRequest],
    engines: Engines,
    *,
    sharing: Workers | None = None,
    push_again: PushAgain | None = None,
    on_completion: OnCompletion | None = None,
) -> list[Completion]:
    """Split the requests evenly over this worker's engines, and wait for all completions.

    Args:
        requests: This worker's requests.
        engines: This worker's engines.
        sharing: Workers that may use the same engines. Each engine then samples the requests of all
            workers as one batch, and all of them call this together. None means one batch per
            worker.
        push_again: Repeats the last push if any worker has no engine left; then the requests that
            were lost are sent once more. If it is given, all workers call this together.
        on_completion: Gets completions that are ready before others of their engine's batch.

    Returns:
        One completion for each request, in the order given.
    """
    completions: list[Completion] = []
    is_lost = False
    try:
        completions = _results(_sent(requests, engines, sharing), on_completion)
    except NoReplicaLeft:
        if push_again is None:
            raise
        is_lost = True
    if push_again is None or not push_again.workers.sum(as_tensor(is_lost)):
        return completions
    push_again.push()
    # Workers that have their completions take part with no request, since all dispatch together.
    retried = _results(_sent(requests if is_lost else [], engines, sharing), on_completion)
    return retried if is_lost else completions


def _sent(
    requests: list[SamplingRequest], engines: Engines, sharing: Workers | None
) -> list[tuple[int, PendingBatch[Completion]]]:
    """Send the requests, and return each engine's batch with the index of its first request."""
    own = engines.per_engine()
    size = -(-len(requests) // len(own))
    batches = [requests[i * size : (i + 1) * size] for i in range(len(own))]
    if sharing is None:
        return [
            (i * size, one.generate(batch))
            for i, (one, batch) in enumerate(zip(own, batches, strict=True))
            if batch
        ]
    # Each worker sends the whole batch under one id, and the engine samples it once, in the order
    # of ranks, whichever call arrives first. So each worker can detect a lost engine by itself, and
    # none has to forward completions to another.
    by_engine = {one.preferred: batch for one, batch in zip(own, batches, strict=True)}
    of_workers = sharing.gather((uuid.uuid4().hex, by_engine))
    sent: list[tuple[int, PendingBatch[Completion]]] = []
    for i, one in enumerate(own):
        parts = [theirs.get(one.preferred, []) for _, theirs in of_workers]
        if not parts[sharing.rank]:
            continue
        first = sum(map(len, parts[: sharing.rank]))
        part = range(first, first + len(parts[sharing.rank]))
        shared = one.sharing_call(f"{of_workers[0][0]}:{one.preferred}", part)
        sent.append((i * size, shared.generate([each for part in parts for each in part])))
    return sent


def _results(
    sent: Sequence[tuple[int, PendingBatch[Completion]]], on_completion: OnCompletion | None
) -> list[Completion]:
    """Wait for all completions, in their order, and report early ones meanwhile."""
    is_over = threading.Event()
    if on_completion is not None:
        for first, batch in sent:
            args = (batch, first, on_completion, is_over)
            threading.Thread(target=_poll, args=args, daemon=True).start()
    try:
        return [completion for _, batch in sent for completion in batch.result()]
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
