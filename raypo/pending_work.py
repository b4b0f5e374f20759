"""The work that this process does or waits for, and when it last moved.

`at_work` marks a piece of work, and `moved` each part of it that is done: a microbatch, a bucket, a
file, a scored response. The heartbeat of a learner worker (`raypo.cluster.heartbeat`) sends
`pending` to the driver, whose watchdog (`raypo.trainer.watchdog`) finds work that no longer moves.

Concurrency. Any thread and any coroutine may mark work. Work is enclosed by the work of its
context, which daemon threads and coroutines inherit (`raypo.concurrency`). If a piece of work
moves, so does the work that encloses it.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

REPORT = "the report to Ray Train"
"""Name of the work in which a worker waits for Ray Train's controller."""
_WAITING = (
    *("/threading.py", "/concurrent/futures/", "/queue.py", "/selectors.py", "/asyncio/"),
    "/ray/_private/",
)
"""Parts of the paths of files whose functions wait for another thread or actor."""
_COLLECTIVES = ("/torch/distributed/", "/deepspeed/comm/")
_PACKAGE = str(Path(__file__).parent)


@dataclass(eq=False)
class Work:
    """A piece of work that has not ended."""

    name: str
    outer: Work | None
    """The work that encloses it."""
    must_move: bool
    """True if it hangs once it has not moved for a while, whatever else moves."""
    replica: str | None
    """Name of the replica that does it. None means that this process does it."""
    thread: int | None
    """Thread that does it. None means that coroutines do it."""
    moved_at: float = field(default_factory=time.monotonic)

    def moved(self) -> None:
        """Record that a part of the work is done, and so of the work that encloses it."""
        global _moved_at
        now = _moved_at = time.monotonic()
        work: Work | None = self
        while work is not None:
            work.moved_at = now
            work = work.outer


@dataclass(frozen=True)
class Pending:
    """The state of a piece of work, for the watchdog."""

    name: str
    inside: tuple[str, ...]
    """Names of the work that encloses it, outermost first."""
    idle_s: float
    """Seconds since it moved. Of equal pieces the longest."""
    must_move: bool
    replica: str | None
    place: str
    """Function that its thread is in. Empty for coroutines."""
    waits: bool
    """True if its thread waits: for other threads, or in a collective for other workers."""


_current: ContextVar[Work | None] = ContextVar("raypo_work", default=None)
_works: set[Work] = set()
_lock = threading.Lock()
_moved_at = time.monotonic()


@contextmanager
def at_work(
    name: str, *, must_move: bool = True, replica: str | None = None, in_thread: bool = True
) -> Iterator[Work]:
    """Mark the work inside this context.

    Args:
        name: Name for messages, such as "the update of step 3".
        must_move: False for work that only encloses other work, or waits for it.
        replica: Name of the replica that does the work.
        in_thread: False if the context is in a coroutine.
    """
    outer = _current.get()
    work = Work(name, outer, must_move, replica, threading.get_ident() if in_thread else None)
    token = _current.set(work)
    with _lock:
        _works.add(work)
    work.moved()
    try:
        yield work
    finally:
        with _lock:
            _works.discard(work)
        _current.reset(token)
        work.moved()


def moved() -> None:
    """Record that a part of the work of this context is done."""
    if (work := _current.get()) is not None:
        work.moved()


def forget_pending() -> None:
    """Leave out the work that has not ended yet.

    The trial of a reward function before the start may hang forever, while the run goes on.
    """
    with _lock:
        _works.clear()


def idle_s() -> float:
    """Return the seconds since any work of this process has moved."""
    return time.monotonic() - _moved_at


def pending() -> list[Pending]:
    """Return the innermost pieces of work that have not ended, without repetitions."""
    with _lock:
        works = set(_works)
    frames, now = sys._current_frames(), time.monotonic()
    innermost = works - {work.outer for work in works}
    by_name: dict[tuple[str, ...], Pending] = {}
    for work in sorted(innermost, key=lambda work: work.moved_at):
        names = dict.fromkeys([outer.name for outer in _enclosing(work)])
        names.pop(work.name, None)  # a function that calls one of the same name
        inside = tuple(reversed(names))
        if (*inside, work.name) not in by_name:
            by_name[*inside, work.name] = Pending(
                work.name,
                inside,
                now - work.moved_at,
                work.must_move,
                work.replica,
                *_place(None if work.thread is None else frames.get(work.thread)),
            )
    return list(by_name.values())


def _enclosing(work: Work) -> Iterator[Work]:
    while (outer := work.outer) is not None:
        yield outer
        work = outer


def _place(frame: FrameType | None) -> tuple[str, bool]:
    """Describe the innermost function of a thread, and say whether the thread waits."""
    if frame is None:
        return "", False
    path = frame.f_code.co_filename
    place = f"{frame.f_code.co_qualname} ({Path(path).name}:{frame.f_lineno})"
    is_collective = any(part in path for part in _COLLECTIVES)
    if is_collective:
        place = f"the collective {place}"
    if not path.startswith(_PACKAGE):
        caller = frame.f_back
        while caller is not None and not caller.f_code.co_filename.startswith(_PACKAGE):
            caller = caller.f_back
        # The wrappers of collectives say less than the function that calls them.
        while caller is not None and caller.f_code.co_filename.endswith("/collectives.py"):
            caller = caller.f_back
        if caller is not None:
            place += f", called by {caller.f_code.co_qualname}"
    return place, is_collective or any(part in path for part in _WAITING)
