"""Driver-side supervision of a run: events, signals, and loss of Ray Train's controller.

Threads: signal handlers run in the main thread. After the first signal a daemon thread polls Ray's
head, and ends the process if the head is gone before the run has stopped.
"""

from __future__ import annotations

import io
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorUnavailableError
from ray.train import UserCallback, WorkerGroupError

from raypo.cluster.actors import is_lost_actor
from raypo.cluster.machine import connection_error
from raypo.custom.errors import UserCodeError
from raypo.metrics.process_memory import peak_memory
from raypo.ray_internals import cause_of, failed_to_start
from raypo.tracking.console import Console


def show_events(console: Console, monitor: ActorHandle, on_beat: Callable[[Any], None]) -> None:
    """Print the events that workers have reported since the last call, and pass on their beats."""
    shown = {
        "start": console.resume,
        "step": console.step,
        "phase": console.phase,
        "beat": on_beat,
    }
    for kind, content in ray.get(monitor.drain.remote(peak_memory())):
        shown.get(kind, console.message)(content)


INTERRUPTED = 130
"""Exit status of a process that was ended by Ctrl-C."""
LOOK_EVERY_S = 1.0
"""Interval at which Ray's head is polled after the first signal."""
FAILURES = 5
"""Number of consecutive failed connections after which Ray counts as gone. A busy head may refuse a
single connection."""
GRACE_S = 5.0
"""Seconds for writing files after Ray is gone, before the process exits."""


@contextmanager
def stop_on_signal(ask: Callable[[], None]) -> Iterator[None]:
    """Call `ask` on the first Ctrl-C or SIGTERM, and raise KeyboardInterrupt on the second.

    A signal to the whole process group, like that of `timeout`, also ends a local Ray. After the
    first signal a thread therefore checks that Ray's head is alive. Outside the main thread this
    context manager does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    count, is_over = 0, threading.Event()
    address = ray.get_runtime_context().gcs_address

    def stop(number: int, frame: Any) -> None:
        nonlocal count
        count += 1
        if count > 1:
            raise KeyboardInterrupt
        threading.Thread(target=_end_with_ray, args=(address, is_over), daemon=True).start()
        ask()

    earlier = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        is_over.set()
        for number, handler in earlier.items():
            signal.signal(number, handler)


def _end_with_ray(address: str, is_over: threading.Event) -> None:
    """End this process if Ray's head is gone before the run has stopped.

    Otherwise Ray's client would try to reach the head for 60 s, and then abort the process with a
    C++ error.
    """
    failures = 0
    while failures < FAILURES:
        failures = 0 if connection_error(address) is None else failures + 1
        if is_over.wait(LOOK_EVERY_S):
            return
    if is_over.is_set():
        return
    Console().message(
        "Ray has ended too, for example by a signal to the whole process group, so this step "
        "has no checkpoint. The same command resumes from the last checkpoint."
    )
    main = threading.main_thread().ident
    assert main is not None
    # This acts like the second Ctrl-C, and also interrupts a blocking call.
    signal.pthread_kill(main, signal.SIGINT)
    time.sleep(GRACE_S)
    os._exit(INTERRUPTED)


class PrintingCallback(UserCallback):
    """Ray Train callback of the user's whose prints are shown on the run's console.

    Ray Train calls it in its controller, an actor whose output raypo does not show.
    """

    def __init__(self, callback: UserCallback, monitor: ActorHandle) -> None:
        """Wrap a callback; `monitor` passes its prints to the console."""
        self._callback, self._monitor = callback, monitor

    def after_report(self, *arguments: Any, **named: Any) -> None:
        """Call the callback's `after_report`."""
        self._call(self._callback.after_report, *arguments, **named)

    def after_exception(self, *arguments: Any, **named: Any) -> None:
        """Call the callback's `after_exception`."""
        self._call(self._callback.after_exception, *arguments, **named)

    def _call(self, method: Callable[..., None], *arguments: Any, **named: Any) -> None:
        printed = io.StringIO()
        try:
            with redirect_stdout(printed):
                method(*arguments, **named)
        finally:
            for line in printed.getvalue().splitlines():
                self._monitor.tell.remote("message", f"printed: {line}")


def is_lost_controller(error: BaseException) -> bool:
    """Return True if an error of `TorchTrainer.fit` means that its controller's process died.

    The result is False if the controller's code raised the error because another actor died, or if
    the controller failed to start. In these cases a new controller would not help.
    """
    may_live = isinstance(error, ActorUnavailableError)
    return is_lost_actor(error) and not may_live and not failed_to_start(error)


def failures_left(max_failures: int, failures: int) -> int | None:
    """Return how many more failures a run may have.

    None means that the run has already had too many. -1 means no limit.

    Args:
        max_failures: Limit as in Ray's FailureConfig. -1 means no limit.
        failures: Number of lost workers and controllers so far.
    """
    if max_failures == -1:
        return -1
    left = max_failures - failures
    return left if left >= 0 else None


def told_briefly(error: WorkerGroupError) -> WorkerGroupError:
    """Return the error with only the user's frames in its text, if the user's code raised it."""
    for failure in error.worker_failures.values():
        cause = cause_of(failure)
        if isinstance(cause, UserCodeError):
            return WorkerGroupError(f"{cause.user_frames}{cause.line}", error.worker_failures)
    return error


def advice(max_failures: int) -> str:
    """Return the remedy for a run that cannot go on by itself."""
    return (
        f"max_failures ({max_failures}): the process of Ray Train's controller ended, and the "
        "run either had already used up its failures or had not started. Start it again: it "
        "resumes from its last checkpoint. With a higher max_failures it does so automatically."
    )
