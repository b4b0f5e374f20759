"""An engine's load as gauges on Ray's metrics endpoint, for Prometheus."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import asdict

import ray

from raypo.serving.requests import Load

EVERY_S = 2.0
"""Ray forgets a gauge that was not set for some seconds."""


def tell_load(load: Callable[[], Load], ended: threading.Event) -> None:
    """Set `raypo_engine_queued` and its like from now on, one for each field of the load.

    Their label `engine` is the name of the actor; outside of an actor nothing is told.
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
