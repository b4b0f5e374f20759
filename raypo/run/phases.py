"""Phases of a colocated step on GPUs: who leaves the devices' memory, and who comes, by the table.

Engine, frozen models and learner take turns on the same devices. A tensor-parallel engine sits
on several workers' devices, so the workers go from phase to phase together: nothing comes before
all that had to go has gone, on every worker.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, Protocol

from raypo.calls import Answer, MethodOfAll
from raypo.cluster.actors import ReplicaLost
from raypo.collectives import Workers
from raypo.plan.phase_table import (
    ALLOWED,
    ENGINE_WEIGHTS,
    FROZEN_MODELS,
    PARAMETERS,
    PRESENT,
    TRAINING_STATE,
    Phase,
)


class PhaseError(RuntimeError):
    """A phase was entered from one that it cannot follow."""


class OffloadingLearner(Protocol):
    """What the phases ask of a learner; all workers call it."""

    def offload_training_state(self) -> None:
        """Move all that a push does not need to the host."""
        ...

    def offload_parameters(self) -> None:
        """Move the weights to the host too."""
        ...

    def reload(self) -> None:
        """Bring everything back."""
        ...


class Sleeper(Protocol):
    """Replicas of a frozen model that are up now."""

    @property
    def sleep(self) -> MethodOfAll[[], None]:
        """Give up the device's memory."""
        ...

    @property
    def wake_up(self) -> MethodOfAll[[], None]:
        """Take it back."""
        ...


class SleepingEngine(Protocol):
    """Engines that are up now; they wake up part by part."""

    @property
    def sleep(self) -> MethodOfAll[[], None]:
        """Give up the device's memory."""
        ...

    @property
    def wake_up(self) -> MethodOfAll[[Literal["weights", "kv_cache"]], None]:
        """Take a part of it back."""
        ...


class FrozenModels(Protocol):
    """What the phases ask of a deployment of a frozen model."""

    def pinned(self) -> Sleeper:
        """The replicas that are up now, those too that do not serve yet."""
        ...


class Engines(Protocol):
    """What the phases ask of a deployment of engines."""

    def pinned(self) -> SleepingEngine:
        """The replicas that are up now, those too that do not serve yet."""
        ...


@dataclass
class Phases:
    """The phase that all workers are in. Where nothing is off-loaded only the order is checked."""

    workers: Workers
    offloads: bool
    """Learner, engines and frozen models share GPUs."""
    engines: Engines
    frozen: Sequence[FrozenModels] = ()
    """Reward and reference models."""
    learner: OffloadingLearner | None = None
    """Known from its start on."""
    now: Phase = Phase.START

    def enter(self, phase: Phase) -> None:
        """Go on to a phase; all workers call it, and none goes on before all are there.

        Raises:
            PhaseError: it cannot follow the present one.
        """
        if phase == self.now:
            return
        if phase not in ALLOWED[self.now]:
            follow = " or ".join(ALLOWED[self.now])
            raise PhaseError(f"phase {phase} cannot follow {self.now}; {follow} can.")
        before, after = PRESENT[self.now], PRESENT[phase]
        self.now = phase
        if not self.offloads:
            return
        self.workers.barrier()  # nobody is still at work
        _all_once(self._leave, [name for name in before if name not in after])
        self.workers.barrier()  # all memory is free
        _all_once(self._come, [name for name in after if name not in before])
        self.workers.barrier()

    def _leave(self, name: str) -> Callable[[], None]:
        if name == TRAINING_STATE:
            return self._learner.offload_training_state
        if name == PARAMETERS:
            return self._learner.offload_parameters
        return self._sleep_frozen if name == FROZEN_MODELS else self._sleep_engines

    def _come(self, name: str) -> Callable[[], None]:
        if name in (TRAINING_STATE, PARAMETERS):
            return self._reload_learner
        if name == FROZEN_MODELS:
            return self._wake_frozen
        return self._wake_weights if name == ENGINE_WEIGHTS else self._wake_kv_cache

    @property
    def _learner(self) -> OffloadingLearner:
        assert self.learner is not None, "no phase but the first is without a learner"
        return self.learner

    def _reload_learner(self) -> None:
        if self.learner is not None:  # else it is about to be made
            self.learner.reload()

    def _sleep_engines(self) -> None:
        self._ask(lambda: self.engines.pinned().sleep.on_all())

    def _wake_weights(self) -> None:
        self._ask(lambda: self.engines.pinned().wake_up.on_all("weights"))

    def _wake_kv_cache(self) -> None:
        self._ask(lambda: self.engines.pinned().wake_up.on_all("kv_cache"))

    def _sleep_frozen(self) -> None:
        self._ask(lambda: [one for each in self.frozen for one in each.pinned().sleep.on_all()])

    def _wake_frozen(self) -> None:
        self._ask(lambda: [one for each in self.frozen for one in each.pinned().wake_up.on_all()])

    def _ask(self, all_replicas: Callable[[], Sequence[Answer[None]]]) -> None:
        """Rank 0 asks for all workers."""
        if self.workers.rank == 0:
            for answer in all_replicas():
                with suppress(ReplicaLost):  # it has no memory to give; it is made when it is asked
                    answer.result()


def _all_once(action_of: Callable[[str], Callable[[], None]], names: list[str]) -> None:
    """Each action once, in order: both parts of the learner come back by one."""
    for action in dict.fromkeys(action_of(name) for name in names):
        action()
