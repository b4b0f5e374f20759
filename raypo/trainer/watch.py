"""Supervision of a run by its driver: events, signals, and loss of Ray Train's controller.

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
from raypo.trainer.watchdog import Watchdog


def show_events(console: Console, monitor: ActorHandle, watchdog: Watchdog) -> None:
    """Print the events that workers have reported since the last call, or tell the watchdog."""
    handlers = {
        "start": console.resume,
        "step": console.step,
        "phase": console.phase,
        "attempt": watchdog.begin_attempt,
        "beat": watchdog.note,
    }
    for kind, content in ray.get(monitor.drain.remote(peak_memory())):
        handlers.get(kind, console.message)(content)


INTERRUPTED = 130
"""Exit status of a process that was ended by Ctrl-C."""
POLL_S = 1.0
"""Interval at which Ray's head is polled after the first signal."""
MAX_FAILED_POLLS = 5
"""Number of consecutive failed connections after which Ray counts as gone. A busy head may refuse a
single connection."""
GRACE_S = 5.0
"""Seconds for writing files after Ray is gone, before the process exits."""


@contextmanager
def stop_on_signal(request_stop: Callable[[], None]) -> Iterator[None]:
    """Call `request_stop` on the first Ctrl-C or SIGTERM. Raise KeyboardInterrupt on the second.

    A signal to the whole process group (`timeout` sends one) also ends a local Ray. After the
    first signal a thread therefore checks that Ray's head is alive. Outside the main thread this
    context manager does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    num_signals, has_stopped = 0, threading.Event()
    address = ray.get_runtime_context().gcs_address

    def stop(signal_number: int, frame: Any) -> None:
        nonlocal num_signals
        num_signals += 1
        if num_signals > 1:
            raise KeyboardInterrupt
        threading.Thread(target=_end_with_ray, args=(address, has_stopped), daemon=True).start()
        request_stop()

    previous_handlers = {
        signal_number: signal.signal(signal_number, stop)
        for signal_number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        has_stopped.set()
        for signal_number, handler in previous_handlers.items():
            signal.signal(signal_number, handler)


def _end_with_ray(address: str, has_stopped: threading.Event) -> None:
    """End this process if Ray's head is gone before the run has stopped.

    Otherwise Ray's client would try to reach the head for 60 s, and then abort the process with a
    C++ error.
    """
    failures = 0
    while failures < MAX_FAILED_POLLS:
        failures = 0 if connection_error(address) is None else failures + 1
        if has_stopped.wait(POLL_S):
            return
    if has_stopped.is_set():
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
    """Wrapper of a user's Ray Train callback that shows its prints on the run's console.

    Ray Train calls it in its controller, an actor whose output raypo does not show.
    """

    def __init__(self, callback: UserCallback, monitor: ActorHandle) -> None:
        """Wrap a callback. `monitor` passes its prints to the console."""
        self._callback, self._monitor = callback, monitor

    def after_report(self, *arguments: Any, **keywords: Any) -> None:
        """Call the callback's `after_report`."""
        self._call(self._callback.after_report, *arguments, **keywords)

    def after_exception(self, *arguments: Any, **keywords: Any) -> None:
        """Call the callback's `after_exception`."""
        self._call(self._callback.after_exception, *arguments, **keywords)

    def _call(self, method: Callable[..., None], *arguments: Any, **keywords: Any) -> None:
        printed = io.StringIO()
        try:
            with redirect_stdout(printed):
                method(*arguments, **keywords)
        finally:
            for line in printed.getvalue().splitlines():
                self._monitor.tell.remote("message", f"printed: {line}")


def is_lost_controller(error: BaseException) -> bool:
    """Return True if an error of `TorchTrainer.fit` means that its controller's process died.

    The result is False if the controller's code raised the error because another actor died, or if
    the controller failed to start. In these cases a new controller would not help.
    """
    is_unavailable = isinstance(error, ActorUnavailableError)
    return is_lost_actor(error) and not is_unavailable and not failed_to_start(error)


def failures_left(max_failures: int, failures: int) -> int | None:
    """Return how many more failures a run may have.

    None means that the limit is exceeded. -1 means no limit.

    Args:
        max_failures: Limit as in Ray's FailureConfig. -1 means no limit.
        failures: Number of lost workers and controllers so far.
    """
    if max_failures == -1:
        return -1
    remaining = max_failures - failures
    return remaining if remaining >= 0 else None


def with_user_frames(error: WorkerGroupError) -> WorkerGroupError:
    """Return the error, reduced to the user's frames if user code raised it."""
    for failure in error.worker_failures.values():
        cause = cause_of(failure)
        if isinstance(cause, UserCodeError):
            return WorkerGroupError(f"{cause.user_frames}{cause.line}", error.worker_failures)
    return error


def advice(max_failures: int) -> str:
    """Return the remedy for a run that cannot continue by itself."""
    return (
        f"max_failures ({max_failures}): the process of Ray Train's controller ended, and the "
        "run either had already used up its failures or had not started. Start it again: it "
        "resumes from its last checkpoint. With a higher max_failures it does so automatically."
    )
