"""Garbage collection of the placement groups of runs that share a cluster, as trials do.

A janitor removes the groups whose holder has died: Ray keeps a group that an actor made until the
whole job ends, and a trial that Ray Tune kills has no chance to clean up. It also lets one run at a
time reserve: of two that held one group each, both might wait for their second one.

A sweep has one janitor for all of its trials, owned by its driver. Every other run that a task or
an actor of Ray starts has one of its own, which is detached and ends itself after the run. Ray
Train's PlacementGroupCleaner knows only the learner workers' group, and was seen to live on for
minutes after its run.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.util.placement_group import PlacementGroup, remove_placement_group

from raypo.cluster.actors import is_alive

LOOK_EVERY_S = 1.0


class Janitor:
    """Watches leases: actors that die with the process that started them. A zero-CPU actor."""

    def __init__(self, until: ActorHandle | None = None) -> None:
        """Hold nothing yet.

        Args:
            until: The lease of the one run that it is for, after which it ends its own process.
        """
        self._until = until
        self._held: list[tuple[ActorHandle, PlacementGroup]] = []
        self._turn: tuple[str, ActorHandle] | None = None
        """Which run is reserving, and its lease."""
        self._lock = threading.Lock()
        threading.Thread(target=self._watch, name="raypo-janitor", daemon=True).start()

    def hold(self, lease: ActorHandle, group: PlacementGroup) -> None:
        """Remove the group once the lease is dead."""
        with self._lock:
            self._held.append((lease, group))

    def take_turn(self, run: str, lease: ActorHandle) -> bool:
        """Whether the run may reserve now, until `end_turn`; whatever it left before is gone then.

        Its turn also ends where its lease dies.
        """
        self._remove_dead()
        with self._lock:
            is_taken = self._turn is not None and is_alive(self._turn[1])
            if not is_taken:
                self._turn = run, lease
            return not is_taken

    def end_turn(self, run: str) -> None:
        """The run holds all that it needs."""
        with self._lock:
            if self._turn is not None and self._turn[0] == run:
                self._turn = None

    def close(self) -> None:
        """Remove every group that is still held: all leases are at their end."""
        with self._lock:
            held, self._held = self._held, []
        for _, group in held:
            remove_placement_group(group)

    def __repr__(self) -> str:
        return f"Janitor({len(self._held)} placement groups)"

    def _watch(self) -> None:
        while True:
            time.sleep(LOOK_EVERY_S)
            is_over = self._until is not None and not is_alive(self._until)
            self._remove_dead()
            if is_over:
                self.close()
                ray.kill(ray.get_runtime_context().current_actor)
                return

    def _remove_dead(self) -> None:
        with self._lock:
            held = list(self._held)
        dead = [pair for pair in held if not is_alive(pair[0])]
        for _, group in dead:
            remove_placement_group(group)
        with self._lock:
            self._held = [pair for pair in self._held if pair not in dead]


def start_janitor(*, until: ActorHandle | None = None) -> ActorHandle:
    """Start a janitor that lives as long as this process.

    Args:
        until: A run's lease. If given, the janitor outlives this process and ends after the lease.
    """
    janitor: Any = ray.remote(Janitor).options(
        num_cpus=0,
        max_concurrency=16,
        lifetime=None if until is None else "detached",
        # Not in the placement group of a Tune trial, whose removal kills every actor in it.
        scheduling_strategy="DEFAULT",
    )
    return janitor.remote(until)
