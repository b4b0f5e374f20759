"""One replica of a deployment: `ReplicaClient` in the callers' processes, and the actor `Replica`.

Concurrency in a caller's process: coroutines run on its background loop (`raypo.concurrency`).
While calls wait for a replica, one task of the loop checks its health. A replica that does not
answer is killed. Its calls then fail, and Ray restarts it.

Concurrency in the actor: coroutines run on one event loop, which never blocks, so health is
reported while the object works. The object itself runs in threads:

- `_pool`, one thread for each ongoing request (`max_ongoing_requests`). If a method returns
  futures, the coroutine awaits them and no thread waits.
- `_control_pool`, one thread for control calls (a push of weights, sleep), which run in order, and
  for urgent requests. They wait for no other request, but for a prerequisite that is running: a
  method that restores the object's state, such as loading the weights. If only one ongoing request
  is allowed, `_control_pool` is `_pool`.

When Ray restarts the process, the object has lost its state, until the next prerequisite has run.
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
from raypo.cluster.devices import narrowed
from raypo.concurrency import background_future, daemon_future
from raypo.deployment.gauges import export_gauges
from raypo.deployment.spec import Call, Deployment, Status, Unprepared
from raypo.pending_work import Work, at_work
from raypo.tracking.logs import CONSOLE_KEY, log_to_file
from raypo.tracking.trace import note_call

P = ParamSpec("P")
T = TypeVar("T")
Method = Callable[Concatenate[Any, P], T]
"""A method of the deployment's class, such as `Engine.submit`. Only its name is sent."""
OnEntry = Callable[[int, Any], object]
"""Callback `(index, result)` for results of a list of futures that are ready before the whole list
is. Called from any thread, possibly twice for one index."""

AVOID_S = 4.0
"""Seconds after a replica was lost during which requests prefer all other replicas. While Ray 2.60
restarts a replica, each call to it blocks for 2 s."""
PROBE_TIMEOUT_S = 3.0
"""Seconds after which a replica that does not answer counts as busy or starting."""
ENTRIES_WAIT_S, ENTRIES_POLL_S = 1.0, 0.05
"""Longest time that `entries` waits for a further result, and its polling interval, in seconds."""
KEPT_REPLIES = 32
"""Number of finished requests whose reply is kept, for callers that retry."""
EXIT_DELAY_S = 0.2
"""Seconds before a replica ends its own process, so that its last replies are sent."""
WITHOUT_OBJECT = {
    "sleep": None,  # no memory to move
    "wake_up": None,
    "peak_memory": Unprepared("it is not built yet, and this call does not build it"),
}
"""Replies to control calls that a replica does not build its object for."""

logger = logging.getLogger(__name__)


class State(Enum):
    """State of a replica that is not gone for good, as a caller knows it."""

    STARTING = "starting"
    """It has not replied yet. It may take `start_timeout_s` to reply to a health check."""
    UP = "up"
    """It has replied, and was not lost since."""
    LOST = "lost"
    """It was up and was lost. Ray restarts it."""


class ReplicaClient:
    """One process's view of one replica: a named actor, looked up at its first use."""

    def __init__(self, limits: Deployment, namespace: str, index: int) -> None:
        self.limits, self.namespace, self.index = limits, namespace, index
        self.num_waiting = 0
        """Calls of this process that wait for the replica."""
        self.state = State.STARTING
        self.gone: Exception | None = None
        """Error of a replica that Ray does not restart."""
        self._actor: ActorHandle | None = None
        self._avoid_until = 0.0
        self._down_since: float | None = None
        self._health_checks: asyncio.Task[None] | None = None
        self._calls: set[Work] = set()
        """Calls of this process that wait for the replica, for the watchdog."""
        self._num_moves = 0
        """`Status.num_moves` at the last health check."""

    def __reduce__(self) -> Any:
        return ReplicaClient, (self.limits, self.namespace, self.index)

    @property
    def name(self) -> str:
        """Name of the replica's actor."""
        return f"{self.limits.name}:{self.index}"

    @property
    def is_avoided(self) -> bool:
        """True if requests prefer other replicas, because this one was lost a moment ago."""
        return time.monotonic() < self._avoid_until

    @property
    def down_s(self) -> float:
        """Seconds that the replica has been lost or unresponsive, or 0 if it is neither."""
        return 0.0 if self._down_since is None else time.monotonic() - self._down_since

    def control(self, method: Method[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Call a method ahead of queued requests. Control calls keep their order; none is retried.

        Raises:
            ReplicaLost: raised by the future: the replica is down, or ended before it replied.
            DeploymentError: raised by the future: no reply within `request_timeout_s`.
        """

        async def reply() -> Any:
            async with time_limit(self.limits), self._waiting_for(method.__name__):
                ref = self._remote().control.remote(method.__name__, args, kwargs)
                try:
                    return self._value_of(await ref)
                except asyncio.CancelledError:  # `request_timeout_s`; it may not have begun
                    ray.cancel(ref)
                    raise

        return background_future(reply())

    async def send(self, call: Call, on_entry: OnEntry | None = None) -> Any:
        """Send a request and wait for the reply.

        Raises:
            Unprepared: the prerequisite of the request failed.
            ReplicaLost: the replica ended before it replied.
            Exception: whatever the replica's method raised.
        """
        reporting = None
        try:
            async with self._waiting_for(call.method):
                ref = self._remote().call.remote(call)
                if on_entry is not None:
                    reporting = asyncio.create_task(self._report_entries(call, on_entry))
                try:
                    return self._value_of(await ref)
                except asyncio.CancelledError:  # the caller gave up: the replica need not go on
                    ray.cancel(ref)
                    raise
        finally:
            if reporting is not None:
                reporting.cancel()

    async def is_up(self, timeout_s: float | None, *, kills: bool = False) -> bool:
        """Check the health of the replica. It is not up while it starts, or if it has a problem.

        Args:
            timeout_s: Seconds to wait for the status. None means no limit.
            kills: Whether to kill a replica that does not answer in time. A replica that is
                starting is killed only after `start_timeout_s`.
        """
        try:
            status = await asyncio.wait_for(self._remote().status.remote(), timeout_s)
        except TimeoutError:
            if kills:
                self._down_since = self._down_since or time.monotonic()
                limit = self.limits.start_timeout_s
                if self.state is State.UP or (limit is not None and self.down_s > limit):
                    self._kill(f"no answer to a health check in {timeout_s:g} s")
            return False
        except RayError as error:
            self._note_error(error)
            return False
        self._note_reply(status.problem)
        if status.num_moves != self._num_moves:
            self._num_moves = status.num_moves
            for call in self._calls:
                call.moved()
        return status.problem is None

    async def end(self, grace_s: float) -> None:
        """End the replica for good, after ongoing requests have ended or `grace_s` has passed."""
        if await self.is_up(PROBE_TIMEOUT_S):
            with suppress(RayError, TimeoutError):
                await asyncio.wait_for(self._remote().drain.remote(), grace_s)
        with suppress(RayError):
            ray.kill(self._remote())

    def _remote(self) -> Any:
        if self._actor is None:
            try:
                self._actor = ray.get_actor(self.name, self.namespace)
            except ValueError as error:
                raise RayActorError(error_msg=str(error)) from None
        return self._actor

    @asynccontextmanager
    async def _waiting_for(self, method: str) -> AsyncIterator[None]:
        """Check the health of the replica while a call waits for it, and trace the call."""
        sent_at = time.time()
        self.num_waiting += 1
        if self._health_checks is None:
            self._health_checks = asyncio.create_task(self._check_health())
        name = f"{self.limits.role} {self.index} ({method})"
        try:
            with at_work(name, replica=self.name, in_thread=False) as call:
                self._calls.add(call)
                try:
                    yield
                finally:
                    self._calls.discard(call)
        except RayError as error:
            self._note_error(error)
            raise ReplicaLost(f"{self.name}: the replica was lost: {error}") from None
        finally:
            self.num_waiting -= 1
            if not self.num_waiting:
                self._health_checks.cancel()
                self._health_checks = None
        note_call(self.name, method, sent_at, time.time())

    async def _check_health(self) -> None:
        while True:
            await asyncio.sleep(self.limits.health_check_period_s)
            await self.is_up(self.limits.health_check_timeout_s, kills=True)

    async def _report_entries(self, call: Call, on_entry: OnEntry) -> None:
        num_seen = 0
        with suppress(RayError):  # `send` finds out why
            while True:
                entries = await self._remote().entries.remote(call.id, num_seen)
                num_seen += len(entries)
                for index, entry in entries.items():
                    await asyncio.to_thread(on_entry, index, entry)

    def _value_of(self, reply: Any) -> Any:
        """Return a reply, or raise it if it says that the replica cannot serve the call."""
        if not isinstance(reply, ReplicaLost):
            self._note_reply(None)
            return reply
        self._note_reply(None if isinstance(reply, Unprepared) else str(reply))
        raise type(reply)(f"{self.name}: {reply}")

    def _note_reply(self, problem: str | None) -> None:
        if problem is not None:
            self._note_lost(problem)
            return
        if self.state is State.LOST:
            self._tell("is back", f"is back after {self.down_s:.0f} s")
        self.state, self._avoid_until, self._down_since = State.UP, 0.0, None

    def _note_error(self, error: Exception) -> None:
        """Note that the replica restarts or is gone for good. Raise any other error."""
        if not is_lost_actor(error):
            raise error
        if not isinstance(error, ActorUnavailableError):
            self.gone = error
        self._note_lost(str(error).partition("\n")[0])

    def _note_lost(self, reason: str) -> None:
        if self.state is State.UP:  # tell the user once
            self._tell("was lost", f"was lost{'' if self.gone else ' and is restarted'}: {reason}")
            self.state = State.LOST
        now = time.monotonic()
        self._avoid_until, self._down_since = now + AVOID_S, self._down_since or now

    def _tell(self, event: str, text: str) -> None:
        replica = f"{self.limits.role} {self.index}"
        logger.warning("%s %s", replica, text, extra={CONSOLE_KEY: f"{self.name} {event}"})

    def _kill(self, reason: str) -> None:
        self._note_lost(f"{reason} (health_check_timeout_s), so it is killed")
        ray.kill(self._remote(), no_restart=False)


@asynccontextmanager
async def time_limit(limits: Deployment) -> AsyncIterator[None]:
    """Limit the time of a call, retries included, to `request_timeout_s`.

    Raises:
        DeploymentError: the time is over.
    """
    limit = asyncio.timeout(limits.request_timeout_s)
    try:
        async with limit:
            yield
    except TimeoutError:
        if not limit.expired():  # it is the method's own
            raise
        raise DeploymentError(
            f"{limits.name}: no answer in {limits.request_timeout_s:g} s. Look at its log "
            f"in the Ray dashboard, or raise placement.deployment.request_timeout_s."
        ) from None


class LocalReplica(ReplicaClient):
    """A replica that is an object of this process, for handles without a deployment."""

    def __init__(self, target: Any, index: int = 0) -> None:
        super().__init__(Deployment("local", type(target), {}), "", index)
        self._target = target

    def control(self, method: Method[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Call the method in a thread."""
        function = getattr(self._target, method.__name__)
        return daemon_future(lambda: function(*args, **kwargs), name="local-replica")

    async def send(self, call: Call, on_entry: OnEntry | None = None) -> Any:
        """Run the request in a thread. If its value is a list of futures, await them together.

        The object was never restarted, so it has no prerequisite to run.
        """
        function = getattr(self._target, call.method)
        running = daemon_future(lambda: function(*call.args, **call.kwargs), name="local-replica")
        value = await asyncio.wrap_future(running)
        if isinstance(value, list) and all(isinstance(entry, Future) for entry in value):
            value = await asyncio.gather(*map(asyncio.wrap_future, value))
        return value

    async def is_up(self, timeout_s: float | None, *, kills: bool = False) -> bool:
        """Return True: the object is always up."""
        return True


class Replica:
    """The actor around the object. It runs each request id once, and reports its health."""

    def __init__(self, deployment: Deployment, index: int) -> None:
        """Build the object.

        A restarted replica of a deployment with `takes_turns` builds it at the first call instead.
        """
        self._deployment, self._index = deployment, index
        self._target: Any = None  # set first: Ray calls `repr` even if the constructor fails
        self._replies: OrderedDict[str, asyncio.Future[Any]] = OrderedDict()
        self._entries: dict[str, list[tuple[int, Any]]] = {}
        """Results of each request that returned a list of futures: (index in the list, result), in
        the order in which they became ready."""
        self._lock = threading.Lock()
        """Held while the object is built, and while a prerequisite or a control call runs. Without
        it, a prerequisite that loads the last push could overwrite the weights of a newer one."""
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
            self._pool.submit(self._build).result()
        except Exception:
            if not is_restart:
                raise
            traceback.print_exc()  # memory of the last process may not be free yet
            os._exit(1)  # Ray restarts it, up to `max_restarts` times

    def __repr__(self) -> str:
        if self._target is None:
            return f"{type(self).__name__}(not built)"
        return repr(self._target)

    async def control(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a control call (see the module's docstring).

        Returns:
            The method's value, or `ReplicaLost` if the object cannot go on.
        """

        def run() -> Any:
            with self._lock:
                if self._target is None and method in WITHOUT_OBJECT:
                    return WITHOUT_OBJECT[method]
                return getattr(self._built(), method)(*args, **kwargs)

        try:
            return await asyncio.wrap_future(self._control_pool.submit(run))
        except Exception as error:
            return self._reply_to(error)

    async def call(self, call: Call) -> Any:
        """Run a request. One whose id is known is not run again.

        Returns:
            The method's value, or `Unprepared` if the prerequisite failed, or `ReplicaLost` if the
            object cannot go on.
        """
        reply = self._replies.get(call.id)
        if reply is None or reply.cancelled():
            reply = self._replies[call.id] = asyncio.ensure_future(self._reply(call))
            self._forget_old()
        return await reply  # a caller that gives up cancels the request and its futures

    async def entries(self, id: str, num_seen: int) -> dict[int, Any]:
        """Wait briefly for further results of a request that returned a list of futures.

        Args:
            id: Id of the request.
            num_seen: Number of results that were ready at the caller's last question.

        Returns:
            The new results by their index in the list.
        """
        end = time.monotonic() + ENTRIES_WAIT_S
        while len(self._entries.get(id, ())) <= num_seen and time.monotonic() < end:
            await asyncio.sleep(ENTRIES_POLL_S)
        return dict(self._entries.get(id, [])[num_seen:])

    async def status(self) -> Status:
        """Return node, load and problem of this process. A process with a problem then ends."""
        problem = self._problem()
        if problem is not None:
            self._end_soon()
        node_id = ray.get_runtime_context().get_node_id()
        num_moves = getattr(self._target, "num_moves", lambda: 0)()
        return Status(node_id, os.getpid(), self._num_calls(), problem, num_moves)

    async def drain(self) -> None:
        """Wait until all ongoing requests have ended."""
        ongoing = [reply for reply in self._replies.values() if not reply.done()]
        await asyncio.gather(*ongoing, return_exceptions=True)

    async def _reply(self, call: Call) -> Any:
        pool = self._control_pool if call.is_urgent else self._pool
        running = pool.submit(self._run, call)
        try:
            value = await asyncio.wrap_future(running)
            if isinstance(value, list) and any(isinstance(entry, Future) for entry in value):
                ready = self._entries[call.id] = []
                value = await asyncio.gather(
                    *(_recorded(index, entry, ready) for index, entry in enumerate(value))
                )
            return value
        except asyncio.CancelledError:
            # The thread still runs the method; cancel the futures that it may return.
            running.add_done_callback(_cancel_futures)
            raise
        except Exception as error:
            return self._reply_to(error)

    def _run(self, call: Call) -> Any:
        with self._lock:
            target = self._built()
            if call.prerequisite is not None:
                method, arguments = call.prerequisite
                try:
                    getattr(target, method)(*arguments)
                except Exception as error:
                    raise Unprepared(f"{type(error).__name__}: {error}") from error
        return getattr(target, call.method)(*call.args, **call.kwargs)

    def _built(self) -> Any:
        """Return the object, which the first call builds."""
        if self._target is None:
            try:
                self._build()
            except Exception as error:
                traceback.print_exc()
                raise _NotBuilt(
                    f"it could not be built: {type(error).__name__}: {error}"
                ) from error
        return self._target

    def _build(self) -> None:
        """Build the object. Library logs go to a file of the run."""
        deployment, path = self._deployment, None
        if deployment.logs_dir is not None:
            path = f"{deployment.logs_dir}/{deployment.role}_{self._index}.log"
            log_to_file(path)
        self._target = deployment.cls(**deployment.kwargs)
        if path is not None:
            log_to_file(path)  # libraries have added loggers of their own meanwhile

    def _reply_to(self, error: Exception) -> Exception:
        """Return the reply to a call that failed, or raise its error if that is the caller's."""
        problem = str(error) if isinstance(error, _NotBuilt) else self._problem()
        if problem is not None:
            self._end_soon()
            return ReplicaLost(problem)
        if isinstance(error, Unprepared):
            return Unprepared(*error.args)
        raise error

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
        return sum(not reply.done() for reply in list(self._replies.values()))

    def _forget_old(self) -> None:
        done = [id for id, reply in self._replies.items() if reply.done()]
        for id in done[:-KEPT_REPLIES]:
            del self._replies[id]
            self._entries.pop(id, None)


class _NotBuilt(RuntimeError):
    """The object could not be built."""


def _end_process() -> None:
    # Child processes may hang too, and hold a device: kill them first.
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(1)


def _cancel_futures(call: Future[Any]) -> None:
    if not call.cancelled() and call.exception() is None:
        value = call.result()
        for entry in value if isinstance(value, list) else ():
            if isinstance(entry, Future):
                entry.cancel()


async def _recorded(index: int, future: Future[Any], ready: list[tuple[int, Any]]) -> Any:
    """Await one future of a list, and note its result as ready, so that `entries` can return it."""
    entry = await asyncio.wrap_future(future)
    ready.append((index, entry))
    return entry
