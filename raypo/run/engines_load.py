"""Metrics of the engines' load in a step."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from raypo.serving.requests import Load, Stretch


@dataclass
class EnginesLoad:
    """Turns the engines' load reports into metrics of the time between two calls of `metrics`."""

    _looked_at: float | None = None
    _busy_s: float = 0.0
    _preemptions: int = 0

    def metrics(self, stretches: Mapping[str, tuple[Load, Stretch]]) -> dict[str, float]:
        """Return `perf/engine_*` since the last call: requests, KV cache use and idle seconds.

        Args:
            stretches: Load and statistics of each engine that answers, by name.
        """
        now = time.monotonic()
        loads = [load for load, _ in stretches.values()]
        told = [stretch for _, stretch in stretches.values()]
        busy_s = sum(each.busy_s for each in loads)
        preemptions = sum(each.preemptions for each in loads)
        metrics = {
            "perf/engine_queued": sum((each.queued_mean for each in told), 0.0),
            "perf/engine_queued_max": max((each.queued_max for each in told), default=0.0),
            "perf/engine_running": sum((each.running_mean for each in told), 0.0),
            "perf/engine_running_max": max((each.running_max for each in told), default=0.0),
            "perf/engine_kv_cache": max((each.kv_cache_mean for each in told), default=0.0),
            "perf/engine_kv_cache_max": max((each.kv_cache_max for each in told), default=0.0),
            "perf/engine_preemptions": float(max(0, preemptions - self._preemptions)),
        }
        # A restarted engine counts from 0, so a difference can be negative; it is reported as 0.
        if self._looked_at is not None and loads:
            worked_s = max(0.0, busy_s - self._busy_s) / len(loads)
            metrics["perf/engine_idle_s"] = max(0.0, now - self._looked_at - worked_s)
        self._looked_at, self._busy_s, self._preemptions = now, busy_s, preemptions
        return metrics
