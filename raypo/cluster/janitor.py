"""Removes placement groups whose holder has died: Ray keeps a group that an actor made until the
whole job ends, and a trial that Ray Tune kills has no chance to clean up.
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

    def __init__(self) -> None:
        self._held: list[tuple[ActorHandle, PlacementGroup]] = []
        self._lock = threading.Lock()
        threading.Thread(target=self._watch, name="raypo-janitor", daemon=True).start()

    def hold(self, lease: ActorHandle, group: PlacementGroup) -> None:
        """Remove the group once the lease is dead."""
        with self._lock:
            self._held.append((lease, group))

    def close(self) -> None:
        """Remove every group that is still held: all leases are at their end."""
        with self._lock:
            held, self._held = self._held, []
        for _, group in held:
            remove_placement_group(group)

    def num_held(self) -> int:
        """Groups whose lease is alive."""
        with self._lock:
            return len(self._held)

    def __repr__(self) -> str:
        return f"Janitor({self.num_held()} placement groups)"

    def _watch(self) -> None:
        while True:
            time.sleep(LOOK_EVERY_S)
            with self._lock:
                held = list(self._held)
            dead = [pair for pair in held if not is_alive(pair[0])]
            for _, group in dead:
                remove_placement_group(group)
            with self._lock:
                self._held = [pair for pair in self._held if pair not in dead]


def start_janitor() -> ActorHandle:
    """A janitor that lives as long as this process."""
    janitor: Any = ray.remote(Janitor).options(num_cpus=0, max_concurrency=4)
    return janitor.remote()
