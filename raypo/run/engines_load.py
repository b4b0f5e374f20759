"""What the engines were busy with in a step, as metrics."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from raypo.serving.requests import Load


@dataclass
class EnginesLoad:
    """Makes metrics of what engines tell of themselves, from one look to the next."""

    _looked_at: float | None = None
    _busy_s: float = 0.0
    _preemptions: int = 0

    def figures(self, loads: Sequence[Load]) -> dict[str, float]:
        """`perf/engine_*`: requests and KV cache at this moment, waiting since the last look.

        Args:
            loads: Of all engines that answer. One that was started again counts from 0: what it
                had done since the last look is then not known, and taken for nothing.
        """
        now = time.monotonic()
        busy_s = sum(each.busy_s for each in loads)
        preemptions = sum(each.preemptions for each in loads)
        figures = {
            "perf/engine_queued": float(sum(each.queued for each in loads)),
            "perf/engine_running": float(sum(each.running for each in loads)),
            "perf/engine_kv_cache": max((each.kv_cache_use for each in loads), default=0.0),
            "perf/engine_preemptions": float(max(0, preemptions - self._preemptions)),
        }
        if self._looked_at is not None and loads:
            worked_s = max(0.0, busy_s - self._busy_s) / len(loads)
            figures["perf/engine_idle_s"] = max(0.0, now - self._looked_at - worked_s)
        self._looked_at, self._busy_s, self._preemptions = now, busy_s, preemptions
        return figures
