"""The event loop of the episodes: what the user's code does in it neither ends nor stops it."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from raypo.rollout import event_loop
from raypo.rollout.event_loop import EventLoop, LoopStandsStill, tasks_of
from raypo.rollout.work_time import WorkTime


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(event_loop, "STANDS_STILL_S", 0.3)


@pytest.fixture
def loop() -> Iterator[EventLoop]:
    made = EventLoop(0.3)
    yield made
    made.close()


FREE = threading.Event()


def blocks() -> None:
    FREE.wait(20)  # a call of a library


async def calls_what_blocks() -> None:
    blocks()


def test_a_coroutine_that_blocks_ends_the_run_and_is_named(loop: EventLoop):
    begin = time.perf_counter()
    with pytest.raises(LoopStandsStill) as told:
        loop.run(calls_what_blocks())
    assert time.perf_counter() - begin < 10
    line = blocks.__code__.co_firstlineno + 1
    assert str(told.value).startswith(
        f"{__file__}, line {line}, in blocks (FREE.wait(20)  # a call of a library): has blocked "
        "the event loop of all episodes for "
    )
    assert "await asyncio.to_thread(...)" in str(told.value)
    FREE.set()


def test_what_waits_as_it_should_may_take_any_time(loop: EventLoop):
    async def waits() -> str:
        await asyncio.sleep(0.8)
        await asyncio.to_thread(time.sleep, 0.8)
        return "done"

    assert loop.run(waits()) == "done"


def test_an_exit_in_a_task_ends_no_loop(loop: EventLoop):
    async def leaves() -> None:
        async def goes() -> None:
            sys.exit(3)

        await asyncio.gather(goes(), asyncio.sleep(0))

    with pytest.raises(SystemExit):
        loop.run(leaves())
    assert loop.run(asyncio.sleep(0, "on")) == "on"


def test_calls_in_threads_that_hang_keep_no_other_waiting(loop: EventLoop):
    """The usual executor of an event loop has a few threads for all."""
    free = threading.Event()

    async def after_many() -> int:
        for _ in range(64):
            asyncio.get_running_loop().run_in_executor(None, free.wait, 20)
        return await asyncio.to_thread(int, "7")

    begin = time.perf_counter()
    assert loop.run(after_many()) == 7
    assert time.perf_counter() - begin < 5
    free.set()


def test_threads_take_one_call_after_the_other_and_end_with_the_loop():
    loop, before = EventLoop(None), set(threading.enumerate())
    first_are_here = threading.Barrier(3)

    async def calls() -> list[list[threading.Thread]]:
        def waits() -> threading.Thread:
            first_are_here.wait(20)
            return threading.current_thread()

        first = await asyncio.gather(*(asyncio.to_thread(waits) for _ in range(3)))
        later = []
        for _ in range(20):
            later.append(await asyncio.to_thread(threading.current_thread))
            await asyncio.sleep(0.001)
        return [first, later]

    first, later = loop.run(calls())
    assert len(set(first)) == 3
    assert set(later) <= set(first)
    loop.close()
    for each in first:
        each.join(5)
    assert set(threading.enumerate()) <= before


def test_it_knows_the_tasks_that_are_made_in_a_context_and_cancels_all_at_its_end(loop: EventLoop):
    from weakref import WeakSet

    tasks: WeakSet[asyncio.Task[object]] = WeakSet()
    kept: list[asyncio.Task[object]] = []

    async def begins() -> None:
        tasks_of.set(tasks)

        async def begins_another() -> None:
            kept.append(asyncio.create_task(asyncio.sleep(60)))

        kept.append(asyncio.create_task(begins_another()))
        await asyncio.sleep(0.01)

    loop.run(begins())
    assert set(tasks) == set(kept)
    assert [each.done() for each in kept] == [True, False]
    loop.close()
    assert kept[1].cancelled()


def test_a_closed_loop_is_closed_once_more_and_takes_no_work(loop: EventLoop):
    loop.close()
    loop.close()
    loop.call_soon(list)
    work = asyncio.sleep(0)
    with pytest.raises(RuntimeError, match="closed"):
        loop.run(work)
    work.close()


def test_work_that_does_not_let_itself_be_cancelled_is_left_behind(loop: EventLoop):
    async def stays() -> None:
        while True:
            try:
                await asyncio.sleep(1)
            except asyncio.CancelledError:  # as a bare except does
                if not goes_on.is_set():
                    return

    async def limited() -> None:
        await WorkTime("step", asyncio.Semaphore(1), 0.1).over(stays)

    goes_on = threading.Event()
    goes_on.set()
    begin = time.perf_counter()
    with pytest.raises(TimeoutError, match=r"step gave no answer in 0\.1 s"):
        loop.run(limited())
    assert time.perf_counter() - begin < 5
    goes_on.clear()


def test_no_more_work_at_a_time_than_the_quota_admits_and_rests_do_not_count(loop: EventLoop):
    at_work, most = 0, 0

    async def works(time: WorkTime) -> None:
        nonlocal at_work, most
        for _ in range(3):
            at_work += 1
            most = max(most, at_work)
            await asyncio.sleep(0.01)
            at_work -= 1
            time.rest()
            await asyncio.sleep(0.03)  # longer than the limit
            await time.go_on()

    async def all_work() -> None:
        quota = asyncio.Semaphore(4)
        times = [WorkTime("run", quota, 0.25) for _ in range(20)]
        await asyncio.gather(*(each.over(lambda each=each: works(each)) for each in times))
        assert not quota.locked()

    begin = time.perf_counter()
    loop.run(all_work())
    assert most == 4
    assert time.perf_counter() - begin >= 3 * 0.01 * 20 / 4


def test_what_rests_twice_works_again_when_both_have_ended(loop: EventLoop):
    """As an agent that asks the policy twice at a time; none takes a place that it does not use."""
    quota = asyncio.Semaphore(1)

    async def asks_twice(time: WorkTime) -> bool:
        time.rest()
        time.rest()
        await time.go_on()
        is_free = not quota.locked()
        await time.go_on()
        return is_free and quota.locked()

    async def works() -> bool:
        time = WorkTime("run", quota, 5)
        return await time.over(lambda: asks_twice(time))

    assert loop.run(works())
    assert not quota.locked()
