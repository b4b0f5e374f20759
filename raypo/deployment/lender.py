"""Leases of deployments: a running engine is passed on from run to run instead of restarted."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.actor import ActorHandle

from raypo.cluster.actors import is_alive
from raypo.deployment.handle import DeploymentHandle

LOOK_EVERY_S = 0.5
"""Polling interval of a waiting run, in seconds, to see whether all holders of a slot are dead."""


@dataclass(frozen=True)
class Loan:
    """A lease: one run may use one slot of a deployment."""

    number: int
    handle: DeploymentHandle
    before: str | None
    """Name of another run that had the slot before. None if there was none."""


@dataclass(eq=False)
class _Seat:
    handle: DeploymentHandle
    holders: list[ActorHandle] = field(default_factory=list)
    run: str | None = None


class Lender:
    """Pool of slots of deployments, each leased to one run at a time. A zero-CPU actor.

    A slot is free when every worker that held it is dead. Then no push and no request of the
    earlier run can still be in flight.
    """

    def __init__(self, handles: Sequence[DeploymentHandle]) -> None:
        self._seats = [_Seat(handle) for handle in handles]
        self._lock = threading.Lock()

    def lend(self, run: str, holder: ActorHandle, timeout_s: float) -> Loan | None:
        """Lease a free slot to a run, and wait for one if necessary.

        Args:
            run: Name of the run.
            holder: The worker that asks. The lease lasts while it or another holder is alive.
            timeout_s: Seconds to wait for a free slot.

        Returns:
            The lease. None if no slot becomes free in time, or all deployments are lost.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            usable = [seat for seat in self._seats if not seat.handle.is_lost()]
            with self._lock:
                free = [seat for seat in usable if not any(map(is_alive, seat.holders))]
                if free:
                    return self._give(free, run, holder)
            if not usable or time.monotonic() > deadline:
                return None
            time.sleep(LOOK_EVERY_S)

    def _give(self, free: Sequence[_Seat], run: str, holder: ActorHandle) -> Loan:
        """Lease one of the free slots: a restarted run's own earlier slot, if it is free."""
        seat = next((seat for seat in free if seat.run == run), free[0])
        before = seat.run
        # If the run gets another slot, forget it in its old one, so that only one slot names it.
        for each in self._seats:
            each.run = None if each.run == run else each.run
        seat.run, seat.holders = run, [holder]
        return Loan(self._seats.index(seat), seat.handle, before if before != run else None)

    def hold(self, number: int, holder: ActorHandle) -> None:
        """Add another worker of the run to the holders of a lease."""
        with self._lock:
            self._seats[number].holders.append(holder)

    def __repr__(self) -> str:
        return f"Lender({len(self._seats)} seats)"


def start_lender(handles: Sequence[DeploymentHandle]) -> ActorHandle:
    """Start a pool that lives as long as this process.

    Args:
        handles: One handle for each slot. A deployment that several runs may use at the same time
            occurs several times.
    """
    # Each waiting run blocks a thread of the actor; `hold` must still get one.
    threads = 16 + len(handles)
    lender: Any = ray.remote(Lender).options(num_cpus=0, max_concurrency=threads)
    return lender.remote(handles)
