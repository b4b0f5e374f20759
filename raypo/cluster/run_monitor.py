"""Monitor of a run: workers send events to the driver, and the driver may request a stop.

Processes: the monitor is an actor that the driver owns. Rank 0 sends events without waiting, and
the driver polls them with `drain`. Workers query `stop_requested`. The actor runs one method at a
time, so it needs no lock.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raypo.cluster.actors import start_named

DUPLICATE_WINDOW_S = 60.0
"""Seconds within which repeated reports of the same event are dropped."""


class Monitor:
    """Zero-CPU actor that buffers events for the driver and stores the driver's stop request."""

    def __init__(self) -> None:
        self._created_at = time.monotonic()
        self._events: list[tuple[str, Any]] = []
        self._last_report_times: dict[str, float] = {}
        """Time of the last report of each event, by its key."""
        self._stop = False
        self._attempts = 0
        self._group: PlacementGroup | None = None
        self._driver: list[dict[str, float]] = []
        self._beats: dict[int, Any] = {}
        """The last beat of each worker by rank, since the last `drain`."""

    def tell(self, kind: str, content: Any) -> None:
        """Buffer an event for the driver."""
        self._events.append((kind, content))

    def buffer_once(self, key: str, text: str) -> None:
        """Buffer a message, unless it was already reported within `DUPLICATE_WINDOW_S` seconds."""
        now = time.monotonic()
        if now - self._last_report_times.get(key, -math.inf) > DUPLICATE_WINDOW_S:
            self.tell("message", text)
        self._last_report_times[key] = now

    def beat(self, beat: Any) -> None:
        """Keep a worker's beat (`raypo.cluster.heartbeat`) for the driver, in place of its last."""
        self._beats[beat.rank] = beat

    def drain(self, memory: dict[str, float]) -> list[tuple[str, Any]]:
        """Record the driver's memory, and return the events since the last call, in order.

        Args:
            memory: Memory of the driver, from `raypo.metrics.process_memory`.
        """
        events = [*self._events, *(("beat", beat) for beat in self._beats.values())]
        self._events, self._beats, self._driver = [], {}, [memory]
        return events

    def driver_memory(self) -> list[dict[str, float]]:
        """Return the driver's memory at its last `drain`. It is empty before the first `drain`."""
        return self._driver

    def request_stop(self) -> None:
        """Request that the workers stop at the end of the step."""
        self._stop = True

    def stop_requested(self) -> bool:
        """Return True if the driver has requested a stop."""
        return self._stop

    def begin_attempt(self, group: PlacementGroup | None) -> float:
        """Record that the learner workers of an attempt have started in this placement group.

        Returns:
            Seconds from the start of this actor until the workers of the first attempt started. 0
            for later attempts, because they resume from a checkpoint that includes this time.
        """
        waited_s = 0.0 if self._attempts else time.monotonic() - self._created_at
        self._attempts, self._group = self._attempts + 1, group
        self.tell("attempt", None)
        return waited_s

    def end_attempt(self) -> tuple[int, PlacementGroup | None]:
        """Return the number of attempts so far, and the placement group of the last attempt.

        The group is None if the workers of the last attempt never started.
        """
        group, self._group = self._group, None
        return self._attempts, group

    def __repr__(self) -> str:
        return "Monitor(stopping)" if self._stop else "Monitor(running)"


def start_monitor(run: str) -> ActorHandle:
    """Start the monitor of a run, owned by this process."""
    # Run on the driver's node, like Ray Train's controller: another node may be lost while the run
    # continues.
    driver_node = NodeAffinitySchedulingStrategy(
        ray.get_runtime_context().get_node_id(), soft=False
    )
    options = {"num_cpus": 0, "scheduling_strategy": driver_node}
    return start_named(Monitor, f"raypo:{run}:monitor", options=options, kwargs={})


class MonitorClient:
    """A worker's client of the monitor. On ranks above 0, it has no monitor and does nothing."""

    def __init__(self, monitor: ActorHandle | None) -> None:
        self._monitor = monitor

    def begin_attempt(self, group: PlacementGroup | None) -> float:
        """Report that the learner workers have started; see `Monitor.begin_attempt`."""
        if self._monitor is None:
            return 0.0
        (waited_s,) = ray.get([self._monitor.begin_attempt.remote(group)])
        return waited_s

    def phase(self, text: str) -> None:
        """Report the current phase."""
        self._tell("phase", text)

    def step(self, metrics: Mapping[str, float]) -> None:
        """Report the metrics of a step that has ended."""
        self._tell("step", dict(metrics))

    def start(self, first_step: int) -> None:
        """Report the first step, counted from 1, before it begins."""
        self._tell("start", first_step)

    def message(self, text: str) -> None:
        """Report a line of text for the user."""
        self._tell("message", text)

    def event(self, key: str, text: str) -> None:
        """Report a line that other workers may also report. It is shown only once."""
        if self._monitor is not None:
            self._monitor.buffer_once.remote(key, text)

    def stop_requested(self) -> bool:
        """Return True if the driver has requested a stop."""
        return self._monitor is not None and bool(ray.get(self._monitor.stop_requested.remote()))

    def driver_memory(self) -> list[dict[str, float]]:
        """Return the driver's last reported memory. It is empty without a monitor."""
        return [] if self._monitor is None else ray.get(self._monitor.driver_memory.remote())

    def _tell(self, kind: str, content: Any) -> None:
        if self._monitor is not None:
            self._monitor.tell.remote(kind, content)
