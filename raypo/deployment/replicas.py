"""The replicas of a deployment as one process knows them: who is up, who is asked, who is ended."""

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
from raypo.deployment.spec import Deployment, Life, Unhealthy

PROBE_TIMEOUT_S = 3.0
"""A replica that does not tell its load in this time counts as the fullest. Of one that is being
started again, Ray 2.60 says so in 2 s, each time."""
REST_S = 4.0
"""How long a replica that has not told its load is asked last."""
RETRY_S = 0.2
CHOOSING = 16
"""Most callers in event loops that look for another replica at a time."""

logger = logging.getLogger(__name__)


class Deadline:
    """When a caller stops waiting."""

    def __init__(self, limit_s: float | None) -> None:
        self.limit_s = limit_s
        self._end = math.inf if limit_s is None else time.monotonic() + limit_s

    def left(self, at_most: float = math.inf) -> float | None:
        """Seconds; None: for ever."""
        seconds = min(at_most, max(0.0, self._end - time.monotonic()))
        return None if seconds == math.inf else seconds

    def sleep(self) -> bool:
        """Wait a moment; whether there is time left."""
        time.sleep(self.left(RETRY_S) or 0.0)
        return time.monotonic() < self._end

    def passed(self, name: str) -> DeploymentError:
        """The error to raise then."""
        return DeploymentError(
            f"{name}: no answer in {self.limit_s:g} s. Look at its log in the Ray dashboard; raise "
            f"placement.timeout_s if it is still starting, request_timeout_s if it works."
        )


class Replicas:
    """A fixed list of named actors, found when they are first asked."""

    def __init__(self, limits: Deployment, namespace: str, count: int) -> None:
        self.limits, self.namespace, self.count = limits, namespace, count
        self._actors: dict[int, ActorHandle] = {}
        self._were_up: set[int] = set()
        """Those that have answered: one that never did is not up yet, rather than hanging."""
        self._rest_until: dict[int, float] = {}
        self._looked_at: dict[int, float] = {}
        self.choosing = threading.BoundedSemaphore(CHOOSING)
        """For callers in event loops that look for a replica, each in a thread meanwhile."""
        self.lost: dict[int, Exception] = {}
        """Why those that Ray does not start again are gone."""

    def __reduce__(self) -> Any:
        return Replicas, (self.limits, self.namespace, self.count)

    def name(self, index: int) -> str:
        """Name of the replica's actor."""
        return f"{self.limits.name}:{index}"

    def actor(self, index: int) -> ActorHandle:
        """The actor, whichever life it lives.

        Raises:
            ValueError: there is none of its name any more.
        """
        if index not in self._actors:
            self._actors[index] = ray.get_actor(self.name(index), self.namespace)
        return self._actors[index]

    def left(self) -> list[int]:
        """The numbers of the replicas that are not known to be gone for good."""
        return [index for index in range(self.count) if index not in self.lost]

    def ask(
        self, method: str, indexes: Sequence[int], timeout_s: float | None
    ) -> tuple[dict[int, Any], list[int]]:
        """What replicas say of themselves, and who has not answered in time.

        Those that are being started again are in neither.
        """
        refs: dict[int, Any] = {}
        for index in indexes:
            try:
                refs[index] = getattr(self.actor(index), method).remote()
            except ValueError as error:
                self.note_lost(index, error)
        waited = list(refs.values())
        told, _ = ray.wait(waited, num_returns=len(refs), timeout=timeout_s) if refs else ([], [])
        answers = {}
        for index, ref in refs.items():
            if ref in told:
                try:
                    answers[index] = ray.get(ref)
                except RayError as error:
                    if not is_lost_actor(error):
                        raise
                    self.note_lost(index, error)
                else:
                    self._were_up.add(index)
                    self._rest_until.pop(index, None)
        return answers, [index for index, ref in refs.items() if ref not in told]

    def choose(
        self,
        prefer: Sequence[int],
        avoid: Collection[int],
        *,
        stays: bool = False,
        waits: bool = True,
    ) -> int | None:
        """A preferred replica with room, else the one with the fewest requests.

        None where there is none but those to be avoided and those being started again.

        Args:
            stays: A preferred one, however many requests it has, as long as it is not known to be
                lost; then it is not asked, and nothing is waited for.
            waits: Where this says no more, ask for the loads, which takes seconds where a replica
                is lost. Else None.
        """
        now = time.monotonic()
        left = [index for index in self.left() if index not in avoid]
        awake = [index for index in left if self._rest_until.get(index, 0.0) < now]
        for index in prefer if stays else ():
            if index in awake:
                return index
        if not waits:
            return None
        loads, silent = self.ask("load", awake or left, PROBE_TIMEOUT_S)
        for index in silent:  # busy, hanging, or away and Ray does not know yet
            loads[index], self._rest_until[index] = math.inf, time.monotonic() + REST_S
        for index in prefer:
            if loads.get(index, math.inf) < self.limits.max_ongoing_requests:
                return index
        return min(loads, key=lambda index: (loads[index], random.random()), default=None)

    def lives(self) -> dict[int, Life]:
        """The replicas that are up, by number; waits until there is one.

        Raises:
            DeploymentError: none is left, or none is up within `start_timeout_s`.
        """
        deadline = Deadline(self.limits.start_timeout_s)
        while True:
            lives, silent = self.ask("where", self.left(), self.limits.health_check_timeout_s)
            for index in silent:
                self.end_hanging(index)
            if lives:
                return lives
            self.wait_for_a_start(deadline)

    def wait_for_a_start(self, deadline: Deadline) -> None:
        """Give those that are being started again a moment.

        Raises:
            DeploymentError: there are none, or the deadline has passed.
        """
        name, limits = self.limits.name, self.limits
        if not self.left():
            index, reason = next(reversed(self.lost.items()))
            raise DeploymentError(
                f"{name}: no replica is left. Each is started again max_restarts "
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
        """The answer of a replica, which is ended if it hangs meanwhile or cannot go on.

        Raises:
            RayError: the replica was lost (`is_lost_actor`).
            DeploymentError: there is no answer before the deadline.
            Exception: whatever the replica's method raised.
        """
        while not ray.wait([ref], timeout=deadline.left(self.limits.health_check_period_s))[0]:
            self.look_after(index, ref, deadline)
        try:
            answer = ray.get(ref)
        except RayError as error:
            if is_lost_actor(error):
                self.note_lost(index, error)
            raise
        self._end_unhealthy(index, answer)
        return answer

    def look_after(self, index: int, ref: Any, deadline: Deadline) -> None:
        """End a replica that hangs or cannot go on, while its answer is waited for.

        Raises:
            DeploymentError: the deadline has passed.
        """
        if deadline.left() == 0.0:
            ray.cancel(ref)  # where it still waits for its turn
            raise deadline.passed(self.name(index))
        now = time.monotonic()
        if now < self._looked_at.get(index, -math.inf) + self.limits.health_check_period_s / 2:
            return  # for somebody else who waits for it
        self._looked_at[index] = now
        told, silent = self.ask("health", [index], self.limits.health_check_timeout_s)
        for each in silent:
            self.end_hanging(each)
        self._end_unhealthy(index, told.get(index))

    def note_lost(self, index: int, error: Exception) -> None:
        """A replica is gone: for a moment, or for good."""
        self._rest_until[index] = time.monotonic() + REST_S
        if not isinstance(error, ActorUnavailableError):
            self.lost[index] = error

    def end_hanging(self, index: int) -> None:
        """Have Ray start a replica again that was up and does not answer."""
        if index in self._were_up:
            logger.warning(
                "%s: no answer to a health check in %g s (health_check_timeout_s); it is killed, "
                "and Ray starts it again",
                self.name(index),
                self.limits.health_check_timeout_s,
            )
            self._were_up.discard(index)  # its next life has to be up before it can hang
            ray.kill(self.actor(index), no_restart=False)

    def _end_unhealthy(self, index: int, answer: Any) -> None:
        if isinstance(answer, Unhealthy):
            logger.warning("%s: %s; Ray starts it again", self.name(index), answer.reason)
            self._rest_until[index] = time.monotonic() + REST_S
            self.actor(index).leave.remote(answer.life)
