"""One replica of a deployment: a Ray actor around a plain object.

Concurrency. The actor's methods are coroutines on one event loop, which never blocks, so health is
reported while the object works. The object itself runs in threads:

- `_pool`, one thread for each ongoing call (`max_ongoing_requests`), builds the object and runs its
  methods.
- `_control_pool`, one thread for control calls (a push of weights, sleep). Control calls run in
  order. They never wait for the method of an ongoing call. They wait only while an ongoing call
  runs its prerequisite, a method that restores the object's state (such as loading the weights).
  If only one ongoing call is allowed, `_control_pool` is `_pool`.

A daemon thread exports the number of calls as a gauge.

If a method returns futures, the coroutine awaits them and no thread waits.

If the process ends, Ray starts the actor again, in the same bundle and with the same environment.
The object has then lost its earlier state. Each call brings a prerequisite (a method and its
arguments) that restores the state.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import threading
import time
import traceback
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import ray

from raypo.cluster.devices import narrowed
from raypo.deployment.gauges import export_gauges
from raypo.deployment.spec import Call, Deployment, Lost, Status, Unprepared
from raypo.tracking.logs import log_to_file

ENTRIES_WAIT_S, ENTRIES_POLL_S = 1.0, 0.05
"""Longest time that `entries` waits for a further result, and its polling interval, in seconds."""
KEPT_RESULTS = 32
"""Number of finished calls whose value is kept, for callers that retry."""
EXIT_DELAY_S = 0.2
"""Seconds before a replica ends its own process, so that its last replies are sent."""


class Replica:
    """One replica. It runs each call id once, and reports its health."""

    def __init__(self, deployment: Deployment, index: int, bundle: int = 0) -> None:
        """Build the object.

        A restarted replica of a deployment with `takes_turns` builds it at the first call instead.
        """
        self._deployment, self._index, self._bundle = deployment, index, bundle
        self._target: Any = None  # set first: Ray calls `repr` even if the constructor fails
        self._calls: OrderedDict[str, asyncio.Future[Any]] = OrderedDict()
        self._ready: dict[str, list[tuple[int, Any]]] = {}
        """Results of each call that returned a list of futures: (index in the list, result), in the
        order in which they became ready."""
        self._preparing = threading.Lock()
        """Held while the object is built, and while a prerequisite or a control call runs."""
        self._pool = ThreadPoolExecutor(deployment.max_ongoing_requests, "replica")
        self._control_pool = self._pool
        if deployment.max_ongoing_requests > 1:
            self._control_pool = ThreadPoolExecutor(1, "replica-control")
        # No one sets the event: the thread ends with the process of the replica.
        export_gauges("replica", lambda: {"calls": self._num_calls()}, threading.Event())
        is_restart = False
        if ray.is_initialized():  # `get_runtime_context` would start Ray otherwise
            context = ray.get_runtime_context()
            is_restart = context.was_current_actor_reconstructed
            # Hide the devices of other actors before any library looks for them.
            os.environ.update(narrowed(context.get_accelerator_ids().get("GPU", [])))
        if deployment.takes_turns and is_restart:
            return
        try:
            self._pool.submit(self._built).result()
        except Exception:
            if not is_restart:
                raise
            traceback.print_exc()  # memory of the last process may not be free yet
            os._exit(1)  # Ray restarts it, up to `max_restarts` times

    def __repr__(self) -> str:
        if self._target is None:
            return f"{type(self).__name__}(not built)"
        return repr(self._target)

    async def call(self, call: Call) -> Any:
        """Run a method of the object. A call whose id is known is not run again.

        Returns:
            The method's value, or `Unprepared` if the call's prerequisite failed, or `Lost` if the
            method failed and the object cannot serve further calls.
        """
        value = self._calls.get(call.id)
        if value is None or value.cancelled():
            value = asyncio.ensure_future(self._value(call))
            self._calls[call.id] = value
            self._forget_old()
        return await value  # a caller that gives up cancels the call and its futures

    async def entries(self, id: str, num_seen: int) -> dict[int, Any]:
        """Wait briefly for further results of a call that returned a list of futures.

        Args:
            id: Id of the call.
            num_seen: Number of results that were ready at the caller's last request.

        Returns:
            The new results by their index in the list.
        """
        end = time.monotonic() + ENTRIES_WAIT_S
        while len(self._ready.get(id, ())) <= num_seen and time.monotonic() < end:
            await asyncio.sleep(ENTRIES_POLL_S)
        return dict(self._ready.get(id, [])[num_seen:])

    async def status(self) -> Status:
        """Return location, load and problem of this process. A process with a problem then ends."""
        problem = self._problem()
        if problem is not None:
            self._end_soon()
        node_id = ray.get_runtime_context().get_node_id()
        return Status(node_id, os.getpid(), self._bundle, self._num_calls(), problem)

    async def drain(self) -> None:
        """Wait until all ongoing calls have ended."""
        ongoing = [each for each in self._calls.values() if not each.done()]
        await asyncio.gather(*ongoing, return_exceptions=True)

    async def _value(self, call: Call) -> Any:
        running = (self._control_pool if call.is_control else self._pool).submit(self._run, call)
        try:
            value = await asyncio.wrap_future(running)
            if isinstance(value, list) and any(isinstance(each, Future) for each in value):
                ready = self._ready[call.id] = []
                value = await asyncio.gather(
                    *(_recorded(index, each, ready) for index, each in enumerate(value))
                )
        except asyncio.CancelledError:
            # The thread still runs the method; cancel the futures that it may return.
            running.add_done_callback(_cancel_futures)
            raise
        except Exception:
            problem = self._problem()
            if problem is None:
                raise
            value = Lost(problem)
        if isinstance(value, Lost):
            self._end_soon()
        return value

    def _run(self, call: Call) -> Any:
        if self._target is None and call.method in ("sleep", "wake_up"):
            return None  # no object yet, so no memory to move
        if self._target is None and call.method == "peak_memory":
            return Unprepared("it is not built yet, and this call does not build it")
        try:
            target = self._built()
        except Exception as error:
            traceback.print_exc()
            return Lost(f"it could not be built: {type(error).__name__}: {error}")
        try:
            if call.prerequisite is not None:
                method, arguments = call.prerequisite
                with self._preparing:
                    getattr(target, method)(*arguments)
        except Exception as error:
            problem = self._problem()
            return Lost(problem) if problem else Unprepared(f"{type(error).__name__}: {error}")
        # Without the lock, a prerequisite that is fetching the last push could overwrite the
        # weights of a newer push.
        with self._preparing if call.is_control else nullcontext():
            return getattr(target, call.method)(*call.args, **call.kwargs)

    def _built(self) -> Any:
        """Return the object, which the first call builds. Library logs go to a file of the run."""
        with self._preparing:
            if self._target is None:
                deployment, path = self._deployment, None
                if deployment.logs_dir is not None:
                    path = f"{deployment.logs_dir}/{deployment.role}_{self._index}.log"
                    log_to_file(path)
                self._target = deployment.cls(**deployment.kwargs)
                if path is not None:
                    log_to_file(path)  # libraries have added loggers of their own meanwhile
        return self._target

    def _problem(self) -> str | None:
        """Return the reason why the object cannot go on. None means that it can."""
        try:
            getattr(self._target, "check_health", lambda: None)()
        except Exception as error:
            return str(error)
        limit = self._deployment.stall_timeout_s
        stalled_s = getattr(self._target, "stalled_s", lambda: 0.0)()
        if limit is None or stalled_s <= limit:
            return None
        return f"it made no progress for {stalled_s:.0f} s (stall_timeout_s: {limit:g})"

    def _end_soon(self) -> None:
        """End this process once the reply is sent, so that Ray restarts the replica."""
        asyncio.get_running_loop().call_later(EXIT_DELAY_S, _end_process)

    def _num_calls(self) -> int:
        return sum(not each.done() for each in list(self._calls.values()))

    def _forget_old(self) -> None:
        done = [id for id, value in self._calls.items() if value.done()]
        for id in done[:-KEPT_RESULTS]:
            del self._calls[id]
            self._ready.pop(id, None)


def _end_process() -> None:
    # Child processes may hang too, and hold a device: kill them first.
    for each in multiprocessing.active_children():
        each.kill()
    os._exit(1)


def _cancel_futures(running: Future[Any]) -> None:
    if not running.cancelled() and running.exception() is None:
        value = running.result()
        for each in value if isinstance(value, list) else ():
            if isinstance(each, Future):
                each.cancel()


async def _recorded(index: int, future: Future[Any], ready: list[tuple[int, Any]]) -> Any:
    """Await one future of a list, and note its result as ready, so that `entries` can return it."""
    entry = await asyncio.wrap_future(future)
    ready.append((index, entry))
    return entry
