"""The heartbeat of a learner worker: what it works on, for the driver's watchdog.

Concurrency. A daemon thread of each learner worker sends a `Beat` by way of the run's monitor. It
goes on while the main thread hangs, unless the process is stopped or its interpreter is blocked.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import ray
from ray.actor import ActorHandle

from raypo import pending_work
from raypo.pending_work import Pending

LONGEST_PERIOD_S = 10.0
"""Longest time between two beats, in seconds."""
LONGEST_STACKS = 50_000
"""Longest text of stacks, in characters. Ray would put a longer one into its object store, which
may be full."""
JOIN_S = 5.0
"""Seconds that a beat which is being sent may take when the worker's loop has ended."""


@dataclass(frozen=True)
class Beat:
    """The state of a learner worker."""

    rank: int
    actor_id: str
    """Ray's id of the worker's actor. It has a new one after each restart."""
    idle_s: float = 0.0
    """Seconds since anything in this process has moved."""
    pending: tuple[Pending, ...] = ()
    stacks: str = ""
    """Stacks of all threads, once the process has not moved for a while."""
    is_last: bool = False
    """True if the worker's loop has ended."""


@contextmanager
def heartbeat(monitor: ActorHandle | None, rank: int, timeout_s: float | None) -> Iterator[None]:
    """Send beats in this context.

    Args:
        monitor: The run's monitor. None, for a run without a driver of raypo, sends nothing.
        rank: Rank of this learner worker.
        timeout_s: Seconds without progress after which the run counts as hung. None sends nothing.
    """
    if monitor is None or timeout_s is None:
        yield
        return
    pending_work.forget_pending()
    actor_id, is_over = str(ray.get_runtime_context().get_actor_id()), threading.Event()

    def send() -> None:
        while not is_over.wait(min(timeout_s / 5, LONGEST_PERIOD_S)):
            with suppress(Exception):  # without further beats a healthy worker would be killed
                idle_s, pending = pending_work.idle_s(), tuple(pending_work.pending())
                is_slow = any(work.idle_s > timeout_s / 2 for work in pending)
                stacks = ""
                with suppress(Exception):
                    stacks = _stacks()[:LONGEST_STACKS] if is_slow else ""
                monitor.beat.remote(Beat(rank, actor_id, idle_s, pending, stacks))

    thread = threading.Thread(target=send, name="raypo-heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join(JOIN_S)  # no other beat may follow the last one
        monitor.beat.remote(Beat(rank, actor_id, is_last=True))


def _stacks() -> str:
    """Return the Python stacks of all threads. This needs no permission, unlike py-spy."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"thread {names.get(number, number)}:\n{''.join(traceback.format_stack(frame))}"
        for number, frame in sys._current_frames().items()
    )
