"""A replica without Ray: its queue, its ids and its health."""

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from raypo.cluster.actors import ReplicaLost
from raypo.deployment import replica as module
from raypo.deployment.replica import MAX_CACHED_REPLIES, Replica
from raypo.deployment.spec import Call, Deployment, PrerequisiteFailed


@pytest.fixture(autouse=True)
def ended(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """One entry for each time that a replica ends its process."""
    ends: list[bool] = []
    monkeypatch.setattr(module, "EXIT_DELAY_S", 0.0)
    monkeypatch.setattr(module, "_exit_process", lambda: ends.append(True))
    return ends


class Counter:
    def __init__(self, start: int = 0) -> None:
        self.count = start
        self.gate = threading.Event()
        self.threads = {threading.get_ident()}
        self.is_broken = False
        self.promised: list[Future[int]] = []

    def add(self, number: int) -> int:
        self.threads.add(threading.get_ident())
        self.count += number
        return self.count

    def wait(self) -> str:
        self.gate.wait(10)
        return "done"

    def fail(self) -> None:
        raise ValueError("a bad request")

    def breaks(self) -> None:
        self.is_broken = True
        raise IndexError("out of range")

    def promise(self) -> list[Future[int]]:
        self.promised.append(Future())
        return self.promised[-1:]

    def promise_all(self, count: int) -> list[Future[int]]:
        self.promised = [Future() for _ in range(count)]
        return self.promised

    def promise_later(self) -> list[Future[int]]:
        self.gate.wait(10)
        return self.promise()

    def check_health(self) -> None:
        if self.is_broken:
            raise RuntimeError("cannot go on")


def replica(**limits: Any) -> Replica:
    return Replica(Deployment("raypo:test:counter", Counter, {"start": 10}, **limits), index=0)


def ask(counter: Replica, id: str, method: str, *args: Any, **more: Any) -> Any:
    return counter.call(Call(method, args, id=id, **more))


def control(counter: Replica, method: str, *args: Any) -> Any:
    return counter.control(method, args, {})


def shown(reply: Any) -> str:
    """A reply that says why a replica cannot serve a call."""
    assert isinstance(reply, ReplicaLost)
    return f"{type(reply).__name__}: {reply}"


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(coroutine)


def test_an_id_that_is_known_is_not_run_twice():
    counter = replica()

    async def twice() -> list[int]:
        first = asyncio.create_task(ask(counter, "a", "add", 5))
        again = asyncio.create_task(ask(counter, "a", "add", 5))
        later = [await first, await again, await ask(counter, "a", "add", 5)]
        return [*later, await ask(counter, "b", "add", 5)]

    assert run(twice()) == [15, 15, 15, 20]


def test_old_answers_are_forgotten():
    counter = replica()

    async def many() -> None:
        for number in range(3 * MAX_CACHED_REPLIES):
            await ask(counter, str(number), "add", 1)

    run(many())
    assert len(counter._replies) <= MAX_CACHED_REPLIES + 1


def test_one_request_at_a_time_means_one_thread():
    counter = replica()

    async def calls() -> None:
        await asyncio.gather(*(ask(counter, str(i), "add", 1) for i in range(5)))

    run(calls())
    assert len(counter._target.threads) == 1
    assert threading.get_ident() not in counter._target.threads


def test_what_is_promised_keeps_no_thread_and_is_answered_when_it_is_there():
    counter = replica(max_ongoing_requests=1)

    async def promises() -> tuple[int, list[list[int]], int]:
        under_way = [asyncio.create_task(ask(counter, str(i), "promise")) for i in range(3)]
        await asyncio.sleep(0.05)
        load = counter._num_calls()
        for number, promised in enumerate(counter._target.promised):
            promised.set_result(number)
        return load, [await each for each in under_way], counter._num_calls()

    assert run(promises()) == (3, [[0], [1], [2]], 0)


def test_whoever_does_not_get_on_counts_as_one_that_cannot_go_on():
    class Stalls(Counter):
        stalled = 0.0

        def stalled_s(self) -> float:
            return self.stalled

    stalls = Replica(Deployment("raypo:test:stalls", Stalls, {}, stall_timeout_s=5.0), index=0)
    assert stalls._find_problem() is None
    stalls._target.stalled = 5.1
    assert stalls._find_problem() == "it made no progress for 5 s (stall_timeout_s: 5)"
    assert replica(stall_timeout_s=5.0)._find_problem() is None, "it says nothing of itself"


def test_entries_of_an_answer_are_told_as_they_come():
    counter = replica()

    async def listens() -> list[Any]:
        under_way = asyncio.create_task(ask(counter, "a", "promise_all", 3))
        await asyncio.sleep(0.05)
        counter._target.promised[2].set_result(20)
        told = [await counter.partial_results("a", 0)]
        counter._target.promised[0].set_result(0)
        told += [await counter.partial_results("a", 1), await counter.partial_results("unknown", 0)]
        counter._target.promised[1].set_result(10)
        return [*told, await under_way, await counter.partial_results("a", 2)]

    assert run(listens()) == [{2: 20}, {0: 0}, {}, [0, 10, 20], {1: 10}]


def test_what_a_caller_that_gives_up_was_promised_is_cancelled():
    counter = replica()

    async def give_up() -> list[bool]:
        under_way = asyncio.create_task(ask(counter, "a", "promise_all", 2))
        await asyncio.sleep(0.05)
        under_way.cancel()
        await asyncio.gather(under_way, return_exceptions=True)
        return [each.cancelled() for each in counter._target.promised]

    assert run(give_up()) == [True, True]


def test_what_is_promised_when_its_caller_has_given_up_is_cancelled_too():
    counter = replica()

    async def give_up() -> bool:
        under_way = asyncio.create_task(ask(counter, "a", "promise_later"))
        await asyncio.sleep(0.05)
        under_way.cancel()
        await asyncio.gather(under_way, return_exceptions=True)
        counter._target.gate.set()
        while not counter._target.promised:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        return counter._target.promised[0].cancelled()

    assert run(give_up())


def test_a_promise_that_breaks_the_object_is_no_error_of_the_request():
    counter = replica()

    async def broken() -> Any:
        under_way = asyncio.create_task(ask(counter, "a", "promise"))
        await asyncio.sleep(0.05)
        counter._target.is_broken = True
        counter._target.promised[0].set_exception(IndexError("out of range"))
        return await under_way

    assert shown(run(broken())) == "ReplicaLost: cannot go on"


def test_among_several_requests_a_control_call_waits_for_none_and_keeps_its_order():
    counter = replica(max_ongoing_requests=2)

    async def told() -> list[int]:
        busy = [asyncio.create_task(ask(counter, i, "wait")) for i in "abcd"]
        await asyncio.sleep(0.05)
        numbers = await asyncio.gather(
            *(control(counter, "add", 1) for _ in range(10)),
            *(ask(counter, f"urgent {i}", "add", 1, is_urgent=True) for i in range(10)),
        )
        counter._target.gate.set()
        await asyncio.gather(*busy)
        return numbers

    assert run(told()) == list(range(11, 31))


def test_a_caller_that_gives_up_takes_a_waiting_request_away():
    counter = replica()

    async def give_up() -> int:
        under_way = asyncio.create_task(ask(counter, "a", "wait"))
        waiting = asyncio.create_task(ask(counter, "b", "add", 1))
        await asyncio.sleep(0.05)
        waiting.cancel()
        await asyncio.sleep(0)
        counter._target.gate.set()
        await under_way
        return await ask(counter, "c", "add", 0)

    assert run(give_up()) == 10


def test_an_error_of_the_request_is_the_callers_and_one_of_the_object_ends_the_process(
    ended: list[bool],
):
    counter = replica()
    with pytest.raises(ValueError, match="a bad request"):
        run(ask(counter, "a", "fail"))
    assert counter._find_problem() is None

    async def broken() -> Any:
        reply = await ask(counter, "b", "breaks")
        assert not ended, "the reply is sent first"
        await asyncio.sleep(0.01)
        return reply

    assert shown(run(broken())) == "ReplicaLost: cannot go on"
    assert counter._find_problem() == "cannot go on"
    assert ended == [True]


def test_draining_waits_for_what_is_under_way():
    counter = replica()

    async def drain() -> str:
        under_way = asyncio.create_task(ask(counter, "a", "wait"))
        await asyncio.sleep(0.05)
        draining = asyncio.create_task(counter.drain())
        await asyncio.sleep(0)
        assert not draining.done()
        counter._target.gate.set()
        await draining
        return await under_way

    assert run(drain()) == "done"


def test_it_is_called_what_the_object_is_called():
    Counter.__repr__ = lambda self: "Counter(ready)"  # type: ignore[method-assign]
    assert repr(replica()) == "Counter(ready)"


def test_one_whose_object_cannot_be_made_still_has_a_name():
    """Ray asks for it while it tells the constructor's error."""
    unmade = object.__new__(Replica)
    with pytest.raises(TypeError, match="no_such_key"):
        unmade.__init__(Deployment("raypo:test:counter", Counter, {"no_such_key": 1}), index=0)
    assert repr(unmade) == "Replica(not built)"


def test_a_request_that_was_given_up_is_worked_on_when_it_is_asked_again():
    counter = replica()

    async def given_up() -> list[Any]:
        under_way = asyncio.create_task(ask(counter, "a", "wait"))
        in_line = asyncio.create_task(ask(counter, "b", "add", 5))
        await asyncio.sleep(0.05)
        for task in (under_way, in_line):
            task.cancel()
        await asyncio.gather(under_way, in_line, return_exceptions=True)
        asyncio.get_running_loop().call_later(0.05, counter._target.gate.set)
        return [
            await ask(counter, "a", "wait"),
            await ask(counter, "b", "add", 5),
        ]

    assert run(given_up()) == ["done", 15]


def test_what_is_required_comes_before_the_request_and_its_failure_is_told():
    counter = replica()
    assert run(ask(counter, "a", "add", 1, prerequisite=("add", (100,)))) == 111
    told = run(ask(counter, "b", "add", 1, prerequisite=("fail", ())))
    assert shown(told) == "PrerequisiteFailed: ValueError: a bad request"
    assert counter._target.count == 111
    told = run(ask(counter, "c", "add", 1, prerequisite=("breaks", ())))
    assert shown(told) == "ReplicaLost: cannot go on"


def test_a_control_call_waits_for_a_prerequisite_that_is_under_way():
    """A restarted engine must not load the last push over the next one."""
    counter = replica(max_ongoing_requests=2)

    async def pushed() -> tuple[bool, list[int]]:
        request = asyncio.create_task(ask(counter, "a", "add", 1, prerequisite=("wait", ())))
        await asyncio.sleep(0.05)
        push = asyncio.create_task(control(counter, "add", 100))
        await asyncio.sleep(0.05)
        is_early = push.done()
        counter._target.gate.set()
        await asyncio.gather(request, push)
        return is_early, [counter._target.count]

    assert run(pushed()) == (False, [111])


def test_one_that_takes_turns_takes_its_memory_again_when_it_is_asked_to_work(
    monkeypatch: pytest.MonkeyPatch,
):
    """The learner may have it when Ray starts the replica again."""
    context = SimpleNamespace(
        was_current_actor_reconstructed=True,
        get_accelerator_ids=dict,
        get_actor_name=lambda: None,
    )
    monkeypatch.setattr("ray.is_initialized", lambda: True)
    monkeypatch.setattr("ray.get_runtime_context", lambda: context)
    counter = replica(builds_lazily_on_restart=True)
    for method in ("sleep", "wake_up"):
        assert run(control(counter, method)) is None
    assert isinstance(run(control(counter, "peak_memory")), PrerequisiteFailed)
    assert counter._find_problem() is None
    assert repr(counter) == "Replica(not built)"
    assert run(ask(counter, "a", "add", 1)) == 11
