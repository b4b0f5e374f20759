"""Garbage collection of placement groups of runs that share a cluster, like trials of a sweep.

A run registers its groups under a lease, an actor that dies with the run's process. The collector
removes groups whose lease is dead. Ray itself keeps a group that an actor created until the job
ends, and a trial that Ray Tune kills cannot remove its own groups. The collector also allows only
one run at a time to reserve groups. Otherwise two runs could deadlock, if each held one group and
waited for its second group.

A sweep has one collector for all trials, owned by its driver. Every other run that a Ray task or
actor starts has its own collector, which is detached and ends itself after the run. Ray Train's
PlacementGroupCleaner is not sufficient: it knows only the learner workers' group, and it has
outlived its run by minutes.

Threads: Ray calls the actor's methods concurrently. A daemon thread checks the leases once a
second. A lock guards the shared state. `take_turn` runs a health check while it holds the lock.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.util.placement_group import PlacementGroup, remove_placement_group

from raypo.cluster.actors import is_alive

CHECK_INTERVAL_S = 1.0
"""Interval, in seconds, of the health checks of leases."""
_log = logging.getLogger(__name__)


class PlacementGroupGC:
    """Zero-CPU actor that watches leases and removes the placement groups of dead leases."""

    def __init__(self, run_lease: ActorHandle | None = None) -> None:
        """Start the thread that watches leases.

        Args:
            run_lease: Lease whose death ends the collector's process. None means that the collector
                does not end on its own.
        """
        self._run_lease = run_lease
        self._registered: list[tuple[ActorHandle, PlacementGroup]] = []
        self._turn: tuple[str, ActorHandle] | None = None
        """Name and lease of the run that may reserve groups now."""
        self._lock = threading.Lock()
        threading.Thread(target=self._watch, name="raypo-group-gc", daemon=True).start()

    def hold(self, lease: ActorHandle, group: PlacementGroup) -> None:
        """Register a group. It is removed when its lease is dead."""
        with self._lock:
            self._registered.append((lease, group))

    def take_turn(self, run: str, lease: ActorHandle) -> str | None:
        """Remove the groups of dead leases, and give the run the turn to reserve if it is free.

        The turn lasts until `end_turn`, or until the run's lease dies.

        Returns:
            None if the run got the turn, otherwise the name of the run that has it.
        """
        self._remove_dead()
        with self._lock:
            if self._turn is not None and is_alive(self._turn[1]):
                return self._turn[0]
            self._turn = run, lease
            return None

    def end_turn(self, run: str) -> None:
        """End the run's turn after it has reserved all its groups."""
        with self._lock:
            if self._turn is not None and self._turn[0] == run:
                self._turn = None

    def close(self) -> None:
        """Remove all registered groups, after all runs have ended."""
        with self._lock:
            registered = list(self._registered)
        self._remove(registered)

    def __repr__(self) -> str:
        return f"PlacementGroupGC({len(self._registered)} placement groups)"

    def _watch(self) -> None:
        while True:
            time.sleep(CHECK_INTERVAL_S)
            try:
                is_run_over = self._run_lease is not None and not is_alive(self._run_lease)
                self._remove_dead()
                if is_run_over:
                    self.close()
                    ray.kill(ray.get_runtime_context().current_actor)
                    return
            except Exception:  # for example, while Ray's GCS restarts
                _log.exception(
                    "placement groups were not removed; next try in %g s", CHECK_INTERVAL_S
                )

    def _remove_dead(self) -> None:
        with self._lock:
            registered = list(self._registered)
        self._remove([pair for pair in registered if not is_alive(pair[0])])

    def _remove(self, pairs: list[tuple[ActorHandle, PlacementGroup]]) -> None:
        """Remove groups. If a removal fails, the group stays registered."""
        for pair in pairs:
            remove_placement_group(pair[1])
            with self._lock:
                self._registered = [
                    registered for registered in self._registered if registered is not pair
                ]


def start_placement_group_gc(*, run_lease: ActorHandle | None = None) -> ActorHandle:
    """Start a collector that lives as long as this process.

    Args:
        run_lease: Lease of a run. If given, the collector is detached from this process and ends
            after the lease.
    """
    group_gc: Any = ray.remote(PlacementGroupGC).options(
        num_cpus=0,
        max_concurrency=16,
        lifetime=None if run_lease is None else "detached",
        # Keep the collector out of a Tune trial's placement group, because removing a group kills
        # all actors in it.
        scheduling_strategy="DEFAULT",
    )
    return group_gc.remote(run_lease)
