"""The pool of engines without Ray: which run gets a slot, and which run had it before."""

from dataclasses import dataclass
from typing import Any

import pytest

from raypo.deployment import engine_pool
from raypo.deployment.engine_pool import EnginePool, Lease


@dataclass(frozen=True)
class Deployed:
    """A deployment whose replicas are lost or not."""

    name: str
    lost: bool = False

    def is_lost(self) -> bool:
        return self.lost


def deployed(name: str, *, lost: bool = False) -> Any:
    return Deployed(name, lost)


@pytest.fixture
def dead(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Holders that are dead."""
    gone: set[str] = set()
    monkeypatch.setattr(engine_pool, "is_alive", lambda holder: holder not in gone)
    monkeypatch.setattr(engine_pool, "POLL_S", 0.01)
    return gone


def request_lease(slots: EnginePool, run: str, holder: Any, timeout_s: float = 0.0) -> Lease:
    lease = slots.lease(run, holder, timeout_s)
    assert lease is not None
    return lease


def test_a_slot_is_free_when_its_holder_is_dead(dead: set[str]):
    engine = deployed("a")
    slots = EnginePool([engine])
    assert request_lease(slots, "one", "worker 0") == Lease(engine, None)
    holder: Any = "worker 1"
    assert slots.lease("two", holder, 0.05) is None
    assert slots.runs() == ["one"]
    dead.add("worker 0")
    assert request_lease(slots, "two", holder).previous_run == "one"
    assert slots.runs() == ["two"]


def test_a_deployment_that_is_lost_is_not_lent(dead: set[str]):
    holder: Any = "worker"
    lost, other = deployed("a", lost=True), deployed("b")
    assert EnginePool([lost]).lease("one", holder, 60.0) is None
    assert request_lease(EnginePool([lost, other]), "one", holder).handle is other


def test_a_run_that_begins_again_never_counts_as_the_one_before_somebody_else(dead: set[str]):
    """It keeps its slot where that is free, and else leaves its name behind in no other."""
    first, second = deployed("first"), deployed("second")
    slots = EnginePool([first, second])
    request_lease(slots, "one", "first")
    request_lease(slots, "two", "second")
    dead.update({"first", "second"})
    again = request_lease(slots, "two", "third")
    assert (again.handle, again.previous_run) == (second, None)

    request_lease(slots, "three", "fourth")
    dead.add("fourth")
    moved = request_lease(slots, "two", "fifth")  # the third worker is still alive in slot 1
    assert (moved.handle, moved.previous_run) == (first, "three")
    dead.add("third")
    assert request_lease(slots, "four", "sixth").previous_run is None
