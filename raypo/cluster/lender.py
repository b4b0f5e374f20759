"""Lends deployments from run to run: an engine that is up is handed on instead of started anew."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import ray
from ray.actor import ActorHandle

from raypo.cluster.actors import is_alive
from raypo.cluster.handle import DeploymentHandle

LOOK_EVERY_S = 0.5
"""How often one that waits looks whether a holder has died."""


class Lender:
    """Deployments that one run at a time holds. A zero-CPU actor.

    One is free when every worker that held it is dead: so no push and no request of the run
    before can still be on its way.
    """

    def __init__(self, handles: Sequence[DeploymentHandle]) -> None:
        self._handles = list(handles)
        self._holders: dict[str, list[ActorHandle]] = {handle.name: [] for handle in handles}
        self._lock = threading.Lock()

    def lend(self, holder: ActorHandle, timeout_s: float) -> DeploymentHandle | None:
        """A deployment that nobody holds; None where none is free in time, or all have failed."""
        deadline = time.monotonic() + timeout_s
        while True:
            usable = [h for h in self._handles if h.status().state != "failed"]
            with self._lock:
                for handle in usable:
                    if not any(map(is_alive, self._holders[handle.name])):
                        self._holders[handle.name] = [holder]
                        return handle
            if not usable or time.monotonic() > deadline:
                return None
            time.sleep(LOOK_EVERY_S)

    def hold(self, name: str, holder: ActorHandle) -> None:
        """Another worker of the run that holds it."""
        with self._lock:
            self._holders[name].append(holder)

    def __repr__(self) -> str:
        return f"Lender({len(self._handles)} deployments)"


def start_lender(handles: Sequence[DeploymentHandle]) -> ActorHandle:
    """A lender that lives as long as this process."""
    lender: Any = ray.remote(Lender).options(num_cpus=0, max_concurrency=16)
    return lender.remote(handles)
