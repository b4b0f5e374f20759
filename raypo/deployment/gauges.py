"""Prometheus gauges of a replica and of the object in it, on Ray's metrics endpoint."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

import ray

UPDATE_INTERVAL_S = 2.0
"""Update interval in seconds. Ray drops a gauge that has not been set for several seconds."""


def export_gauges(
    kind: str, values: Callable[[], Mapping[str, float]], stop_event: threading.Event
) -> None:
    """Start a thread that exports a gauge `raypo_<kind>_<key>` for each value.

    Each gauge has a label <kind> with the actor's name. Outside a named actor, this does nothing.

    Args:
        kind: engine or replica.
        values: Function that returns the current values, always with the same keys. The thread
            calls it.
        stop_event: Event that ends the thread.
    """
    name = ray.get_runtime_context().get_actor_name() if ray.is_initialized() else None
    if not name:
        return
    from ray.util.metrics import Gauge

    gauges = {key: Gauge(f"raypo_{kind}_{key}", tag_keys=(kind,)) for key in values()}

    def export() -> None:
        while not stop_event.wait(UPDATE_INTERVAL_S):
            for key, value in values().items():
                gauges[key].set(value, tags={kind: name})

    threading.Thread(target=export, name=f"raypo-gauges-{kind}", daemon=True).start()
