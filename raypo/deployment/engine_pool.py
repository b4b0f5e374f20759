"""Leases of deployments: a running engine is passed on from run to run instead of restarted."""

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

LOOK_EVERY_S = 0.5
"""Interval, in seconds, at which a waiting run checks if the holder of a slot is dead."""


@dataclass(frozen=True)
class Lease:
    """Permission of one run to use one slot of a deployment."""

    handle: DeploymentHandle
    before: str | None
    """Name of the other run that had the slot before, or None if no other run had it."""


@dataclass(eq=False)
class _Slot:
    handle: DeploymentHandle
    holder: ActorHandle | None = None
    run: str | None = None


class EnginePool:
    """Pool of slots of deployments, each leased to one run at a time. A zero-CPU actor.

    A slot is free when the worker that held it is dead, the only one of its run that calls engines.
    Calls that it had sent may still run there; those of the next run queue behind them.
    """

    def __init__(self, handles: Sequence[DeploymentHandle]) -> None:
        self._slots = [_Slot(handle) for handle in handles]
        self._lock = threading.Lock()

    def lease(self, run: str, holder: ActorHandle, timeout_s: float) -> Lease | None:
        """Lease a free slot to a run, and wait for one if necessary.

        Args:
            run: Name of the run.
            holder: The run's first worker. The lease lasts while it is alive.
            timeout_s: Seconds to wait for a free slot.

        Returns:
            The lease, or None if no slot becomes free in time, or if all deployments are lost.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            usable = [slot for slot in self._slots if not slot.handle.is_lost()]
            with self._lock:
                free = [s for s in usable if s.holder is None or not is_alive(s.holder)]
                if free:
                    return self._leased(free, run, holder)
            if not usable or time.monotonic() > deadline:
                return None
            time.sleep(LOOK_EVERY_S)

    def _leased(self, free: Sequence[_Slot], run: str, holder: ActorHandle) -> Lease:
        """Lease one of the free slots. A restarted run gets its earlier slot if that is free."""
        leased = next((slot for slot in free if slot.run == run), free[0])
        before = leased.run
        # Remove the run's name from its earlier slot, so that only one slot names the run.
        for slot in self._slots:
            slot.run = None if slot.run == run else slot.run
        leased.run, leased.holder = run, holder
        return Lease(leased.handle, before if before != run else None)

    def runs(self) -> list[str]:
        """Return the name of the last run on each slot, sorted and without repetition."""
        return sorted({slot.run for slot in self._slots if slot.run is not None})

    def __repr__(self) -> str:
        return f"EnginePool({len(self._slots)} slots)"


def start_engine_pool(handles: Sequence[DeploymentHandle]) -> ActorHandle:
    """Start a pool that lives as long as this process.

    Args:
        handles: One handle for each slot. A deployment that several runs may use at the same time
            occurs several times.
    """
    # Each waiting run blocks a thread of the actor; `runs` must still get one.
    threads = 16 + len(handles)
    engine_pool: Any = ray.remote(EnginePool).options(num_cpus=0, max_concurrency=threads)
    return engine_pool.remote(handles)
