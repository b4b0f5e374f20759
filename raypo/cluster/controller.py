"""The controller of a deployment: who serves, and who takes the place of a lost replica."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from raypo.cluster.actors import DeploymentError, start_named
from raypo.cluster.replica import Replica
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


@dataclass
class _Slot:
    """One replica and its successors."""

    index: int
    place: Place
    name: str = ""
    actor: ActorHandle | None = None
    attempt: int = 0
    where: tuple[str, int] = ("", 0)
    """Node id and process id."""
    is_up: bool = False
    is_given_up: bool = False
    made: dict[str, int] = field(default_factory=dict)
    """Of each owner, the number of the established call that it has made."""
    reason: str = ""
    suspected: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass
class _Call:
    """What an owner had all replicas do last."""

    number: int
    kept: tuple[str, tuple[Any, ...]] | None
    """Method and arguments, while they are good for replicas that start later."""


class DeploymentController:
    """A zero-CPU actor that owns the replicas of one deployment; they end with it."""

    def __init__(self, deployment: Deployment, places: list[Place]) -> None:
        self._deployment = deployment
        self._slots = [_Slot(index, place) for index, place in enumerate(places)]
        self._epoch = 0
        self._restarts = 0
        self._failure: str | None = None
        self._is_stopping = False
        self._num_calls = 0
        self._calls: dict[str, _Call] = {}
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
                    break  # those who made it are gone; who is up now waits for the next one
                up = [slot for slot in self._slots if slot.is_up]
                answers = await self._make_all(up, method, args)
                made = [slot for slot in up if slot.name in answers]
            self._num_calls += 1
            self._calls[owner] = _Call(self._num_calls, (method, args) if kept else None)
            for slot in made:
                slot.made[owner] = self._num_calls
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
        self, slots: list[_Slot], method: str, args: tuple[Any, ...]
    ) -> dict[str, Any]:
        """The answers by name; those that are lost are left out."""
        results = await asyncio.gather(
            *(self._make(slot, method, args) for slot in slots), return_exceptions=True
        )
        answers = {}
        for slot, result in zip(slots, results, strict=True):
            if isinstance(result, RayActorError | Unhealthy):
                slot.is_up = False
                slot.suspected.set()
            elif isinstance(result, BaseException):
                raise result
            else:
                answers[slot.name] = result
        return answers

    def _named(self, name: str) -> _Slot:
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
        drained = [asyncio.ensure_future(_answer(actor.drain.remote())) for actor in actors]
        if drained:
            await asyncio.wait(drained, timeout=limit)
        for slot in self._slots:
            if slot.actor is not None:
                ray.kill(slot.actor)
        self._failure = "it was shut down"
        await self._bump()

    async def _keep(self, slot: _Slot) -> None:
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

    async def _live(self, slot: _Slot) -> bool:
        """One replica from start to loss; whether it could not even be made."""
        slot.suspected.clear()
        slot.actor = None
        slot.name = f"{self._deployment.name}:{slot.index}"
        slot.name += f"#{slot.attempt}" if slot.attempt else ""
        try:
            slot.actor = await asyncio.to_thread(_start, self._deployment, slot)
            slot.where = await _answer(slot.actor.where.remote())  # after the constructor
            await self._bring_up(slot)
            await self._bump()
            slot.reason = await self._until_lost(slot)
        except RayActorError as error:
            slot.reason = str(error)
            return error.actor_init_failed
        except Exception as error:  # whatever it is, it is told to those who wait
            slot.reason = str(error)
            return slot.actor is None
        return False

    async def _bring_up(self, slot: _Slot) -> None:
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

    def _give_up(self, owner: str) -> None:
        """Wait for the owner's next call; one of several is not waited for."""
        if owner:
            self._calls.pop(owner, None)
        else:
            self._let_go(owner)

    async def _until_lost(self, slot: _Slot) -> str:
        """Why the replica is no more."""
        assert slot.actor is not None
        watches = [
            asyncio.ensure_future(_answer(slot.actor.until_the_end.remote())),
            asyncio.ensure_future(self._until_unhealthy(slot, slot.actor)),
        ]
        await asyncio.wait(watches, return_when=asyncio.FIRST_COMPLETED)
        for watch in watches:
            watch.cancel()
        ends = await asyncio.gather(*watches, return_exceptions=True)
        return next(str(end) for end in ends if isinstance(end, Exception))

    async def _until_unhealthy(self, slot: _Slot, actor: ActorHandle) -> None:
        """Raises what the health check says, or that there was no answer."""
        while True:
            period = self._deployment.health_check_period_s
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(slot.suspected.wait(), period)
            slot.suspected.clear()
            limit = self._deployment.health_check_timeout_s
            try:
                await asyncio.wait_for(_answer(actor.check_health.remote()), limit)
            except TimeoutError:
                raise RuntimeError(
                    f"no answer to a health check in {limit:g} s (health_check_timeout_s)"
                ) from None

    async def _make(self, slot: _Slot, method: str, args: tuple[Any, ...]) -> Any:
        assert slot.actor is not None
        request = Request(uuid.uuid4().hex, method, waits_in_line=False)
        return await _answer(slot.actor.call.remote(request, *args))

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

    def _state(self, slot: _Slot) -> ReplicaState:
        if slot.is_given_up:
            return "lost"
        if not slot.is_up:
            return "starting"
        has_made_all = all(slot.made.get(o) == call.number for o, call in self._calls.items())
        return "serving" if has_made_all else "waiting"

    def _budget_is_spent(self, slot: _Slot) -> str:
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


def _start(deployment: Deployment, slot: _Slot) -> ActorHandle:
    place = slot.place
    options: dict[str, Any] = {
        "num_cpus": place.num_cpus,
        "num_gpus": place.num_gpus,
        "runtime_env": {"env_vars": {**deployment.env, **place.env}},
    }
    if place.group is not None:
        options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
            place.group,
            placement_group_bundle_index=place.bundle,
            placement_group_capture_child_tasks=True,
        )
    cls = type(deployment.class_name, (Replica,), {})  # its own name in the dashboard
    kwargs = {"deployment": deployment, "index": slot.index}
    return start_named(cls, slot.name, options=options, kwargs=kwargs)


async def _answer(ref: Any) -> Any:
    return await asyncio.wrap_future(ref.future())
