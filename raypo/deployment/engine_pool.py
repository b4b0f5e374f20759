"""Leases of deployments, with which consecutive runs reuse running engines."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.actor import ActorHandle

from raypo.cluster.actors import is_alive
from raypo.deployment.handle import DeploymentHandle

POLL_S = 0.5
"""Interval, in seconds, at which a waiting run checks whether a slot's holder has died."""


@dataclass(frozen=True)
class Lease:
    """Lease of one slot of a deployment to one run."""

    handle: DeploymentHandle
    previous_run: str | None
    """Name of the run that held the slot before. None if the slot was free or held by this run."""


@dataclass(eq=False)
class _Slot:
    handle: DeploymentHandle
    holder: ActorHandle | None = None
    run: str | None = None


class EnginePool:
    """Zero-CPU actor that leases each slot of a deployment to one run at a time.

    A slot becomes free when its holder dies: the only worker of the run that calls engines. Calls
    that the dead worker sent may still be running; calls of the next run queue behind them.
    """

    def __init__(self, handles: Sequence[DeploymentHandle]) -> None:
        self._slots = [_Slot(handle) for handle in handles]
        self._lock = threading.Lock()

    def lease(self, run: str, holder: ActorHandle, timeout_s: float) -> Lease | None:
        """Lease a free slot to a run, and wait for one if necessary.

        Args:
            run: Name of the run.
            holder: The run's first worker. The lease lasts as long as this worker is alive.
            timeout_s: Seconds to wait for a free slot.

        Returns:
            The lease. None if no slot becomes free in time, or if all deployments are lost.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            available_slots = [slot for slot in self._slots if not slot.handle.is_lost()]
            with self._lock:
                free_slots = [
                    slot
                    for slot in available_slots
                    if slot.holder is None or not is_alive(slot.holder)
                ]
                if free_slots:
                    return self._assign(free_slots, run, holder)
            if not available_slots or time.monotonic() > deadline:
                return None
            time.sleep(POLL_S)

    def _assign(self, free_slots: Sequence[_Slot], run: str, holder: ActorHandle) -> Lease:
        """Lease one of the free slots, preferably the one that this run held before a restart."""
        assigned = next((slot for slot in free_slots if slot.run == run), free_slots[0])
        previous_run = assigned.run
        # Remove the run's name from its earlier slot, so that only one slot names the run.
        for slot in self._slots:
            slot.run = None if slot.run == run else slot.run
        assigned.run, assigned.holder = run, holder
        return Lease(assigned.handle, previous_run if previous_run != run else None)

    def runs(self) -> list[str]:
        """Return the sorted, unique names of the runs that last held a slot."""
        return sorted({slot.run for slot in self._slots if slot.run is not None})

    def __repr__(self) -> str:
        return f"EnginePool({len(self._slots)} slots)"


def start_engine_pool(handles: Sequence[DeploymentHandle]) -> ActorHandle:
    """Start a pool that lives as long as this process.

    Args:
        handles: One handle per slot. A deployment that several runs may use at the same time is
            listed several times.
    """
    # Each waiting run blocks one thread of the actor. Keep enough threads free to serve `runs`.
    threads = 16 + len(handles)
    engine_pool: Any = ray.remote(EnginePool).options(num_cpus=0, max_concurrency=threads)
    return engine_pool.remote(handles)
