"""What the driver does while the workers run: events, signals, and a controller that is lost."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorUnavailableError

from raypo.cluster.actors import is_lost_actor
from raypo.cluster.connect import refusal
from raypo.metrics.process_memory import peak_memory
from raypo.ray_internals import failed_to_start
from raypo.tracking.console import Console


def show_events(console: Console, monitor: ActorHandle) -> None:
    """Show what the workers have reported since the last call."""
    shown = {"start": console.resume, "step": console.step, "phase": console.phase}
    for kind, content in ray.get(monitor.drain.remote(peak_memory())):
        shown.get(kind, console.message)(content)


INTERRUPTED = 130
"""Exit status of a process that a signal has ended."""
LOOK_EVERY_S = 1.0
GRACE_S = 5.0
"""Seconds in which files are written before the process ends, once Ray is gone."""


@contextmanager
def stop_on_signal(ask: Callable[[], None]) -> Iterator[None]:
    """Ask for an end at the first Ctrl-C or SIGTERM, and raise KeyboardInterrupt at the second.

    From the first signal on a thread looks whether Ray's head is still there: one to the whole
    process group, as `timeout` sends it, ends a local Ray too.
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

    earlier = {each: signal.signal(each, stop) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        is_over.set()
        for each, handler in earlier.items():
            signal.signal(each, handler)


def _end_with_ray(address: str, is_over: threading.Event) -> None:
    """End this process if Ray's head is gone before the run has stopped.

    Ray's client would try to reach the head for 60 s, and then abort the process with a C++ error.
    """
    while refusal(address) is None:
        if is_over.wait(LOOK_EVERY_S):
            return
    if is_over.is_set():
        return
    Console().message(
        "Ray has ended too, as at a signal to the whole process group, so this step has no "
        "checkpoint. The same command goes on from the last one."
    )
    main = threading.main_thread().ident
    assert main is not None
    signal.pthread_kill(main, signal.SIGINT)  # the second signal, also out of a call that blocks
    time.sleep(GRACE_S)
    os._exit(INTERRUPTED)


def is_lost_controller(error: BaseException) -> bool:
    """Whether what `TorchTrainer.fit` raises says that the process of its controller ended.

    The controller's own code may fail with such an error of another actor, and its start may fail:
    neither would go better under another controller.
    """
    may_live = isinstance(error, ActorUnavailableError)
    return is_lost_actor(error) and not may_live and not failed_to_start(error)


def failures_left(max_failures: int, failures: int) -> int | None:
    """How many more failures a run may have after some; None: it has had one too many.

    Args:
        max_failures: As Ray's FailureConfig says it; -1: any number, which is also what is left.
        failures: Lost workers and controllers so far.
    """
    if max_failures == -1:
        return -1
    left = max_failures - failures
    return left if left >= 0 else None


def advice(max_failures: int) -> str:
    """What to do where the run cannot go on by itself."""
    return (
        f"max_failures ({max_failures}): the process of Ray Train's controller ended, and the run "
        "either had as many failures as it may have or had not begun. Start it again: it goes on "
        "from its last checkpoint. With a higher max_failures it does so by itself."
    )
