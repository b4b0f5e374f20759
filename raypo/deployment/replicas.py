"""One process's view of a deployment's replicas: choose, watch, check and kill them."""

from __future__ import annotations

import logging
import math
import random
import threading
import time
from collections.abc import Collection, Sequence
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorUnavailableError, RayError

from raypo.cluster.actors import DeploymentError, is_lost_actor
from raypo.deployment.spec import Deployment, Incarnation, Unhealthy

PROBE_TIMEOUT_S = 3.0
"""Seconds after which a replica that does not report its load counts as the busiest. Ray 2.60 takes
2 s to say that an actor is restarting, each time."""
REST_S = 4.0
"""Seconds for which a replica that did not report its load is tried last."""
RETRY_S = 0.2
CHOOSING = 16
"""Threads of event loops that may choose a replica at the same time."""

logger = logging.getLogger(__name__)


class Deadline:
    """The time at which a caller stops waiting."""

    def __init__(self, limit_s: float | None) -> None:
        self.limit_s = limit_s
        self._end = math.inf if limit_s is None else time.monotonic() + limit_s

    def left(self, at_most: float = math.inf) -> float | None:
        """Return the seconds that are left. None means no limit."""
        seconds = min(at_most, max(0.0, self._end - time.monotonic()))
        return None if seconds == math.inf else seconds

    def sleep(self) -> bool:
        """Wait for the retry interval; return whether there is time left."""
        time.sleep(self.left(RETRY_S) or 0.0)
        return time.monotonic() < self._end

    def passed(self, name: str) -> DeploymentError:
        """Return the error to raise at the deadline."""
        return DeploymentError(
            f"{name}: no answer in {self.limit_s:g} s. Look at its log in the Ray dashboard; raise "
            f"placement.timeout_s if it is still starting, request_timeout_s if it works."
        )


class Replicas:
    """A fixed list of named actors, looked up at their first use."""

    def __init__(self, limits: Deployment, namespace: str, count: int) -> None:
        self.limits, self.namespace, self.count = limits, namespace, count
        self._actors: dict[int, ActorHandle] = {}
        self._were_up: set[int] = set()
        """Replicas that have answered once. One that never did is still starting, not hanging."""
        self._rest_until: dict[int, float] = {}
        self._checked_at: dict[int, float] = {}
        self.choosing = threading.BoundedSemaphore(CHOOSING)
        """Limits the threads in which event loops choose a replica."""
        self.lost: dict[int, Exception] = {}
        """Index to error, of each replica that Ray does not restart."""

    def __reduce__(self) -> Any:
        return Replicas, (self.limits, self.namespace, self.count)

    def name(self, index: int) -> str:
        """Return the name of the replica's actor."""
        return f"{self.limits.name}:{index}"

    def actor(self, index: int) -> ActorHandle:
        """Return the actor, whatever its incarnation.

        Raises:
            ValueError: no actor has its name any more.
        """
        if index not in self._actors:
            self._actors[index] = ray.get_actor(self.name(index), self.namespace)
        return self._actors[index]

    def left(self) -> list[int]:
        """Return the indices of the replicas that are not known to be gone for good."""
        return [index for index in range(self.count) if index not in self.lost]

    def ask(
        self, method: str, indexes: Sequence[int], timeout_s: float | None
    ) -> tuple[dict[int, Any], list[int]]:
        """Call a method of the replica actors themselves, like `load` or `health`.

        Returns:
            The values by index, and the indices without a value in time. Replicas that are
            restarting are in neither.
        """
        refs: dict[int, Any] = {}
        for index in indexes:
            try:
                refs[index] = getattr(self.actor(index), method).remote()
            except ValueError as error:
                self.note_lost(index, error)
        waited = list(refs.values())
        done, _ = ray.wait(waited, num_returns=len(refs), timeout=timeout_s) if refs else ([], [])
        answers = {}
        for index, ref in refs.items():
            if ref in done:
                try:
                    answers[index] = ray.get(ref)
                except RayError as error:
                    if not is_lost_actor(error):
                        raise
                    self.note_lost(index, error)
                else:
                    self._were_up.add(index)
                    self._rest_until.pop(index, None)
        return answers, [index for index, ref in refs.items() if ref not in done]

    def choose(
        self,
        prefer: Sequence[int],
        avoid: Collection[int],
        *,
        is_sticky: bool = False,
        waits: bool = True,
    ) -> int | None:
        """Choose a preferred replica with room, else the one with the shortest queue.

        Args:
            prefer: Indices of the preferred replicas.
            avoid: Indices that must not be chosen.
            is_sticky: Choose a preferred replica whatever its queue, as long as it is not known to
                be lost. Its load is then not asked for.
            waits: Ask replicas for their load, which takes seconds if one is lost. False returns
                None instead.

        Returns:
            The index, or None if all are restarting or to be avoided.
        """
        now = time.monotonic()
        left = [index for index in self.left() if index not in avoid]
        awake = [index for index in left if self._rest_until.get(index, 0.0) < now]
        for index in prefer if is_sticky else ():
            if index in awake:
                return index
        if not waits:
            return None
        loads, silent = self.ask("load", awake or left, PROBE_TIMEOUT_S)
        for index in silent:  # busy, hanging, or lost without Ray knowing yet
            loads[index], self._rest_until[index] = math.inf, time.monotonic() + REST_S
        for index in prefer:
            if loads.get(index, math.inf) < self.limits.max_ongoing_requests:
                return index
        return min(loads, key=lambda index: (loads[index], random.random()), default=None)

    def incarnations(self) -> dict[int, Incarnation]:
        """Return the replicas that are up, by index; wait until there is one.

        Raises:
            DeploymentError: none is left, or none is up within `start_timeout_s`.
        """
        deadline = Deadline(self.limits.start_timeout_s)
        while True:
            up, silent = self.ask("where", self.left(), self.limits.health_check_timeout_s)
            for index in silent:
                self.end_hanging(index)
            if up:
                return up
            self.wait_for_a_start(deadline)

    def wait_for_a_start(self, deadline: Deadline) -> None:
        """Wait for the retry interval while replicas restart.

        Raises:
            DeploymentError: none restarts, or the deadline has passed.
        """
        name, limits = self.limits.name, self.limits
        if not self.left():
            index, reason = next(reversed(self.lost.items()))
            raise DeploymentError(
                f"{name}: no replica is left. Each is restarted max_restarts "
                f"({limits.max_restarts}) times, and not after it was shut down or the process "
                f"that started it has ended. The last one, {self.name(index)}, was lost: {reason}"
            )
        if not deadline.sleep():
            raise DeploymentError(
                f"{', '.join(map(self.name, self.left()))}: not started again in "
                f"{deadline.limit_s:g} s (placement.timeout_s). The node may be gone, or its "
                f"devices be taken; look at the replica's log in the Ray dashboard."
            )

    def watch(self, index: int, ref: Any, deadline: Deadline) -> Any:
        """Wait for a replica's reply; kill the replica if it hangs meanwhile or cannot go on.

        Raises:
            RayError: the replica was lost (`is_lost_actor`).
            DeploymentError: there is no reply before the deadline.
            Exception: whatever the replica's method raised.
        """
        while not ray.wait([ref], timeout=deadline.left(self.limits.health_check_period_s))[0]:
            self.check_health(index, ref, deadline)
        try:
            reply = ray.get(ref)
        except RayError as error:
            if is_lost_actor(error):
                self.note_lost(index, error)
            raise
        self._end_unhealthy(index, reply)
        return reply

    def check_health(self, index: int, ref: Any, deadline: Deadline) -> None:
        """Kill a replica that hangs or cannot go on, while a caller waits for its reply.

        Raises:
            DeploymentError: the deadline has passed.
        """
        if deadline.left() == 0.0:
            ray.cancel(ref)  # it may still be queued
            raise deadline.passed(self.name(index))
        now = time.monotonic()
        if now < self._checked_at.get(index, -math.inf) + self.limits.health_check_period_s / 2:
            return  # another waiting caller has just done so
        self._checked_at[index] = now
        illness, silent = self.ask("health", [index], self.limits.health_check_timeout_s)
        for each in silent:
            self.end_hanging(each)
        self._end_unhealthy(index, illness.get(index))

    def note_lost(self, index: int, error: Exception) -> None:
        """Note that a replica is gone: until it restarts, or for good."""
        self._rest_until[index] = time.monotonic() + REST_S
        if not isinstance(error, ActorUnavailableError):
            self.lost[index] = error

    def end_hanging(self, index: int) -> None:
        """Kill a replica that was up and does not answer, so that Ray restarts it."""
        if index in self._were_up:
            logger.warning(
                "%s: no answer to a health check in %g s (health_check_timeout_s); it is killed, "
                "and Ray restarts it",
                self.name(index),
                self.limits.health_check_timeout_s,
            )
            self._were_up.discard(index)  # its next incarnation has to be up before it can hang
            ray.kill(self.actor(index), no_restart=False)

    def _end_unhealthy(self, index: int, reply: Any) -> None:
        if isinstance(reply, Unhealthy):
            logger.warning("%s: %s; Ray restarts it", self.name(index), reply.reason)
            self._rest_until[index] = time.monotonic() + REST_S
            self.actor(index).leave.remote(reply.incarnation)
