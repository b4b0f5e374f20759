"""Send a worker's requests to its engines, optionally as batches that several workers share."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from functools import partial

from raypo.collectives import Workers
from raypo.deployment.spec import SharedCall
from raypo.serving.client import Completions, Engines, OnCompletion
from raypo.serving.requests import Completion, SamplingRequest


def sample_on_engines(
    requests: Sequence[SamplingRequest],
    engines: Engines,
    *,
    sharing: Workers | None = None,
    on_completion: OnCompletion | None = None,
) -> list[Completion]:
    """Sample the requests, in about equal parts on each of this worker's engines.

    Args:
        requests: This worker's requests.
        engines: This worker's engines.
        sharing: Workers that may use the same engines. Each engine then samples the requests of all
            workers as one batch, and all workers call this together. None means that each worker
            has batches of its own.
        on_completion: Callback `(index in requests, completion)` for early completions.

    Returns:
        The completions, in the order of the requests.

    Raises:
        Exception: the error of a batch that failed. The other batches are cancelled.
    """
    own = engines.per_engine()
    size = -(-len(requests) // len(own))
    parts = [requests[i * size : (i + 1) * size] for i in range(len(own))]
    # Each worker sends the whole batch under one id, with the requests in the order of ranks. The
    # engine samples the batch once, whichever call arrives first. Each worker can therefore detect
    # a lost engine by itself, and no worker has to forward completions to another.
    of_workers: list[tuple[str, dict[tuple[int, ...], Sequence[SamplingRequest]]]] = []
    if sharing is not None:
        by_engine = {one.preferred: part for one, part in zip(own, parts, strict=True)}
        of_workers = sharing.gather((uuid.uuid4().hex, by_engine))
    sent: list[Completions] = []
    try:
        for i, (one, part) in enumerate(zip(own, parts, strict=True)):
            if not part:
                continue
            batch, shared = part, None
            if sharing is not None:
                of_ranks = [theirs.get(one.preferred, []) for _, theirs in of_workers]
                batch = [request for theirs in of_ranks for request in theirs]
                first = sum(map(len, of_ranks[: sharing.rank]))
                indices = tuple(range(first, first + len(part)))
                shared = SharedCall(f"{of_workers[0][0]}:{one.preferred}", indices)
            report = on_completion and partial(_shifted, on_completion, i * size)
            sent.append(one.generate(batch, report, shared))
        return [completion for each in sent for completion in each.result()]
    except BaseException:
        for each in sent:
            each.cancel()
        raise


def _shifted(on_completion: OnCompletion, first: int, index: int, completion: Completion) -> None:
    on_completion(first + index, completion)
