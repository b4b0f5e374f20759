"""Dispatch sampling requests to engines, optionally as one batch that several workers share.

Concurrency. The calling thread sends one call to each of this worker's engines and waits for the
values. The callback for early completions runs in other threads (`EngineClient`).
"""

from __future__ import annotations

import uuid
from concurrent.futures import Future

from raypo.collectives import Workers
from raypo.deployment.spec import SharedCall
from raypo.serving.client import Engines, OnCompletion
from raypo.serving.requests import Completion, SamplingRequest


def dispatch(
    requests: list[SamplingRequest],
    engines: Engines,
    *,
    sharing: Workers | None = None,
    on_completion: OnCompletion | None = None,
) -> list[Completion]:
    """Split the requests evenly over this worker's engines, and wait for all completions.

    Args:
        requests: This worker's requests.
        engines: This worker's engines.
        sharing: Workers that may use the same engines. Each engine then samples the requests of all
            workers as one batch, and all of them call this together. None means one batch per
            worker.
        on_completion: Gets completions that are ready before others of their engine's batch.

    Returns:
        One completion for each request, in the order given.

    Raises:
        NoReplicaLeft: no engine is left that holds the weights.
    """
    own = engines.per_engine()
    size = -(-len(requests) // len(own))
    batches = [requests[i * size : (i + 1) * size] for i in range(len(own))]
    # Each worker sends the whole batch under one id, and the engine samples it once, in the order
    # of ranks, whichever call arrives first. So each worker can detect a lost engine by itself, and
    # none has to forward completions to another.
    of_workers: list[tuple[str, dict[tuple[int, ...], list[SamplingRequest]]]] = []
    if sharing is not None:
        by_engine = {one.preferred: batch for one, batch in zip(own, batches, strict=True)}
        of_workers = sharing.gather((uuid.uuid4().hex, by_engine))
    sent: list[Future[list[Completion]]] = []
    for i, (one, batch) in enumerate(zip(own, batches, strict=True)):
        if not batch:
            continue
        whole, shared = batch, None
        if sharing is not None:
            parts = [theirs.get(one.preferred, []) for _, theirs in of_workers]
            whole = [each for part in parts for each in part]
            first = sum(map(len, parts[: sharing.rank]))
            part = tuple(range(first, first + len(batch)))
            shared = SharedCall(f"{of_workers[0][0]}:{one.preferred}", part)
        sent.append(one.generate(whole, _shifted(on_completion, i * size), shared))
    try:
        return [completion for completions in sent for completion in completions.result()]
    except BaseException:
        for completions in sent:
            completions.cancel()
        raise


def _shifted(on_completion: OnCompletion | None, first: int) -> OnCompletion | None:
    """Return the callback for a batch whose first request has this index among all requests."""
    if on_completion is None:
        return None
    return lambda index, completion: on_completion(first + index, completion)
