"""Stall detection and load statistics of an engine or a frozen model."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from raypo.serving.requests import LoadSummary

IDLE_S = 0.05
"""Shortest idle time that is recorded, in seconds."""


@dataclass
class Progress:
    """Time of the last progress. Written by the working thread, read by any thread."""

    _since: float | None = None

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Mark the work inside this context as in progress."""
        self.step()
        try:
            yield
        finally:
            self._since = None

    def step(self) -> None:
        """Record progress: a part of the work is done."""
        self._since = time.monotonic()

    def stalled_s(self) -> float:
        """Return the seconds since the last progress, or 0 if idle."""
        since = self._since
        return 0.0 if since is None else time.monotonic() - since


@dataclass
class Meter:
    """Means and peaks of an engine's load, and its idle times, since the last `take`."""

    _at: float = field(default_factory=lambda: time.monotonic())
    _since: float = field(default_factory=lambda: time.monotonic())
    _sums: dict[str, float] = field(default_factory=dict)
    _peaks: dict[str, float] = field(default_factory=dict)
    _now: dict[str, float] = field(default_factory=dict)
    _idle: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=1000))

    def note(self, *, queued: float, running: float, kv_cache: float) -> None:
        """Record a new load, valid from now on."""
        self._add_up()
        self._now = loads = {"queued": queued, "running": running, "kv_cache": kv_cache}
        for name, load in loads.items():
            self._peaks[name] = max(load, self._peaks.get(name, 0.0))

    def note_idle(self, seconds: float) -> None:
        """Record an idle time that ends now."""
        if seconds > IDLE_S:
            now = time.time()
            self._idle.append((now - seconds, now))

    def take(self) -> LoadSummary:
        """Return means and peaks of the load since the last call of this method."""
        self._add_up()
        seconds = self._at - self._since
        values = {
            f"{name}_{kind}": value
            for name in self._now
            for kind, value in (
                ("mean", self._sums.get(name, 0.0) / seconds if seconds else self._now[name]),
                ("max", self._peaks[name]),
            )
        }
        summary = LoadSummary(**values, idle=tuple(self._idle))
        self._since, self._sums, self._peaks = self._at, {}, dict(self._now)
        self._idle.clear()
        return summary

    def _add_up(self) -> None:
        now = time.monotonic()
        for name, load in self._now.items():
            self._sums[name] = self._sums.get(name, 0.0) + load * (now - self._at)
        self._at = now
