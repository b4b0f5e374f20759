"""Step 6 where engines hold the adapter beside the base: only the adapter travels."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from raypo.cluster.actors import ReplicaLost
from raypo.collectives import Workers
from raypo.types import Experience
from raypo.weight_sync.push import Probe, SyncedEngines, push_weights, try_probe
from raypo.weights.adapter import AdapterPush
from raypo.weights.store import Keeper, Kept
from raypo.weights.transport import Transport


class AdaptedLearner(Protocol):
    """What a push needs of a learner with an adapter."""

    def adapter_push(self, name: str, version: int) -> AdapterPush | None:
        """The adapter as it is now, on rank 0; all workers call it."""
        ...

    def base_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The weights below the adapter; all workers iterate together."""
        ...

    def base_log_probs(self, experience: Experience) -> Tensor:
        """[B, T] float32, nats, with the adapter off."""
        ...

    def log_probs(self, experience: Experience) -> Tensor:
        """[B, T] float32, nats."""
        ...


@dataclass(frozen=True)
class _Base:
    """The learner with its adapter off."""

    learner: AdaptedLearner

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        return self.learner.base_weights()

    def log_probs(self, experience: Experience) -> Tensor:
        return self.learner.base_log_probs(experience)


def push_base(
    learner: AdaptedLearner,
    engine: SyncedEngines,
    *,
    version: int,
    transport: Transport,
    probe: Probe,
    workers: Workers,
    on_arrival: Callable[[], None] = lambda: None,
) -> None:
    """The weights below the adapter, to engines that have just started; as `push_weights`.

    Raises:
        WeightError: an engine received something else, or answers otherwise than the learner.
    """
    push_weights(
        _Base(learner),
        engine,
        version=version,
        transport=transport,
        probe=replace(probe, adapter=None),
        workers=workers,
        on_arrival=on_arrival,
    )


def push_adapter(
    learner: AdaptedLearner,
    engine: SyncedEngines,
    *,
    name: str,
    version: int,
    base: Kept | None,
    keeper: Keeper,
    probe: Probe,
    workers: Workers,
    on_arrival: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """Bring every engine to the learner's adapter; all workers call it together.

    Args:
        on_arrival: Called between transfer and probe, for which the engines must be awake.
        base: On rank 0, what `push_base` sent: engines that were started again load it before the
            adapter. None: every engine has it by itself.
        keeper: Keeps the adapter for them.

    Returns:
        `mismatch/probe_gap_max` and `mismatch/probe_gap_mean`, nats a token.

    Raises:
        WeightError: an engine received something else than was sent, or answers otherwise than
            the learner.
    """
    push = learner.adapter_push(name, version)
    kept: list[Kept] = []
    if push is not None:
        adapter = keeper.keep(push, id=uuid.uuid4().hex, adapter=name)
        kept = [base, adapter] if base else [adapter]
        for arrived in engine.pinned().hold.on_all(*kept):
            with contextlib.suppress(ReplicaLost):  # it does so when it is next asked
                arrived.result()
    engine.require("hold", *workers.broadcast(kept))
    on_arrival()
    return try_probe(learner, engine, replace(probe, adapter=name), version, workers)
