"""Seats without Ray: who is given one, and who had it before."""

from dataclasses import dataclass
from typing import Any

import pytest

from raypo.deployment import lender
from raypo.deployment.lender import Lender, Loan


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
    monkeypatch.setattr(lender, "is_alive", lambda holder: holder not in gone)
    monkeypatch.setattr(lender, "LOOK_EVERY_S", 0.01)
    return gone


def lend(seats: Lender, run: str, holder: Any, timeout_s: float = 0.0) -> Loan:
    loan = seats.lend(run, holder, timeout_s)
    assert loan is not None
    return loan


def test_a_seat_is_free_when_all_that_held_it_are_dead(dead: set[str]):
    engine = deployed("a")
    seats = Lender([engine])
    loan = lend(seats, "one", "worker 0")
    assert loan == Loan(0, engine, None)
    seats.hold(loan.number, "worker 1")  # pyright: ignore[reportArgumentType]

    dead.add("worker 0")
    holder: Any = "worker 2"
    assert seats.lend("two", holder, 0.05) is None
    dead.add("worker 1")
    assert lend(seats, "two", holder).before == "one"


def test_a_deployment_that_is_lost_is_not_lent(dead: set[str]):
    holder: Any = "worker"
    lost = deployed("a", lost=True)
    assert Lender([lost]).lend("one", holder, 60.0) is None
    assert lend(Lender([lost, deployed("b")]), "one", holder).number == 1


def test_a_run_that_begins_again_never_counts_as_the_one_before_somebody_else(dead: set[str]):
    """It keeps its seat where that is free, and else leaves its name behind in no other."""
    pool = deployed("pool")
    seats = Lender([pool, pool])
    lend(seats, "one", "first")
    lend(seats, "two", "second")
    dead.update({"first", "second"})
    again = lend(seats, "two", "third")
    assert (again.number, again.before) == (1, None)

    lend(seats, "three", "fourth")
    dead.add("fourth")
    moved = lend(seats, "two", "fifth")  # the third worker is still alive in seat 1
    assert (moved.number, moved.before) == (0, "three")
    dead.add("third")
    assert lend(seats, "four", "sixth").before is None
