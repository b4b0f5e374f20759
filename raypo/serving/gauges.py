"""Prometheus gauges of an engine's load, on Ray's metrics endpoint."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import asdict

import ray

from raypo.serving.requests import Load

EVERY_S = 2.0
"""Update interval in seconds. Ray drops a gauge that is not set for some seconds."""


def tell_load(load: Callable[[], Load], ended: threading.Event) -> None:
    """Start a thread that exports one gauge `raypo_engine_<field>` for each field of `Load`.

    The label `engine` is the name of the actor. Outside of a named actor nothing is exported.

    Args:
        load: Returns the current load. Called in the thread.
        ended: Ends the thread when set.
    """
    name = ray.get_runtime_context().get_actor_name() if ray.is_initialized() else None
    if not name:
        return
    from ray.util.metrics import Gauge

    gauges = {
        key: Gauge(f"raypo_engine_{key}", description=f"Load.{key}", tag_keys=("engine",))
        for key in asdict(load())
    }

    def tell() -> None:
        while not ended.wait(EVERY_S):
            for key, value in asdict(load()).items():
                gauges[key].set(value, tags={"engine": name})

    threading.Thread(target=tell, name="raypo-gauges", daemon=True).start()
