"""One replica of a deployment: a plain object behind a queue that is bounded and knows its ids."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import threading
import time
import traceback
import uuid
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import ray

from raypo.cluster.devices import narrowed
from raypo.deployment.spec import Deployment, Life, Refused, Request, Unhealthy, Unprepared
from raypo.tracking.logs import log_to_file

NEWS_S, LOOK_EVERY_S = 1.0, 0.05
"""Seconds that one who listens for entries of an answer waits for some, and how often it looks."""
KEPT_ANSWERS = 32
"""Answers that a replica remembers, for callers that did not get theirs and ask again."""


class Replica:
    """Runs as a Ray actor whose event loop stays free: it tells its load and health at work.

    The object is made and called in threads of a pool; with one ongoing request at a time, all
    happens in one thread. With several, what is asked of this very life (a push) has a thread of
    its own, so that it keeps its order and never waits for the others to end. Where a method
    returns futures, the answer is what they come to, and no thread waits for them.

    Where the process ends, Ray starts the actor again, in the same bundle and with the same
    environment; the object then knows nothing of what it was told before, and each request says
    what must be done first.
    """

    def __init__(self, deployment: Deployment, index: int, bundle: int = 0) -> None:
        self._deployment, self._index, self._bundle = deployment, index, bundle
        self._target: Any = None  # `repr` is asked even where it cannot be made
        self._life = uuid.uuid4().hex
        self._requests: OrderedDict[str, asyncio.Future[Any]] = OrderedDict()
        self._come: dict[str, list[tuple[int, Any]]] = {}
        """By request, entries of its answer with their places, in the order in which they came."""
        self._is_draining = False
        self._making = threading.Lock()
        """Held where the object is made, or told what it has to hold."""
        self._pool = ThreadPoolExecutor(deployment.max_ongoing_requests, "replica")
        has_one_thread = deployment.max_ongoing_requests == 1
        self._line = self._pool if has_one_thread else ThreadPoolExecutor(1, "replica-line")
        is_again = False
        if ray.is_initialized():  # to ask where it is not would start it
            context = ray.get_runtime_context()
            is_again = context.was_current_actor_reconstructed
            # Hide the devices of other actors before anything looks for some.
            os.environ.update(narrowed(context.get_accelerator_ids().get("GPU", [])))
        if deployment.takes_turns and is_again:
            return
        try:
            self._pool.submit(self._made).result()
        except Exception:
            if not is_again:
                raise
            traceback.print_exc()  # the memory of its last life may not be free yet
            os._exit(1)  # for Ray to start it again, as often as it may

    def __repr__(self) -> str:
        if self._target is None:
            return f"{type(self).__name__}(not made)"
        return repr(self._target)

    async def call(self, request: Request) -> Any:
        """What the object's method returns; a request that is known by its id is not run twice.

        Returns:
            The answer; or `Refused` where the queue is full, `Unprepared` where what comes first
            failed, `Unhealthy` where the request is not for this life, or the method failed and
            the object says that it cannot go on.
        """
        if request.life not in (None, self._life):
            return Unhealthy("it was started again in the middle of this", request.life or "")
        answer = self._requests.get(request.id)
        if answer is None or answer.cancelled():
            if request.life is None and self._is_full():
                return Refused()
            answer = asyncio.ensure_future(self._answer(request))
            self._requests[request.id] = answer
            self._forget_old()
        if request.part is None:
            return await answer  # a caller that gives up cancels it, and what it was promised
        whole = await asyncio.shield(answer)  # others wait for it too
        return [whole[place] for place in request.part] if isinstance(whole, list) else whole

    async def news(
        self, id: str, part: tuple[int, ...] | None, num_seen: int
    ) -> tuple[int, dict[int, Any]]:
        """Entries of a request's answer that have come, where it is a list of futures.

        Args:
            id: Of the request.
            part: As that of the request.
            num_seen: How many had come when this was last asked.

        Returns:
            How many have come, and those that are new and wanted by their places in the part.
        """
        end = time.monotonic() + NEWS_S
        while len(self._come.get(id, ())) <= num_seen and time.monotonic() < end:
            await asyncio.sleep(LOOK_EVERY_S)
        come = self._come.get(id, [])
        news = dict(come[num_seen:])
        if part is not None:
            news = {place: news[number] for place, number in enumerate(part) if number in news}
        return len(come), news

    async def where(self) -> Life:
        """Which life of the replica this is, and where."""
        node_id = ray.get_runtime_context().get_node_id()
        return Life(self._life, node_id, os.getpid(), self._bundle)

    async def load(self) -> int:
        """Requests that are worked on or wait."""
        return self._count()

    async def health(self) -> Unhealthy | None:
        """What is wrong, if the object says that it cannot go on."""
        return await asyncio.get_running_loop().run_in_executor(None, self._what_is_wrong)

    async def leave(self, life: str) -> None:
        """End this process, for Ray to start the replica again; a later life goes on.

        Processes that it has started may hang too, with a device in their hands.
        """
        if life == self._life:
            for each in multiprocessing.active_children():
                each.kill()
            os._exit(1)

    async def drain(self) -> None:
        """Take no more requests, and return when the last one is answered."""
        self._is_draining = True
        under_way = [each for each in self._requests.values() if not each.done()]
        await asyncio.gather(*under_way, return_exceptions=True)

    async def _answer(self, request: Request) -> Any:
        pool = self._pool if request.life is None else self._line
        made = pool.submit(self._run, request)
        try:
            answer = await asyncio.wrap_future(made)
        except asyncio.CancelledError:
            made.add_done_callback(_cancel_promised)  # nobody waits for what it is about to promise
            raise
        if not isinstance(answer, list) or not any(isinstance(each, Future) for each in answer):
            return answer
        come = self._come[request.id] = []
        try:
            return await asyncio.gather(
                *(_noted(number, each, come) for number, each in enumerate(answer))
            )
        except Exception:
            if (wrong := self._what_is_wrong()) is not None:
                return wrong
            raise

    def _run(self, request: Request) -> Any:
        if self._target is None and request.method in ("sleep", "wake_up"):
            return None  # it has no memory to give, and takes what it needs when it is made
        if self._target is None and request.method == "peak_memory":
            return Unprepared("it is not made yet, and a look at it is no reason to make it")
        try:
            target = self._made()
        except Exception as error:
            traceback.print_exc()
            return Unhealthy(f"it could not be made: {type(error).__name__}: {error}", self._life)
        try:
            if request.required is not None:
                method, arguments = request.required
                with self._making:
                    getattr(target, method)(*arguments)
        except Exception as error:
            return self._what_is_wrong() or Unprepared(f"{type(error).__name__}: {error}")
        # No push meets a request that makes up for the one before.
        of_this_life = self._making if request.life is not None else nullcontext()
        try:
            with of_this_life:
                return getattr(target, request.method)(*request.args, **request.kwargs)
        except Exception:
            if (wrong := self._what_is_wrong()) is not None:
                return wrong
            raise

    def _made(self) -> Any:
        """The object itself; its process's log goes to a file of the run."""
        with self._making:
            if self._target is None:
                deployment, path = self._deployment, None
                if deployment.logs_dir is not None:
                    path = f"{deployment.logs_dir}/{deployment.role}_{self._index}.log"
                    log_to_file(path)
                self._target = deployment.cls(**deployment.kwargs)
                if path is not None:
                    log_to_file(path)  # libraries have brought their own loggers meanwhile
        return self._target

    def _what_is_wrong(self) -> Unhealthy | None:
        try:
            getattr(self._target, "check_health", lambda: None)()
        except Exception as error:
            return Unhealthy(str(error), self._life)
        limit = self._deployment.stall_timeout_s
        stalled_s = getattr(self._target, "stalled_s", lambda: 0.0)()
        if limit is None or stalled_s <= limit:
            return None
        reason = f"it has not got on for {stalled_s:.0f} s (stall_timeout_s: {limit:g})"
        return Unhealthy(reason, self._life)

    def _is_full(self) -> bool:
        queued = self._deployment.max_queued_requests
        if self._is_draining:
            return True
        return (
            queued is not None and self._count() >= self._deployment.max_ongoing_requests + queued
        )

    def _count(self) -> int:
        return sum(not each.done() for each in self._requests.values())

    def _forget_old(self) -> None:
        done = [id for id, answer in self._requests.items() if answer.done()]
        for id in done[:-KEPT_ANSWERS]:
            del self._requests[id]
            self._come.pop(id, None)


def _cancel_promised(made: Future[Any]) -> None:
    if not made.cancelled() and made.exception() is None and isinstance(made.result(), list):
        for each in made.result():
            if isinstance(each, Future):
                each.cancel()


async def _noted(number: int, promised: Future[Any], come: list[tuple[int, Any]]) -> Any:
    """What a future comes to, noted where others look for it."""
    entry = await asyncio.wrap_future(promised)
    come.append((number, entry))
    return entry
