"""Answers of replicas that are on their way, and what becomes of them when a replica is lost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayError

from raypo.cluster.actors import NoReplicaLeft, ReplicaLost, is_lost_actor
from raypo.deployment.replicas import PROBE_TIMEOUT_S, RETRY_S, Deadline, Replicas
from raypo.deployment.spec import Life, Refused, Request, Required, Unhealthy, Unprepared
from raypo.tracking.trace import note_call


class Response:
    """An answer that is on its way; a lost replica's request goes to another under the same id."""

    def __init__(
        self,
        replicas: Replicas,
        request: Request,
        prefer: Sequence[int],
        *,
        stays: bool = False,
        waits: bool = True,
    ) -> None:
        self._replicas, self._request, self._prefer = replicas, request, prefer
        self._stays = stays
        self._asked = time.time()
        self._refused: set[int] = set()
        self._unprepared: dict[int, str] = {}
        self._answer: tuple[Any] | None = None
        self._num_seen = 0
        """Entries of the answer that the replica has named."""
        self._send(replicas.choose(prefer, avoid=(), stays=stays, waits=waits))

    def result(self, timeout_s: float | None = None) -> Any:
        """Wait for the answer.

        Args:
            timeout_s: Seconds, re-sends included; None: the deployment's `request_timeout_s`.

        Raises:
            NoReplicaLeft: those that are up cannot do what comes before the request.
            DeploymentError: there is no answer in time, or no replica is left.
            Exception: whatever the replica's method raised.
        """
        deadline = Deadline(timeout_s or self._replicas.limits.request_timeout_s)
        while self._answer is None:
            if self._ref is None:
                self._send(self._next(deadline))
            else:
                self._take(deadline)
        return self._answer[0]

    def news(self) -> dict[int, Any]:
        """Entries of the answer, a list, that have come since this was last asked; some twice.

        Waits a moment for some; where the replica is lost there are none. In another thread than
        `result`.
        """
        index, id, part = self._index, self._request.id, self._request.part
        if index is None:
            return {}
        try:
            asked = self._replicas.actor(index).news.remote(id, part, self._num_seen)
            self._num_seen, news = ray.get(asked, timeout=PROBE_TIMEOUT_S)
        except (RayError, ValueError):
            return {}
        return news

    def __await__(self) -> Generator[Any, None, Any]:
        """Awaits what `result` returns, without a thread that waits for it."""
        return self._awaited().__await__()

    async def _awaited(self) -> Any:
        replicas = self._replicas
        deadline = Deadline(replicas.limits.request_timeout_s)
        while self._answer is None:
            if self._ref is None:
                while not replicas.choosing.acquire(blocking=False):
                    await asyncio.sleep(RETRY_S)
                try:
                    self._send(await asyncio.to_thread(self._next, deadline))
                finally:
                    replicas.choosing.release()
                continue
            index, ref = self._index, self._ref
            assert index is not None
            here = asyncio.wrap_future(ref.future())
            try:
                while not here.done():
                    period = deadline.left(replicas.limits.health_check_period_s)
                    if not (await asyncio.wait([here], timeout=period))[0]:
                        await asyncio.to_thread(replicas.look_after, index, ref, deadline)
            except asyncio.CancelledError:  # nobody waits any more, and the replica need not work
                here.cancel()
                ray.cancel(ref)
                raise
            here.exception()  # `_take` asks for it once more
            await asyncio.to_thread(self._take, deadline)
        return self._answer[0]

    def _send(self, index: int | None) -> None:
        self._index, self._ref, self._num_seen = index, None, 0
        if index is not None:
            self._ref: Any = self._replicas.actor(index).call.remote(self._request)

    def _take(self, deadline: Deadline) -> None:
        index, ref, replicas = self._index, self._ref, self._replicas
        assert index is not None
        self._ref = None
        try:
            answer = replicas.watch(index, ref, deadline)
        except RayError as error:
            if not is_lost_actor(error):
                raise
            may_have_it = isinstance(error, ActorUnavailableError)  # asked again by the same id
            if may_have_it and replicas.ask("load", [index], PROBE_TIMEOUT_S)[0]:
                self._send(index)
        else:
            if isinstance(answer, Refused):
                self._refused.add(index)
            elif isinstance(answer, Unprepared):
                self._unprepared[index] = answer.reason
            elif not isinstance(answer, Unhealthy):
                self._answer = (answer,)
                note_call(replicas.name(index), self._request.method, self._asked, time.time())

    def _next(self, deadline: Deadline) -> int:
        """A replica that has not refused; waits for room, or for one to be started again."""
        replicas, start = self._replicas, Deadline(self._replicas.limits.start_timeout_s)
        while True:
            avoid = {*self._refused, *self._unprepared}
            index = replicas.choose(self._prefer, avoid, stays=self._stays)
            if index is not None:
                return index
            name, left = replicas.limits.name, set(replicas.left())
            if not left or left - self._refused - self._unprepared.keys():
                replicas.wait_for_a_start(start)
            elif not self._refused:
                raise NoReplicaLeft(
                    f"{name}: no replica is left that can serve "
                    f"({'; '.join(self._unprepared.values())}); push the weights again."
                )
            if not deadline.sleep():
                raise deadline.passed(name)
            self._refused.clear()


class OneResponse:
    """The answer of one certain life of one replica."""

    def __init__(self, replicas: Replicas, index: int, method: str, ref: Any) -> None:
        self.name = replicas.name(index)
        self._replicas, self._index, self._method, self._ref = replicas, index, method, ref
        self._asked = time.time()

    def failure(self) -> Exception | None:
        """What `result` raises; None where it does not, or the answer is not here. Never waits."""
        if not ray.wait([self._ref], timeout=0)[0]:
            return None
        try:
            self.result()
        except Exception as error:
            return error
        return None

    def result(self, timeout_s: float | None = None) -> Any:
        """Wait for the answer.

        Raises:
            ReplicaLost: the replica ended, or says that it cannot go on.
            DeploymentError: it did not answer in time.
            Exception: whatever the replica's method raised.
        """
        deadline = Deadline(timeout_s or self._replicas.limits.request_timeout_s)
        try:
            answer = self._replicas.watch(self._index, self._ref, deadline)
        except RayError as error:
            if not is_lost_actor(error):
                raise
            raise ReplicaLost(f"{self.name}: the replica was lost: {error}") from error
        if isinstance(answer, Unhealthy | Unprepared):
            raise ReplicaLost(f"{self.name}: {answer.reason}")
        note_call(self.name, self._method, self._asked, time.time())
        return answer


@dataclass(frozen=True)
class PinnedReplicas:
    """A fixed set of replicas that are asked one thing after the other: `load.on_all(bucket)`."""

    _replicas: Replicas
    _lives: dict[int, Life]
    _required: Required | None = None

    def __getattr__(self, name: str) -> MethodOfAll:
        if name.startswith("_"):
            raise AttributeError(name)
        return MethodOfAll(self, name)

    @property
    def names(self) -> list[str]:
        """Names of the replicas."""
        return [self._replicas.name(index) for index in self._lives]


@dataclass(frozen=True)
class MethodOfAll:
    """A method of pinned replicas."""

    _pinned: PinnedReplicas
    _name: str

    def on_all(self, *args: Any, **kwargs: Any) -> list[OneResponse]:
        """Call the method on each of them, however full its queue is."""
        pinned, responses = self._pinned, []
        for index, life in pinned._lives.items():
            request = Request(self._name, args, kwargs, pinned._required, life.id)
            ref = pinned._replicas.actor(index).call.remote(request)
            responses.append(OneResponse(pinned._replicas, index, self._name, ref))
        return responses
