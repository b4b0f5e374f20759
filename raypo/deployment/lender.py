"""Lends deployments from run to run: an engine that is up is handed on instead of started anew."""

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
"""How often one that waits looks whether a holder has died."""


@dataclass(frozen=True)
class Loan:
    """A seat at a deployment, for one run."""

    number: int
    handle: DeploymentHandle
    before: str | None
    """Another run that had the seat before; None: nobody."""


@dataclass(eq=False)
class _Seat:
    handle: DeploymentHandle
    holders: list[ActorHandle] = field(default_factory=list)
    run: str | None = None


class Lender:
    """Seats at deployments, each of which one run at a time holds. A zero-CPU actor.

    A seat is free when every worker that held it is dead: so no push and no request of the run
    before can still be on its way.
    """

    def __init__(self, handles: Sequence[DeploymentHandle]) -> None:
        self._seats = [_Seat(handle) for handle in handles]
        self._lock = threading.Lock()

    def lend(self, run: str, holder: ActorHandle, timeout_s: float) -> Loan | None:
        """A seat that nobody holds; None where none is free in time, or all have failed."""
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
        """A run that begins again finds its seat, or leaves nothing behind in the one it had."""
        seat = next((seat for seat in free if seat.run == run), free[0])
        before = seat.run
        for each in self._seats:
            each.run = None if each.run == run else each.run
        seat.run, seat.holders = run, [holder]
        return Loan(self._seats.index(seat), seat.handle, before if before != run else None)

    def hold(self, number: int, holder: ActorHandle) -> None:
        """Another worker of the run that holds the seat."""
        with self._lock:
            self._seats[number].holders.append(holder)

    def __repr__(self) -> str:
        return f"Lender({len(self._seats)} seats)"


def start_lender(handles: Sequence[DeploymentHandle]) -> ActorHandle:
    """A lender that lives as long as this process.

    Args:
        handles: One for each seat; a deployment that several runs use at a time comes several
            times.
    """
    # A run that waits for a seat takes a thread; `hold` must get one all the same.
    threads = 16 + len(handles)
    lender: Any = ray.remote(Lender).options(num_cpus=0, max_concurrency=threads)
    return lender.remote(handles)
