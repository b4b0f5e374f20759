"""The controller of a deployment: who serves, and who takes the place of a lost replica."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError

from raypo.cluster.actors import DeploymentError, ReplicaLost
from raypo.cluster.slot import EstablishedCall, Slot, answer_of, start_replica
from raypo.cluster.spec import (
    Deployment,
    DeploymentStatus,
    Member,
    Membership,
    Place,
    ReplicaState,
    ReplicaStatus,
    Request,
    Unhealthy,
)


class DeploymentController:
    """A zero-CPU actor that owns the replicas of one deployment; they end with it."""

    def __init__(self, deployment: Deployment, places: list[Place]) -> None:
        self._deployment = deployment
        self._slots = [Slot(index, place) for index, place in enumerate(places)]
        self._epoch = 0
        self._restarts = 0
        self._failure: str | None = None
        self._is_stopping = False
        self._num_calls = 0
        self._calls: dict[str, EstablishedCall] = {}
        """By owner: what a replica must have done before it serves."""
        self._turn = asyncio.Lock()
        self._changed = asyncio.Condition()

    def __repr__(self) -> str:
        return f"DeploymentController({self._deployment.role}, {len(self._slots)} replicas)"

    async def run(self) -> None:
        """Keep all replicas alive; returns when the deployment is at its end."""
        await asyncio.gather(*map(self._keep, self._slots))

    async def membership(self) -> Membership:
        """Who serves now."""
        return self._membership()

    async def wait_started(self) -> str | None:
        """Returns when every replica is up: None, or why that will never be."""
        slots = self._slots
        await self._wait(
            lambda: bool(self._failure) or all(slot.is_up or slot.is_given_up for slot in slots)
        )
        return self._membership().failure

    async def wait_changed(self, epoch: int) -> Membership:
        """The membership as soon as it is another one than that of `epoch`."""
        await self._wait(lambda: self._epoch != epoch)
        return self._membership()

    async def report(self, name: str) -> None:
        """A caller could not reach this replica, or heard that it cannot go on."""
        for slot in self._slots:
            if slot.name == name:
                slot.suspected.set()

    async def status(self) -> DeploymentStatus:
        """The deployment, for people."""
        replicas = tuple(
            ReplicaStatus(slot.name, self._state(slot), slot.place.bundle, *slot.where, slot.reason)
            for slot in self._slots
        )
        states = {replica.state for replica in replicas}
        state = "healthy" if states == {"serving"} else "degraded"
        if self._failure:
            state = "failed"
        elif "lost" not in states and not self._restarts and states != {"serving"}:
            state = "starting"
        return DeploymentStatus(
            self._deployment.name,
            state,
            replicas,
            self._restarts,
            self._deployment.max_restarts,
            self._failure or "",
        )

    async def establish(
        self,
        owner: str,
        method: str,
        args: tuple[Any, ...],
        *,
        kept: bool,
        made_by: tuple[str, ...] | None,
    ) -> dict[str, Any]:
        """As `DeploymentHandle.establish`."""
        async with self._turn_of(owner):
            self._let_go(owner)
            answers: dict[str, Any] = {}
            made = [slot for slot in self._slots if slot.is_up and slot.name in (made_by or ())]
            while not made:
                await self._wait(lambda: any(s.is_up for s in self._slots) or bool(self._failure))
                if self._failure:
                    raise DeploymentError(f"{self._deployment.name}: {self._failure}")
                if made_by is not None and not kept:
                    break  # who is up now waits for the next one
                up = [slot for slot in self._slots if slot.is_up]
                answers = await self._make_all(up, method, args)
                made = [slot for slot in up if slot.name in answers]
            self._num_calls += 1
            self._calls[owner] = EstablishedCall(self._num_calls, (method, args) if kept else None)
            for slot in made:
                slot.made[owner] = self._num_calls
            if not made:
                raise ReplicaLost(f"{self._deployment.name}: all that made `{method}` are lost.")
            if kept and made_by is not None:  # who came up meanwhile
                late = [slot for slot in self._slots if slot.is_up and slot not in made]
                for name in await self._make_all(late, method, args):
                    self._named(name).made[owner] = self._num_calls
            return answers

    @contextlib.asynccontextmanager
    async def _turn_of(self, owner: str) -> AsyncIterator[None]:
        """One established call at a time; where it fails, nobody waits for it any longer."""
        async with self._turn:
            try:
                yield
            except Exception:
                self._give_up(owner)
                raise
            finally:
                await self._bump()

    async def _make_all(
        self, slots: list[Slot], method: str, args: tuple[Any, ...]
    ) -> dict[str, Any]:
        """The answers by name; those that are lost are left out."""
        results = await asyncio.gather(
            *(self._make(slot, method, args) for slot in slots), return_exceptions=True
        )
        answers = {}
        for slot, result in zip(slots, results, strict=True):
            if isinstance(result, RayActorError | Unhealthy):
                slot.is_up = False
                if slot.actor is not None:
                    ray.kill(slot.actor)  # it may only have been out of reach; it has not made it
            elif isinstance(result, BaseException):
                raise result
            else:
                answers[slot.name] = result
        return answers

    def _named(self, name: str) -> Slot:
        return next(slot for slot in self._slots if slot.name == name)

    async def forget(self, owner: str) -> None:
        """Let go of the arguments of the owner's last established call."""
        self._let_go(owner)
        await self._bump()

    async def withdraw(self, owner: str) -> None:
        """Replicas serve without the owner's established call: it has ended."""
        async with self._turn_of(owner):  # a call of its that is under way ends first
            self._calls.pop(owner, None)

    def _let_go(self, owner: str) -> None:
        if owner in self._calls:
            self._calls[owner].kept = None

    async def shut_down(self, grace_s: float | None) -> None:
        """Let requests under way end, for as long as they may take, and end the replicas."""
        limit = self._deployment.graceful_shutdown_timeout_s if grace_s is None else grace_s
        self._is_stopping = True
        actors = [slot.actor for slot in self._slots if slot.actor is not None and slot.is_up]
        drained = [asyncio.ensure_future(answer_of(actor.drain.remote())) for actor in actors]
        if drained:
            await asyncio.wait(drained, timeout=limit)
        for slot in self._slots:
            if slot.actor is not None:
                ray.kill(slot.actor)
        self._failure = "it was shut down"
        await self._bump()

    async def _keep(self, slot: Slot) -> None:
        """One replica after the other in a slot, until the budget is spent."""
        while not self._is_stopping:
            is_first = slot.attempt == 0
            lost_in_constructor = await self._live(slot)
            slot.is_up, slot.attempt = False, slot.attempt + 1
            if self._is_stopping:
                return
            if slot.actor is not None:
                ray.kill(slot.actor)  # so that it never answers once its successor may
            if is_first and lost_in_constructor:
                self._failure = f"{slot.name}: {slot.reason}"
            elif self._restarts >= self._deployment.max_restarts:
                slot.is_given_up = True
                if all(each.is_given_up for each in self._slots):
                    self._failure = self._budget_is_spent(slot)
            else:
                self._restarts += 1
            await self._bump()
            if self._failure or slot.is_given_up:
                return

    async def _live(self, slot: Slot) -> bool:
        """One replica from start to loss; whether it could not even be made."""
        slot.suspected.clear()
        slot.actor = None
        slot.name = f"{self._deployment.name}:{slot.index}"
        slot.name += f"#{slot.attempt}" if slot.attempt else ""
        try:
            slot.actor = await asyncio.to_thread(start_replica, self._deployment, slot)
            slot.where = await self._made(slot)
            slot.reason = await self._while_it_lives(slot)
        except RayActorError as error:
            slot.reason = str(error)
            return error.actor_init_failed
        except Exception as error:  # whatever it is, it is told to those who wait
            slot.reason = str(error)
            return slot.actor is None
        return False

    async def _made(self, slot: Slot) -> tuple[str, int]:
        """Where it is, once its constructor is done; those who started it wait for the first one.

        Raises:
            RuntimeError: a replacement takes too long.
        """
        assert slot.actor is not None
        limit = self._deployment.start_timeout_s if slot.attempt else None
        try:
            return await asyncio.wait_for(answer_of(slot.actor.where.remote()), limit)
        except TimeoutError:
            raise RuntimeError(
                f"not started in {limit:g} s (placement.timeout_s) in bundle {slot.place.bundle}; "
                f"the node of that bundle may be gone, or its devices be taken"
            ) from None

    async def _while_it_lives(self, slot: Slot) -> str:
        """Bring a replica up, and watch it from the first moment; why it is no more."""
        lost = asyncio.ensure_future(self._until_lost(slot))
        up = asyncio.ensure_future(self._bring_up(slot))
        await asyncio.wait([lost, up], return_when=asyncio.FIRST_COMPLETED)
        try:
            if not lost.done():
                await up
            return await lost
        finally:
            for each in (lost, up):
                each.cancel()

    async def _bring_up(self, slot: Slot) -> None:
        """Have a new replica make the calls that all others have made."""
        slot.is_up, slot.made = True, {}
        await self._bump()
        async with self._turn:
            for owner, call in list(self._calls.items()):
                if slot.made.get(owner) == call.number or call.kept is None:
                    continue
                try:
                    answer = await self._make(slot, *call.kept)
                except RayActorError:
                    raise
                except Exception as error:  # what was kept is no longer there
                    slot.reason = str(error)
                    self._give_up(owner)
                    continue
                if isinstance(answer, Unhealthy):
                    raise RuntimeError(answer.reason)
                slot.made[owner] = call.number
        await self._bump()

    def _give_up(self, owner: str) -> None:
        """Wait for the owner's next call; one of several is not waited for."""
        if owner:
            self._calls.pop(owner, None)
        else:
            self._let_go(owner)

    async def _until_lost(self, slot: Slot) -> str:
        """Why the replica is no more."""
        assert slot.actor is not None
        watches = [
            asyncio.ensure_future(answer_of(slot.actor.until_the_end.remote())),
            asyncio.ensure_future(self._until_unhealthy(slot, slot.actor)),
        ]
        try:
            await asyncio.wait(watches, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for watch in watches:
                watch.cancel()
        ends = await asyncio.gather(*watches, return_exceptions=True)
        return next(str(end) for end in ends if isinstance(end, Exception))

    async def _until_unhealthy(self, slot: Slot, actor: ActorHandle) -> None:
        """Raises what the health check says, or that there was no answer."""
        while True:
            period = self._deployment.health_check_period_s
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(slot.suspected.wait(), period)
            slot.suspected.clear()
            limit = self._deployment.health_check_timeout_s
            try:
                await asyncio.wait_for(answer_of(actor.check_health.remote()), limit)
            except TimeoutError:
                raise RuntimeError(
                    f"no answer to a health check in {limit:g} s (health_check_timeout_s)"
                ) from None

    async def _make(self, slot: Slot, method: str, args: tuple[Any, ...]) -> Any:
        assert slot.actor is not None
        request = Request(uuid.uuid4().hex, method, waits_in_line=False)
        return await answer_of(slot.actor.call.remote(request, *args))

    def _membership(self) -> Membership:
        starts_alone = all(call.kept is not None for call in self._calls.values())
        return Membership(
            self._epoch,
            serving=tuple(self._members("serving")),
            waiting=tuple(self._members("waiting")),
            recovers=starts_alone and not all(slot.is_given_up for slot in self._slots),
            max_ongoing_requests=self._deployment.max_ongoing_requests,
            request_timeout_s=self._deployment.request_timeout_s,
            failure=f"{self._deployment.name}: {self._failure}" if self._failure else None,
        )

    def _members(self, state: ReplicaState) -> Iterator[Member]:
        for slot in self._slots:
            if slot.actor is not None and self._state(slot) == state:
                yield Member(slot.index, slot.name, slot.actor)

    def _state(self, slot: Slot) -> ReplicaState:
        if slot.is_given_up:
            return "lost"
        if not slot.is_up:
            return "starting"
        has_made_all = all(slot.made.get(o) == call.number for o, call in self._calls.items())
        return "serving" if has_made_all else "waiting"

    def _budget_is_spent(self, slot: Slot) -> str:
        return (
            f"no replica is left; max_restarts ({self._deployment.max_restarts}) have been "
            f"replaced. The last one, {slot.name}, was lost: {slot.reason}"
        )

    async def _bump(self) -> None:
        async with self._changed:
            self._epoch += 1
            self._changed.notify_all()

    async def _wait(self, condition: Callable[[], bool]) -> None:
        async with self._changed:
            await self._changed.wait_for(condition)
