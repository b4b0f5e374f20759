"""Which replica is asked, where one is preferred."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ray.exceptions import ActorDiedError

from raypo.deployment.replicas import Replicas
from raypo.deployment.spec import Deployment


class Known(Replicas):
    """Three replicas, of whose loads it is told."""

    def __init__(self, *loads: int) -> None:
        super().__init__(Deployment("raypo:test:engine", object, {}), "raypo", len(loads))
        self.loads = loads
        self.num_asked = 0

    def ask(
        self, method: str, indexes: Sequence[int], timeout_s: float | None
    ) -> tuple[dict[int, Any], list[int]]:
        self.num_asked += 1
        return {index: self.loads[index] for index in indexes}, []


def test_a_preferred_replica_is_asked_as_long_as_it_has_room():
    assert Known(0, 0, 0).choose((1,), avoid=()) == 1
    assert Known(2, 7, 0).choose((1,), avoid=()) == 2


def test_who_stays_asks_its_replica_however_full_it_is_and_asks_nobody_before():
    replicas = Known(0, 9, 9)
    assert replicas.choose((1,), avoid=(), is_sticky=True) == 1
    assert replicas.num_asked == 0

    assert replicas.choose((1,), avoid={1}, is_sticky=True, waits=False) is None
    assert replicas.num_asked == 0
    assert replicas.choose((1,), avoid={1}, is_sticky=True) == 0
    replicas.note_lost(1, ActorDiedError())
    assert replicas.choose((1,), avoid=(), is_sticky=True) == 0
