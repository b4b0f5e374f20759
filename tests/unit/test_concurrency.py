import asyncio
import threading
import time
from contextvars import ContextVar
from functools import partial

import pytest

from raypo import concurrency
from raypo.concurrency import background_future, daemon_future, in_this_context


def test_the_result_comes_from_a_thread_that_no_exit_waits_for():
    thread = daemon_future(threading.current_thread, name="raypo-test").result(10)
    assert (thread.name, thread.daemon) == ("raypo-test", True)


@pytest.mark.parametrize("error", [ValueError("wrong"), KeyboardInterrupt()])
def test_what_the_function_raises_is_raised_to_whoever_waits(error):
    def fail():
        raise error

    with pytest.raises(type(error)) as raised:
        daemon_future(fail, name="raypo-test").result(10)
    assert raised.value is error


def test_a_stop_iteration_ends_no_coroutine_that_waits():
    async def wait():
        await asyncio.wrap_future(daemon_future(lambda: next(iter(())), name="raypo-test"))

    with pytest.raises(RuntimeError, match="a StopIteration was raised"):
        asyncio.run(wait())


def test_threads_that_need_the_background_loop_first_get_the_same_one(monkeypatch):
    new_loop = asyncio.new_event_loop

    def slow() -> asyncio.AbstractEventLoop:
        time.sleep(0.05)
        return new_loop()

    async def running() -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    monkeypatch.setattr(asyncio, "new_event_loop", slow)
    concurrency._background_loop.cache_clear()
    first = [
        daemon_future(lambda: background_future(running()).result(10), name="raypo-test")
        for _ in range(4)
    ]
    assert len({each.result(10) for each in first}) == 1


def test_a_function_of_a_context_runs_in_it_in_several_threads_at_once():
    name: ContextVar[str] = ContextVar("name", default="none")
    both = threading.Barrier(2)

    def read(mark: str) -> str:
        both.wait(10.0)
        return name.get() + mark

    token = name.set("engine")
    bound = in_this_context(read)
    name.reset(token)
    marks = [daemon_future(partial(bound, mark), name="test") for mark in "ab"]
    assert [mark.result(10.0) for mark in marks] == ["enginea", "engineb"]
