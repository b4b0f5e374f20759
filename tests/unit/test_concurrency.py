import asyncio
import threading

import pytest

from raypo.concurrency import daemon_future


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
