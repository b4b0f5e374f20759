"""Phases of a colocated step on GPUs: who leaves the devices' memory, and who comes, by the table.

Engine, frozen models and learner take turns on the same devices. A tensor-parallel engine sits
on several workers' devices, so the workers go from phase to phase together: nothing comes before
all that had to go has gone, on every worker.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from raypo.cluster.actors import survivors
from raypo.collectives import Workers
from raypo.pending import Pending
from raypo.plan.phase_table import (
    ALLOWED,
    ENGINE_WEIGHTS,
    FROZEN_MODELS,
    KV_CACHE,
    PARAMETERS,
    PRESENT,
    TRAINING_STATE,
    Phase,
)
from raypo.serving.client import EngineClient, FrozenClient


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


@dataclass
class Phases:
    """The phase that all workers are in. Where nothing is off-loaded only the order is checked."""

    workers: Workers
    offloads: bool
    """Learner, engines and frozen models share GPUs."""
    engines: EngineClient
    frozen: Sequence[FrozenClient] = ()
    """Reward and reference models."""
    learner: OffloadingLearner | None = None
    """Known from its start on."""
    now: Phase = Phase.START

    def enter(self, phase: Phase, *, before_push: bool = False) -> None:
        """Go on to a phase; all workers call it, and none goes on before all are there.

        Args:
            before_push: New weights come before the engines sample again, so that those which
                leave need not be kept.

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
        leaving, coming = set(before) - set(after), set(after) - set(before)
        self.workers.barrier()  # nobody is still at work
        self._make_room(leaving, before_push)
        self.workers.barrier()  # all memory is free
        self._bring_back(coming)
        self.workers.barrier()

    def _make_room(self, leaving: set[str], before_push: bool) -> None:
        learner = self.learner
        if learner is not None and TRAINING_STATE in leaving:
            learner.offload_training_state()
        if learner is not None and PARAMETERS in leaving:
            learner.offload_parameters()
        if leaving & {ENGINE_WEIGHTS, KV_CACHE}:
            self._ask(lambda: self.engines.pinned().sleep(before_push=before_push))
        if FROZEN_MODELS in leaving:
            self._ask(lambda: [one for each in self.frozen for one in each.sleep()])

    def _bring_back(self, coming: set[str]) -> None:
        if self.learner is not None and coming & {TRAINING_STATE, PARAMETERS}:
            self.learner.reload()  # else it is about to be made
        if ENGINE_WEIGHTS in coming:
            self._ask(lambda: self.engines.pinned().wake_up("weights"))
        if KV_CACHE in coming:
            self._ask(lambda: self.engines.pinned().wake_up("kv_cache"))
        if FROZEN_MODELS in coming:
            self._ask(lambda: [one for each in self.frozen for one in each.wake_up()])

    def _ask(self, all_replicas: Callable[[], Sequence[Pending[None]]]) -> None:
        """Rank 0 asks for all workers."""
        if self.workers.rank == 0:
            survivors(all_replicas())  # one that is lost has no memory to give
