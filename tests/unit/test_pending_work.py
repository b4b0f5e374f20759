"""The work of a process, as the watchdog is told about it."""

import asyncio
import threading
import time
from collections.abc import Iterator

import pytest

from raypo import pending_work
from raypo.concurrency import background_future, daemon_future
from raypo.pending_work import Pending, at_work, moved


@pytest.fixture(autouse=True)
def _no_work_of_other_tests() -> None:
    """Threads that another test of this process has left may still wait in their work."""
    pending_work.forget_pending()


@pytest.fixture
def event() -> Iterator[threading.Event]:
    """Threads of a test wait for it; none is left when the test ends."""
    event = threading.Event()
    yield event
    event.set()
    end = time.monotonic() + 10.0
    while pending_work.pending() and time.monotonic() < end:
        time.sleep(0.01)


def pending(name: str) -> Pending:
    (work,) = [work for work in pending_work.pending() if work.name == name]
    return work


def test_the_innermost_work_is_told_with_the_work_around_it():
    with at_work("step 1", must_move=False), at_work("the update"):
        (work,) = pending_work.pending()
        assert (work.name, work.inside, work.must_move) == ("the update", ("step 1",), True)
    assert pending_work.pending() == []


def test_what_moves_moves_the_work_around_it_in_threads_and_coroutines_too(
    event: threading.Event,
):
    async def moving() -> None:
        moved()

    def do_part() -> None:
        with at_work("part"):
            pass

    with at_work("step 1", must_move=False):
        for move in (
            lambda: daemon_future(moved, name="test").result(),
            lambda: background_future(moving()).result(),
            moved,
            do_part,
        ):
            time.sleep(0.3)
            assert pending("step 1").idle_s >= 0.3
            assert pending_work.idle_s() >= 0.3
            move()
            assert pending("step 1").idle_s < 0.3
            assert pending_work.idle_s() < 0.3
        time.sleep(0.3)
        threading.Thread(target=moved).start()  # has no part in this work
        assert pending("step 1").idle_s >= 0.3


def test_a_thread_that_waits_for_another_is_told_from_one_that_works(event: threading.Event):
    begun = threading.Event()

    def wait() -> None:
        with at_work("waiting"):
            begun.set()
            event.wait()

    def sleep() -> None:
        with at_work("sleeping"):
            begun.set()
            while not event.is_set():
                time.sleep(0.05)

    for work in (wait, sleep):
        begun.clear()
        daemon_future(work, name="test")
        begun.wait()
        time.sleep(0.2)
    assert pending("waiting").waits
    assert pending("waiting").place.startswith("Condition.wait (threading.py:")
    assert not pending("sleeping").waits
    assert "sleep (test_pending_work.py:" in pending("sleeping").place


def test_work_that_never_ended_before_the_start_is_forgotten(event: threading.Event):
    begun = threading.Event()

    def trial() -> None:
        with at_work("the reward function"):
            begun.set()
            event.wait()

    daemon_future(trial, name="test")
    begun.wait()
    assert pending("the reward function")
    pending_work.forget_pending()
    assert pending_work.pending() == []
    with at_work("step 1"):
        assert pending("step 1")


def test_equal_work_is_told_once_as_the_oldest(event: threading.Event):
    async def call() -> None:
        with at_work("engine 0 (submit)", replica="raypo:run:engine:0", in_thread=False):
            while not event.is_set():
                await asyncio.sleep(0.01)

    background_future(call())
    time.sleep(0.1)
    for _ in range(3):
        background_future(call())
    time.sleep(0.05)
    work = pending("engine 0 (submit)")
    assert work.idle_s >= 0.1
    assert (work.replica, work.place, work.waits) == ("raypo:run:engine:0", "", False)
