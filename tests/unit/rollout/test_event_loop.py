"""The event loop of the episodes: what the user's code does in it neither ends nor stops it."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from raypo.rollout import event_loop
from raypo.rollout.event_loop import EventLoop
from raypo.rollout.work_time import WorkTime


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(event_loop, "STANDS_STILL_S", 0.3)


@pytest.fixture
def loop() -> Iterator[EventLoop]:
    made = EventLoop(0.3)
    yield made
    made.close()


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
        await WorkTime("step", asyncio.Semaphore(1), 0.1).run(stays)

    goes_on = threading.Event()
    goes_on.set()
    begin = time.perf_counter()
    with pytest.raises(TimeoutError, match=r"step gave no answer in 0\.1 s"):
        loop.run(limited())
    assert time.perf_counter() - begin < 5
    goes_on.clear()


def test_what_rests_twice_works_again_when_both_have_ended(loop: EventLoop):
    """As an agent that asks the policy twice at a time; none takes a place that it does not use."""
    quota = asyncio.Semaphore(1)

    async def asks_twice(time: WorkTime) -> bool:
        time.pause()
        time.pause()
        await time.resume()
        is_free = not quota.locked()
        await time.resume()
        return is_free and quota.locked()

    async def works() -> bool:
        time = WorkTime("run", quota, 5)
        return await time.run(lambda: asks_twice(time))

    assert loop.run(works())
    assert not quota.locked()


def test_an_agent_that_does_not_wait_for_the_quota_has_its_time_limit_all_the_same(
    loop: EventLoop,
):
    """As one whose own time limit, or whose client, gives up a request to the policy."""
    quota = asyncio.Semaphore(1)

    async def hangs(time: WorkTime, num_calls: int) -> None:
        for _ in range(num_calls):
            time.pause()
        await quota.acquire()  # another agent works meanwhile
        ends = [asyncio.create_task(time.resume()) for _ in range(num_calls)]
        await asyncio.sleep(0.01)
        for each in ends:
            each.cancel()
        await asyncio.wait(ends)
        assert any(each.cancelled() for each in ends)
        await asyncio.sleep(60)

    async def limited(num_calls: int) -> bool:
        time = WorkTime("run", quota, 0.1)
        with pytest.raises(TimeoutError, match=r"run gave no answer in 0\.1 s"):
            await asyncio.wait_for(time.run(lambda: hangs(time, num_calls)), 20)
        quota.release()  # the other agent's
        return quota._value == 1

    for num_calls in (1, 2):
        assert loop.run(limited(num_calls))


def test_an_agent_that_went_on_without_the_quota_takes_it_again_after_its_next_pause(
    loop: EventLoop,
):
    quota = asyncio.Semaphore(1)

    async def goes_on(time: WorkTime) -> list[bool]:
        time.pause()
        await quota.acquire()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(time.resume(), 0.01)
        time.pause()
        quota.release()
        is_free = not quota.locked()
        await asyncio.sleep(0.6)  # the clock rests
        await time.resume()
        return [is_free, quota.locked()]

    async def works() -> list[bool]:
        time = WorkTime("run", quota, 0.5)
        return await time.run(lambda: goes_on(time))

    assert loop.run(works()) == [True, True]
    assert quota._value == 1


def test_the_clock_rests_while_another_call_of_the_agent_waits_for_the_quota(loop: EventLoop):
    quota = asyncio.Semaphore(1)

    async def asks_twice(time: WorkTime) -> bool:
        time.pause()
        await quota.acquire()
        waits = asyncio.create_task(time.resume())
        await asyncio.sleep(0.01)
        time.pause()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(time.resume(), 0.01)
        await asyncio.sleep(0.6)
        quota.release()
        await waits
        return quota.locked()

    async def works() -> bool:
        time = WorkTime("run", quota, 0.5)
        return await time.run(lambda: asks_twice(time))

    assert loop.run(works())
    assert quota._value == 1
