"""Timing of the phases of a step."""

from __future__ import annotations

import time
from collections.abc import Callable

Span = tuple[str, float, float]
"""Name, start and end of a lap; times are in seconds since 1970."""


class Clock:
    """Stopwatch that divides time into named laps without gaps, so that laps add up to the total.

    Example: call `clock.lap("time/generate_s")` after generation and `clock.lap("time/update_s")`
    after the update. `clock.laps` then contains both times.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._last = now()
        self.laps: dict[str, float] = {}
        """Seconds by name, in the order of first use."""
        self.spans: list[Span] = []
        """All laps in order, with their start and end."""
        self._epoch = time.time() - self._last

    def lap(self, name: str) -> float:
        """Add the seconds since the last lap to `name`, and return them."""
        now = self._now()
        seconds, self._last = now - self._last, now
        self.laps[name] = self.laps.get(name, 0.0) + seconds
        self.spans.append((name, self._epoch + now - seconds, self._epoch + now))
        return seconds

    def join(self, other: Clock) -> None:
        """Take over the laps and spans of another clock, whose time is part of the current lap."""
        for name, seconds in other.laps.items():
            self.laps[name] = self.laps.get(name, 0.0) + seconds
            self._last += seconds
        self.spans += other.spans
        other.laps, other.spans = {}, []


def duration(seconds: float) -> str:
    """Format a duration, like `2 min 47 s`."""
    minutes, remaining_seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {remaining_seconds:02d} s" if minutes else f"{remaining_seconds} s"
