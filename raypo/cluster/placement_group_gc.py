"""Garbage collection of placement groups of runs that share a cluster, like trials of a sweep.

A run registers its groups under a lease, an actor that dies with the run's process. The collector
removes groups whose lease is dead. Ray itself keeps a group that an actor created until the job
ends, and a trial that Ray Tune kills cannot remove its own groups. The collector also lets only one
run reserve at a time. Otherwise two runs could deadlock, if each held one group and waited for its
second group.

A sweep has one collector for all trials, owned by its driver. Every other run that a Ray task or
actor starts has its own collector, which is detached and ends itself after the run. Ray Train's
PlacementGroupCleaner is not enough: it knows only the learner workers' group, and was seen to
outlive its run by minutes.

Threads: Ray calls the actor's methods concurrently. A daemon thread checks the leases once a
second. A lock guards the lists. `take_turn` runs a health check while it holds the lock.
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

LOOK_EVERY_S = 1.0
"""Interval of the health checks of leases."""
_log = logging.getLogger(__name__)


class PlacementGroupGC:
    """Zero-CPU actor that watches leases and removes the placement groups of dead leases."""

    def __init__(self, until: ActorHandle | None = None) -> None:
        """Start the thread that watches leases.

        Args:
            until: Lease whose death ends the collector's process. None means that the collector
                does not end by itself.
        """
        self._until = until
        self._held: list[tuple[ActorHandle, PlacementGroup]] = []
        self._turn: tuple[str, ActorHandle] | None = None
        """The run that is reserving, and that run's lease."""
        self._lock = threading.Lock()
        threading.Thread(target=self._watch, name="raypo-group-gc", daemon=True).start()

    def hold(self, lease: ActorHandle, group: PlacementGroup) -> None:
        """Register a group, which is removed once its lease is dead."""
        with self._lock:
            self._held.append((lease, group))

    def take_turn(self, run: str, lease: ActorHandle) -> str | None:
        """Remove the groups of dead leases, and try to start a run's turn to reserve.

        The turn lasts until `end_turn`, or until the run's lease dies.

        Returns:
            Name of the run that is reserving, or None if the turn has started.
        """
        self._remove_dead()
        with self._lock:
            if self._turn is not None and is_alive(self._turn[1]):
                return self._turn[0]
            self._turn = run, lease
            return None

    def end_turn(self, run: str) -> None:
        """End the run's turn, because it has reserved all its groups."""
        with self._lock:
            if self._turn is not None and self._turn[0] == run:
                self._turn = None

    def close(self) -> None:
        """Remove all groups that are still held, after all runs have ended."""
        with self._lock:
            held = list(self._held)
        self._remove(held)

    def __repr__(self) -> str:
        return f"PlacementGroupGC({len(self._held)} placement groups)"

    def _watch(self) -> None:
        while True:
            time.sleep(LOOK_EVERY_S)
            try:
                is_over = self._until is not None and not is_alive(self._until)
                self._remove_dead()
                if is_over:
                    self.close()
                    ray.kill(ray.get_runtime_context().current_actor)
                    return
            except Exception:  # for example while Ray's GCS restarts
                _log.exception("placement groups were not removed; next try in %g s", LOOK_EVERY_S)

    def _remove_dead(self) -> None:
        with self._lock:
            held = list(self._held)
        self._remove([pair for pair in held if not is_alive(pair[0])])

    def _remove(self, pairs: list[tuple[ActorHandle, PlacementGroup]]) -> None:
        """Remove groups. A group whose removal fails stays registered."""
        for pair in pairs:
            remove_placement_group(pair[1])
            with self._lock:
                self._held = [held for held in self._held if held is not pair]


def start_placement_group_gc(*, until: ActorHandle | None = None) -> ActorHandle:
    """Start a collector that lives as long as this process.

    Args:
        until: Lease of a run. If given, the collector is detached from this process and ends after
            the lease.
    """
    group_gc: Any = ray.remote(PlacementGroupGC).options(
        num_cpus=0,
        max_concurrency=16,
        lifetime=None if until is None else "detached",
        # Keep the collector out of a Tune trial's placement group: Ray kills every actor in a group
        # that is removed.
        scheduling_strategy="DEFAULT",
    )
    return group_gc.remote(until)
