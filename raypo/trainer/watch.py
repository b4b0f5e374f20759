"""What the driver does while the workers run: events, signals, and a controller that is lost."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorUnavailableError

from raypo.cluster.actors import is_lost_actor
from raypo.metrics.process_memory import peak_memory
from raypo.ray_internals import failed_to_start
from raypo.tracking.console import Console


def show_events(console: Console, monitor: ActorHandle) -> None:
    """Show what the workers have reported since the last call."""
    shown = {"start": console.resume, "step": console.step, "phase": console.phase}
    for kind, content in ray.get(monitor.drain.remote(peak_memory())):
        shown.get(kind, console.message)(content)


@contextmanager
def stop_on_signal(ask: Callable[[], None]) -> Iterator[None]:
    """The first Ctrl-C or SIGTERM asks for an end, the second one raises KeyboardInterrupt."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    count = 0

    def stop(number: int, frame: Any) -> None:
        nonlocal count
        count += 1
        if count > 1:
            raise KeyboardInterrupt
        ask()

    earlier = {each: signal.signal(each, stop) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for each, handler in earlier.items():
            signal.signal(each, handler)


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
