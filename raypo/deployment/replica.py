"""One replica of a deployment: `ReplicaClient` in the callers' processes, and the actor `Replica`.

Concurrency in a caller's process: coroutines run on the background loop (`raypo.concurrency`).
While calls to a replica are pending, a task on this loop checks the replica's health. A replica
that does not respond is killed. Its pending calls then fail, and Ray restarts it.

Concurrency in the actor: coroutines run on one event loop, which never blocks, so the replica can
report its health while the object works. The object itself runs in threads:

- `_pool` has one thread per ongoing request (`max_ongoing_requests`). If a method returns futures,
  the coroutine awaits them, which blocks no thread.
- `_control_pool` has one thread for control calls (such as a weight push or sleep), which run in
  order, and for urgent requests. These calls do not wait for other requests. They only wait for a
  running prerequisite: a method that restores the object's state, such as loading the weights. If
  only one ongoing request is allowed, `_control_pool` is `_pool`.

When Ray restarts the process, the object has no state until the next prerequisite has run.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import threading
import time
import traceback
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from enum import Enum
from typing import Any, Concatenate, ParamSpec, TypeVar

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorUnavailableError, RayActorError, RayError

from raypo.cluster.actors import DeploymentError, ReplicaLost, is_lost_actor
from raypo.cluster.devices import visible_device_env
from raypo.concurrency import background_future, daemon_future
from raypo.deployment.gauges import export_gauges
from raypo.deployment.spec import Call, Deployment, PrerequisiteFailed, Status
from raypo.pending_work import Work, at_work
from raypo.tracking.logs import CONSOLE_KEY, log_to_file
from raypo.tracking.trace import trace_call

P = ParamSpec("P")
T = TypeVar("T")
Method = Callable[Concatenate[Any, P], T]
"""A method of the deployment's class, such as `Engine.submit`. Only its name is sent."""
OnPartialResult = Callable[[int, Any], object]
"""Callback `(index, result)` for each result of a list of futures that is ready before the whole
list. Called from any thread, possibly twice for the same index."""

AVOID_LOST_REPLICA_S = 4.0
"""Seconds during which requests avoid a replica after it was lost. While Ray 2.60 restarts a
replica, each call to it blocks for 2 s."""
PROBE_TIMEOUT_S = 3.0
"""Seconds after which a replica that does not respond counts as busy or starting."""
PARTIAL_RESULTS_WAIT_S, PARTIAL_RESULTS_POLL_S = 1.0, 0.05
"""Maximum time that `partial_results` waits for a new result, and its polling interval, in seconds.
"""
MAX_CACHED_REPLIES = 32
"""Maximum number of finished requests whose reply is cached, for callers that retry."""
EXIT_DELAY_S = 0.2
"""Delay in seconds before a replica ends its own process, so that its last replies are sent."""
REPLIES_WHEN_UNBUILT = {
    "sleep": None,  # there is no memory to move yet
    "wake_up": None,
    "peak_memory": PrerequisiteFailed("it is not built yet, and this call does not build it"),
}
"""Replies to control calls that do not trigger the build of an unbuilt object."""

logger = logging.getLogger(__name__)


class ReplicaState(Enum):
    """State of a replica, as a caller sees it. It does not cover permanent loss."""

    STARTING = "starting"
    """No reply received yet. A health check may take up to `start_timeout_s`."""
    UP = "up"
    """The replica has replied, and has not been lost since."""
    LOST = "lost"
    """The replica was up and then was lost. Ray restarts it."""


class ReplicaClient:
    """Client of one replica, which is a named actor that is looked up at the first use."""

    def __init__(self, deployment: Deployment, namespace: str, index: int) -> None:
        self.deployment, self.namespace, self.index = deployment, namespace, index
        self.num_waiting = 0
        """Number of pending calls from this process to the replica."""
        self.state = ReplicaState.STARTING
        self.permanent_error: Exception | None = None
        """Error of a replica that Ray does not restart. None while the replica is usable."""
        self._actor: ActorHandle | None = None
        self._avoid_until = 0.0
        self._unavailable_since: float | None = None
        self._health_checks: asyncio.Task[None] | None = None
        self._calls: set[Work] = set()
        """Calls of this process that wait for the replica, for the watchdog."""
        self._num_moves = 0
        """`Status.num_moves` at the last health check."""

    def __reduce__(self) -> Any:
        return ReplicaClient, (self.deployment, self.namespace, self.index)

    @property
    def name(self) -> str:
        """Name of the replica's actor."""
        return f"{self.deployment.name}:{self.index}"

    @property
    def was_lost_recently(self) -> bool:
        """True if the replica was lost so recently that requests should avoid it."""
        return time.monotonic() < self._avoid_until

    @property
    def unavailable_s(self) -> float:
        """Seconds since the replica was lost or stopped responding. 0 if it is available."""
        return (
            0.0 if self._unavailable_since is None else time.monotonic() - self._unavailable_since
        )

    def control(self, method: Method[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Call a method ahead of queued requests. Control calls run in order and are not retried.

        Raises:
            ReplicaLost: raised by the future: the replica is down, or ended before it replied.
            DeploymentError: raised by the future: no reply within `request_timeout_s`.
        """

        async def send_control() -> Any:
            async with call_timeout(self.deployment), self._track_call(method.__name__):
                ref = self._actor_handle().control.remote(method.__name__, args, kwargs)
                try:
                    return self._unwrap_reply(await ref)
                except asyncio.CancelledError:  # timed out, possibly before the call started
                    ray.cancel(ref)
                    raise

        return background_future(send_control())

    async def send(self, call: Call, on_partial_result: OnPartialResult | None = None) -> Any:
        """Send a request and wait for the reply.

        Raises:
            PrerequisiteFailed: the prerequisite of the request failed.
            ReplicaLost: the replica ended before it replied.
            Exception: the error of the replica's method.
        """
        partial_results_task = None
        try:
            async with self._track_call(call.method):
                ref = self._actor_handle().call.remote(call)
                if on_partial_result is not None:
                    partial_results_task = asyncio.create_task(
                        self._poll_partial_results(call, on_partial_result)
                    )
                try:
                    return self._unwrap_reply(await ref)
                except asyncio.CancelledError:  # the caller gave up, so stop the replica's work
                    ray.cancel(ref)
                    raise
        finally:
            if partial_results_task is not None:
                partial_results_task.cancel()

    async def check_health(self, timeout_s: float | None, *, kill_on_timeout: bool = False) -> bool:
        """Return True if the replica is up. It is not up while it starts or reports a problem.

        Args:
            timeout_s: Seconds to wait for the status. None means no limit.
            kill_on_timeout: Whether to kill a replica that does not respond in time. A starting
                replica is killed only after `start_timeout_s`.
        """
        try:
            status = await asyncio.wait_for(self._actor_handle().status.remote(), timeout_s)
        except TimeoutError:
            if kill_on_timeout:
                self._unavailable_since = self._unavailable_since or time.monotonic()
                start_timeout_s = self.deployment.start_timeout_s
                if self.state is ReplicaState.UP or (
                    start_timeout_s is not None and self.unavailable_s > start_timeout_s
                ):
                    self._kill(f"no answer to a health check in {timeout_s:g} s")
            return False
        except RayError as error:
            self._record_actor_error(error)
            return False
        self._record_health(status.problem)
        if status.num_moves != self._num_moves:
            self._num_moves = status.num_moves
            for call in self._calls:
                call.moved()
        return status.problem is None

    async def shut_down(self, grace_s: float) -> None:
        """Shut down the replica permanently after its requests end, or after `grace_s` seconds."""
        if await self.check_health(PROBE_TIMEOUT_S):
            with suppress(RayError, TimeoutError):
                await asyncio.wait_for(self._actor_handle().drain.remote(), grace_s)
        with suppress(RayError):
            ray.kill(self._actor_handle())

    def _actor_handle(self) -> Any:
        if self._actor is None:
            try:
                self._actor = ray.get_actor(self.name, self.namespace)
            except ValueError as error:
                raise RayActorError(error_msg=str(error)) from None
        return self._actor

    @asynccontextmanager
    async def _track_call(self, method: str) -> AsyncIterator[None]:
        """Check the replica's health while the call is pending, and trace the call."""
        sent_at = time.time()
        self.num_waiting += 1
        if self._health_checks is None:
            self._health_checks = asyncio.create_task(self._health_check_loop())
        name = f"{self.deployment.role} {self.index} ({method})"
        try:
            with at_work(name, replica=self.name, in_thread=False) as call:
                self._calls.add(call)
                try:
                    yield
                finally:
                    self._calls.discard(call)
        except RayError as error:
            self._record_actor_error(error)
            raise ReplicaLost(f"{self.name}: the replica was lost: {error}") from None
        finally:
            self.num_waiting -= 1
            if not self.num_waiting:
                self._health_checks.cancel()
                self._health_checks = None
        trace_call(self.name, method, sent_at, time.time())

    async def _health_check_loop(self) -> None:
        while True:
            await asyncio.sleep(self.deployment.health_check_period_s)
            await self.check_health(self.deployment.health_check_timeout_s, kill_on_timeout=True)

    async def _poll_partial_results(self, call: Call, on_partial_result: OnPartialResult) -> None:
        num_seen = 0
        with suppress(RayError):  # `send` reports the error
            while True:
                results = await self._actor_handle().partial_results.remote(call.id, num_seen)
                num_seen += len(results)
                for index, result in results.items():
                    await asyncio.to_thread(on_partial_result, index, result)

    def _unwrap_reply(self, reply: Any) -> Any:
        """Return the reply, or raise it if it is an error that the replica returned."""
        if not isinstance(reply, ReplicaLost):
            self._record_health(None)
            return reply
        self._record_health(None if isinstance(reply, PrerequisiteFailed) else str(reply))
        raise type(reply)(f"{self.name}: {reply}")

    def _record_health(self, problem: str | None) -> None:
        if problem is not None:
            self._record_lost(problem)
            return
        if self.state is ReplicaState.LOST:
            self._log_event("is back", f"is back after {self.unavailable_s:.0f} s")
        self.state, self._avoid_until, self._unavailable_since = ReplicaState.UP, 0.0, None

    def _record_actor_error(self, error: Exception) -> None:
        """Record that the actor is restarting or permanently lost. Re-raise any other error."""
        if not is_lost_actor(error):
            raise error
        if not isinstance(error, ActorUnavailableError):
            self.permanent_error = error
        self._record_lost(str(error).partition("\n")[0])

    def _record_lost(self, reason: str) -> None:
        if self.state is ReplicaState.UP:  # log the loss only once
            self._log_event(
                "was lost",
                f"was lost{'' if self.permanent_error else ' and is restarted'}: {reason}",
            )
            self.state = ReplicaState.LOST
        now = time.monotonic()
        self._avoid_until, self._unavailable_since = (
            now + AVOID_LOST_REPLICA_S,
            self._unavailable_since or now,
        )

    def _log_event(self, event: str, text: str) -> None:
        replica = f"{self.deployment.role} {self.index}"
        logger.warning("%s %s", replica, text, extra={CONSOLE_KEY: f"{self.name} {event}"})

    def _kill(self, reason: str) -> None:
        self._record_lost(f"{reason} (health_check_timeout_s), so it is killed")
        ray.kill(self._actor_handle(), no_restart=False)


@asynccontextmanager
async def call_timeout(deployment: Deployment) -> AsyncIterator[None]:
    """Limit the duration of a call, including its retries, to `request_timeout_s`.

    Raises:
        DeploymentError: the call timed out.
    """
    timeout = asyncio.timeout(deployment.request_timeout_s)
    try:
        async with timeout:
            yield
    except TimeoutError:
        if not timeout.expired():  # the method itself raised it
            raise
        raise DeploymentError(
            f"{deployment.name}: no answer in {deployment.request_timeout_s:g} s. Look at its log "
            f"in the Ray dashboard, or raise placement.deployment.request_timeout_s."
        ) from None


class LocalReplica(ReplicaClient):
    """Replica that wraps an object of this process, for handles without a deployment."""

    def __init__(self, target: Any, index: int = 0) -> None:
        super().__init__(Deployment("local", type(target), {}), "", index)
        self._target = target

    def control(self, method: Method[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Call the method in a thread."""
        function = getattr(self._target, method.__name__)
        return daemon_future(lambda: function(*args, **kwargs), name="local-replica")

    async def send(self, call: Call, on_partial_result: OnPartialResult | None = None) -> Any:
        """Run the request in a thread. If it returns a list of futures, await all of them.

        The object is never restarted, so the prerequisite need not run.
        """
        function = getattr(self._target, call.method)
        method_future = daemon_future(
            lambda: function(*call.args, **call.kwargs), name="local-replica"
        )
        value = await asyncio.wrap_future(method_future)
        if isinstance(value, list) and all(isinstance(item, Future) for item in value):
            value = await asyncio.gather(*map(asyncio.wrap_future, value))
        return value

    async def check_health(self, timeout_s: float | None, *, kill_on_timeout: bool = False) -> bool:
        """Return True: the object is always up."""
        return True


class Replica:
    """Actor that wraps the object. It runs each request id only once, and reports its health."""

    def __init__(self, deployment: Deployment, index: int) -> None:
        """Build the object, unless `builds_lazily_on_restart` defers it to the first call."""
        self._deployment, self._index = deployment, index
        self._target: Any = None  # set early: Ray calls `repr` even if the constructor fails
        self._replies: OrderedDict[str, asyncio.Future[Any]] = OrderedDict()
        self._partial_results: dict[str, list[tuple[int, Any]]] = {}
        """Partial results (index in the list, result) by request id, in the order in which they
        became ready. Only for requests that returned a list of futures."""
        self._lock = threading.Lock()
        """Lock held while the object is built, and while a prerequisite or a control call runs.
        Without it, a prerequisite that loads the last push could overwrite newer weights."""
        self._pool = ThreadPoolExecutor(deployment.max_ongoing_requests, "replica")
        self._control_pool = self._pool
        if deployment.max_ongoing_requests > 1:
            self._control_pool = ThreadPoolExecutor(1, "replica-control")
        # Nothing sets the event: the thread ends with the replica's process.
        export_gauges("replica", lambda: {"calls": self._num_calls()}, threading.Event())
        is_restart = False
        if ray.is_initialized():  # `get_runtime_context` would start Ray otherwise
            context = ray.get_runtime_context()
            is_restart = context.was_current_actor_reconstructed
            # Hide the devices of other actors before any library looks for them.
            os.environ.update(visible_device_env(context.get_accelerator_ids().get("GPU", [])))
        if deployment.builds_lazily_on_restart and is_restart:
            return
        try:
            self._pool.submit(self._build).result()
        except Exception:
            if not is_restart:
                raise
            traceback.print_exc()  # the last process may not have freed its memory yet
            os._exit(1)  # Ray restarts the replica, up to `max_restarts` times

    def __repr__(self) -> str:
        if self._target is None:
            return f"{type(self).__name__}(not built)"
        return repr(self._target)

    async def control(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a control call (see the module's docstring).

        Returns:
            The method's return value, or `ReplicaLost` if the object can no longer work.
        """

        def invoke() -> Any:
            with self._lock:
                if self._target is None and method in REPLIES_WHEN_UNBUILT:
                    return REPLIES_WHEN_UNBUILT[method]
                return getattr(self._ensure_built(), method)(*args, **kwargs)

        try:
            return await asyncio.wrap_future(self._control_pool.submit(invoke))
        except Exception as error:
            return self._reply_for_error(error)

    async def call(self, call: Call) -> Any:
        """Run a request. A request with an id that was already received is not run again.

        Returns:
            The method's return value, or `PrerequisiteFailed` if the prerequisite failed, or
            `ReplicaLost` if the object can no longer work.
        """
        reply = self._replies.get(call.id)
        if reply is None or reply.cancelled():
            reply = self._replies[call.id] = asyncio.ensure_future(self._execute(call))
            self._evict_old_replies()
        return await reply  # if the caller cancels, the request and its futures are cancelled too

    async def partial_results(self, request_id: str, num_seen: int) -> dict[int, Any]:
        """Wait briefly for new results of a request that returned a list of futures.

        Args:
            request_id: Id of the request.
            num_seen: Number of results that the caller has already received.

        Returns:
            The new results, by index in the list.
        """
        end = time.monotonic() + PARTIAL_RESULTS_WAIT_S
        while len(self._partial_results.get(request_id, ())) <= num_seen and time.monotonic() < end:
            await asyncio.sleep(PARTIAL_RESULTS_POLL_S)
        return dict(self._partial_results.get(request_id, [])[num_seen:])

    async def status(self) -> Status:
        """Return node, load and problem of this process. A problem also ends the process."""
        problem = self._find_problem()
        if problem is not None:
            self._schedule_exit()
        node_id = ray.get_runtime_context().get_node_id()
        num_moves = getattr(self._target, "num_moves", lambda: 0)()
        return Status(node_id, os.getpid(), self._num_calls(), problem, num_moves)

    async def drain(self) -> None:
        """Wait until all ongoing requests have ended."""
        ongoing = [reply for reply in self._replies.values() if not reply.done()]
        await asyncio.gather(*ongoing, return_exceptions=True)

    async def _execute(self, call: Call) -> Any:
        pool = self._control_pool if call.is_urgent else self._pool
        method_future = pool.submit(self._invoke, call)
        try:
            value = await asyncio.wrap_future(method_future)
            if isinstance(value, list) and any(isinstance(item, Future) for item in value):
                partial_results = self._partial_results[call.id] = []
                value = await asyncio.gather(
                    *(
                        _await_and_record(index, item, partial_results)
                        for index, item in enumerate(value)
                    )
                )
            return value
        except asyncio.CancelledError:
            # The thread continues to run the method. Cancel the futures that it may return.
            method_future.add_done_callback(_cancel_futures)
            raise
        except Exception as error:
            return self._reply_for_error(error)

    def _invoke(self, call: Call) -> Any:
        with self._lock:
            target = self._ensure_built()
            if call.prerequisite is not None:
                method, arguments = call.prerequisite
                try:
                    getattr(target, method)(*arguments)
                except Exception as error:
                    raise PrerequisiteFailed(f"{type(error).__name__}: {error}") from error
        return getattr(target, call.method)(*call.args, **call.kwargs)

    def _ensure_built(self) -> Any:
        """Return the object, and build it first if necessary."""
        if self._target is None:
            try:
                self._build()
            except Exception as error:
                traceback.print_exc()
                raise BuildError(
                    f"it could not be built: {type(error).__name__}: {error}"
                ) from error
        return self._target

    def _build(self) -> None:
        """Build the object, and redirect library logs to a file of the run."""
        deployment, path = self._deployment, None
        if deployment.logs_dir is not None:
            path = f"{deployment.logs_dir}/{deployment.role}_{self._index}.log"
            log_to_file(path)
        self._target = deployment.cls(**deployment.kwargs)
        if path is not None:
            log_to_file(path)  # again, for loggers that the libraries have added since

    def _reply_for_error(self, error: Exception) -> Exception:
        """Return ReplicaLost or PrerequisiteFailed if the replica itself failed.

        Otherwise re-raise the method's error.
        """
        problem = str(error) if isinstance(error, BuildError) else self._find_problem()
        if problem is not None:
            self._schedule_exit()
            return ReplicaLost(problem)
        if isinstance(error, PrerequisiteFailed):
            return PrerequisiteFailed(*error.args)
        raise error

    def _find_problem(self) -> str | None:
        """Return the reason why the object can no longer work, or None if it is healthy."""
        try:
            getattr(self._target, "check_health", lambda: None)()
        except Exception as error:
            return str(error)
        stall_timeout_s = self._deployment.stall_timeout_s
        stalled_s = getattr(self._target, "stalled_s", lambda: 0.0)()
        if stall_timeout_s is None or stalled_s <= stall_timeout_s:
            return None
        return f"it made no progress for {stalled_s:.0f} s (stall_timeout_s: {stall_timeout_s:g})"

    def _schedule_exit(self) -> None:
        """Exit this process once the reply has been sent, so that Ray restarts the replica."""
        asyncio.get_running_loop().call_later(EXIT_DELAY_S, _exit_process)

    def _num_calls(self) -> int:
        return sum(not reply.done() for reply in list(self._replies.values()))

    def _evict_old_replies(self) -> None:
        finished_ids = [request_id for request_id, reply in self._replies.items() if reply.done()]
        for request_id in finished_ids[:-MAX_CACHED_REPLIES]:
            del self._replies[request_id]
            self._partial_results.pop(request_id, None)


class BuildError(RuntimeError):
    """The object could not be built."""


def _exit_process() -> None:
    # Child processes may hang too, and hold a device: kill them first.
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(1)


def _cancel_futures(call: Future[Any]) -> None:
    if not call.cancelled() and call.exception() is None:
        value = call.result()
        for item in value if isinstance(value, list) else ():
            if isinstance(item, Future):
                item.cancel()


async def _await_and_record(
    index: int, future: Future[Any], partial_results: list[tuple[int, Any]]
) -> Any:
    """Await one future of a list, and record its result for `Replica.partial_results`."""
    result = await asyncio.wrap_future(future)
    partial_results.append((index, result))
    return result
