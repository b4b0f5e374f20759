"""Phases of a colocated step on GPUs: which models are off-loaded and reloaded at each change.

Engines, learner, reference and reward models take turns on the same devices, as in
`raypo.run.phase_table`. A tensor-parallel engine uses the devices of several workers. Therefore all
workers change phase together: no worker loads a model before every worker has off-loaded the models
that have to leave.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

import torch

from raypo.cluster.actors import survivors
from raypo.collectives import Workers
from raypo.config import OnlineConfig
from raypo.run.phase_table import (
    ALLOWED,
    ENGINE_WEIGHTS,
    FROZEN_MODELS,
    KV_CACHE,
    PARAMETERS,
    PRESENT,
    TRAINING_STATE,
    Phase,
)
from raypo.run.run import Run
from raypo.run.services import Services
from raypo.serving.client import EngineClient, FrozenClient


class PhaseError(RuntimeError):
    """The phase to enter cannot follow the current phase."""


class OffloadingLearner(Protocol):
    """A learner that can move its state to the host and back; all workers call each method."""

    def offload_training_state(self) -> None:
        """Move to the host everything that a push does not need."""
        ...

    def offload_parameters(self) -> None:
        """Move also the weights to the host."""
        ...

    def reload(self) -> None:
        """Move the whole state back to the device."""
        ...


@dataclass
class Phases:
    """Current phase of all workers. If no model is off-loaded, only the order is checked."""

    workers: Workers
    offloads: bool
    """True if learner and engines share GPUs, so that models are moved between phases."""
    engines: EngineClient
    frozen: Sequence[FrozenClient] = ()
    """Reward and reference models."""
    learner: OffloadingLearner | None = None
    """The learner. None until it is loaded."""
    now: Phase = Phase.START
    is_ahead: bool = False
    """True if the engines have their own devices and sample while the learner trains. Phases are
    then not used."""
    keeps_weights: bool = False
    """True if a push replaces only the adapter, so that engines must keep their weights."""

    @classmethod
    def of(cls, run: Run[OnlineConfig], services: Services) -> Phases:
        """Return the phases of a run whose services have started."""
        config = run.config
        shares_gpus = torch.cuda.is_available() and "engine" not in services.elsewhere
        return cls(
            run.workers,
            offloads=shares_gpus and config.rollout.engine.sleeps,
            engines=services.engine,
            frozen=tuple(
                handle for role, handle in services.frozen if role not in services.elsewhere
            ),
            is_ahead=config.rollout.mode != "sync",
            keeps_weights=config.pushes_adapter,
        )

    def enter(self, phase: Phase) -> None:
        """Enter a phase. All workers call it and wait for each other.

        Raises:
            PhaseError: the phase cannot follow the current one.
        """
        if change := self._change_to(phase):
            leaving, coming = change
            self.workers.barrier()  # wait until no worker is computing
            self._make_room(leaving)
            self.workers.barrier()  # wait until memory is free on all devices
            self._bring_back(coming)
            self.workers.barrier()

    def turn(self, phase: Phase, *, before_push: bool = False) -> None:
        """Change between GENERATE and SCORE, in which no worker computes.

        Only the first worker calls it, while all others wait for it.

        Args:
            phase: The phase to enter.
            before_push: True if the engines sample nothing more before the next push. They can then
                drop their weights instead of keeping them on the host.

        Raises:
            PhaseError: the current phase is neither GENERATE nor SCORE; other changes move the
                learner, so all workers must call `enter`.
        """
        if not self.is_ahead and self.now not in (Phase.GENERATE, Phase.SCORE):
            raise PhaseError(f"one worker alone cannot change from phase {self.now} to {phase}")
        if change := self._change_to(phase):
            leaving, coming = change
            self._make_room(leaving, before_push and not self.keeps_weights)
            self._bring_back(coming)

    def _change_to(self, phase: Phase) -> tuple[set[str], set[str]] | None:
        """Set the phase; return what leaves the devices and what comes, or None if nothing does."""
        if self.is_ahead or phase == self.now:
            return None
        if phase not in ALLOWED[self.now]:
            follow = " or ".join(ALLOWED[self.now])
            raise PhaseError(f"phase {phase} cannot follow {self.now}; {follow} can.")
        before, after = set(PRESENT[self.now]), set(PRESENT[phase])
        self.now = phase
        return (before - after, after - before) if self.offloads else None

    def _make_room(self, leaving: set[str], before_push: bool = False) -> None:
        learner = self.learner
        if learner is not None and TRAINING_STATE in leaving:
            learner.offload_training_state()
        if learner is not None and PARAMETERS in leaving:
            learner.offload_parameters()
        if leaving & {ENGINE_WEIGHTS, KV_CACHE}:
            self._ask(lambda: self.engines.sleep(before_push=before_push))
        if FROZEN_MODELS in leaving:
            self._ask(lambda: [one for handle in self.frozen for one in handle.sleep()])

    def _bring_back(self, coming: set[str]) -> None:
        # The learner is None until it is loaded.
        if self.learner is not None and coming & {TRAINING_STATE, PARAMETERS}:
            self.learner.reload()
        if ENGINE_WEIGHTS in coming:
            self._ask(lambda: self.engines.wake_up("weights"))
        if KV_CACHE in coming:
            self._ask(lambda: self.engines.wake_up("kv_cache"))
        if FROZEN_MODELS in coming:
            self._ask(lambda: [one for handle in self.frozen for one in handle.wake_up()])

    def _ask(self, all_replicas: Callable[[], Sequence[Future[None]]]) -> None:
        """Call all replicas from rank 0, and wait for the calls to end."""
        if self.workers.rank == 0:
            survivors(all_replicas())  # a lost replica holds no memory, so ignore it
