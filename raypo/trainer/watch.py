"""What the driver does while the workers run: shows their events, turns signals into wishes."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
from ray.actor import ActorHandle

from raypo.metrics.process_memory import peak_memory
from raypo.tracking.console import Console


def show_events(console: Console, monitor: ActorHandle) -> None:
    """Bring what the workers told since the last time to the console."""
    for kind, content in ray.get(monitor.drain.remote(peak_memory())):
        if kind == "step":
            console.step(content)
        elif kind == "start":
            console.resume(content)
        elif kind == "phase":
            console.phase(content)
        elif kind == "message":
            console.message(content)


@contextmanager
def stop_on_signal(monitor: ActorHandle, console: Console) -> Iterator[None]:
    """The first Ctrl-C or SIGTERM ends the run after its step, the second one at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    count = 0

    def stop(number: int, frame: Any) -> None:
        nonlocal count
        count += 1
        if count > 1:
            raise KeyboardInterrupt
        monitor.request_stop.remote()
        console.message("Stopping after this step, with a checkpoint; once more to stop at once.")

    earlier = {each: signal.signal(each, stop) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for each, handler in earlier.items():
            signal.signal(each, handler)
