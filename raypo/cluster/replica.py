"""One replica of a deployment: a plain object behind a queue that is bounded and knows its ids."""

from __future__ import annotations

import asyncio
import os
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import ray

from raypo.cluster.devices import narrowed
from raypo.cluster.spec import Deployment, Refused, Request, Unhealthy
from raypo.metrics.logs import log_to_file

KEPT_ANSWERS = 32
"""Answers that a replica remembers, for callers that did not get theirs and ask again."""


class Replica:
    """Runs as a Ray actor whose event loop stays free: it tells its load and health at work.

    The object is made and called in threads of a pool; with one ongoing request at a time, all
    happens in one thread.
    """

    def __init__(self, deployment: Deployment, index: int) -> None:
        self._deployment = deployment
        _see_own_devices()
        self._target: Any = None  # `repr` is asked even where it cannot be made
        self._pool = ThreadPoolExecutor(deployment.max_ongoing_requests, "replica")
        self._target = self._pool.submit(_make, deployment, index).result()
        self._requests: OrderedDict[str, Future[Any]] = OrderedDict()
        self._is_draining = False
        self._end = asyncio.Event()

    def __repr__(self) -> str:
        if self._target is None:
            return f"{type(self).__name__}(not made)"
        return repr(self._target)

    async def call(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        """What the object's method returns; a request that is known by its id is not run twice.

        Returns:
            The answer, `Refused` where the queue is full, or `Unhealthy` where the method failed
            and the object says that it cannot go on.
        """
        future = self._requests.get(request.id)
        if future is None or future.cancelled():
            if request.waits_in_line and self._is_full():
                return Refused(self._count())
            future = self._pool.submit(self._run, request.method, args, kwargs)
            self._requests[request.id] = future
            self._forget_old()
        return await asyncio.wrap_future(future)  # a caller that gives up takes a waiting one away

    async def where(self) -> tuple[str, int]:
        """Id of its node, and its process id there."""
        return ray.get_runtime_context().get_node_id(), os.getpid()

    async def load(self) -> int:
        """Requests that are worked on or wait."""
        return self._count()

    async def check_health(self) -> None:
        """Raise if the object says that it cannot go on."""
        check = getattr(self._target, "check_health", None)
        if check is not None:
            await asyncio.get_running_loop().run_in_executor(None, check)

    async def until_the_end(self) -> None:
        """Never returns: the caller hears at once when this process ends."""
        await self._end.wait()

    async def drain(self) -> None:
        """Take no more requests, and return when the last one is answered."""
        self._is_draining = True
        futures = [asyncio.wrap_future(each) for each in self._requests.values() if not each.done()]
        await asyncio.gather(*futures, return_exceptions=True)

    def _run(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            return getattr(self._target, method)(*args, **kwargs)
        except Exception:
            if (reason := self._why_unhealthy()) is not None:
                return Unhealthy(reason)
            raise

    def _why_unhealthy(self) -> str | None:
        try:
            getattr(self._target, "check_health", lambda: None)()
        except Exception as error:
            return str(error)
        return None

    def _is_full(self) -> bool:
        queued = self._deployment.max_queued_requests
        if self._is_draining:
            return True
        return (
            queued is not None and self._count() >= self._deployment.max_ongoing_requests + queued
        )

    def _count(self) -> int:
        return sum(not future.done() for future in self._requests.values())

    def _forget_old(self) -> None:
        done = [id for id, future in self._requests.items() if future.done()]
        for id in done[:-KEPT_ANSWERS]:
            del self._requests[id]


def _see_own_devices() -> None:
    """Hide those of other actors from this one, before anything looks for devices."""
    if ray.is_initialized():  # to ask where it is not would start it
        ids = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
        os.environ.update(narrowed(ids))


def _make(deployment: Deployment, index: int) -> Any:
    """The object itself; its process's log goes to a file of the run."""
    if deployment.logs_dir is None:
        return deployment.cls(**deployment.kwargs)
    path = f"{deployment.logs_dir}/{deployment.role}_{index}.log"
    log_to_file(path)
    target = deployment.cls(**deployment.kwargs)
    log_to_file(path)  # libraries that came in meanwhile have brought their own loggers
    return target
