"""The thread that owns vLLM, with a stand-in for vLLM: thousands of turns in a second.

What an engine promises is in tests/engine_contract.py. Here is what takes many interleavings, or a
device, to be seen.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from raypo.deployment import gauges
from raypo.serving.requests import Completion, SamplingRequest
from raypo.serving.vllm_loop import EngineState, VllmLoop
from raypo.serving.vllm_requests import completion_of
from tests.stand_in_vllm import Pause, StandIn, in_place_of_vllm
from tests.stand_ins import versions_of

SOON_S = 10.0
PROMPT = np.array([1], dtype=np.int32)


@pytest.fixture(autouse=True)
def no_vllm() -> Iterator[None]:
    with in_place_of_vllm():
        yield


@pytest.fixture
def loop() -> Iterator[VllmLoop]:
    started = VllmLoop(StandIn, EngineState(version=1), max_waiting=8)
    yield started
    started.close()


def ask(length: int, **changes: Any) -> SamplingRequest:
    return SamplingRequest(PROMPT, length, 1.0, **changes)


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(1e-4)


def push(loop: VllmLoop, version: int) -> None:
    """As an engine does, in several calls."""

    def begin() -> None:
        loop.drain_steps()
        loop.serving.version = None

    def finish() -> None:
        assert loop.reset_kv_cache()
        loop.serving.version = version
        loop.record_version(None, version)

    loop.call(begin)
    loop.call(finish)


def pause(loop: VllmLoop, how: Any) -> None:
    loop.call(lambda: setattr(loop.serving, "paused", how))


def test_every_request_of_many_callers_is_answered_once(loop: VllmLoop) -> None:
    answered: list[str] = []
    weights = itertools.count(2)

    def call(caller: int) -> None:
        chance = random.Random(caller)
        answers: list[tuple[SamplingRequest, Future[Completion]]] = []
        for number in range(60):
            name = f"{caller}-{number}"
            timeout_s = chance.choice([None, None, 1e-4])
            request = ask(chance.randint(1, 12), id=name, timeout_s=timeout_s)
            alone = chance.random() < 0.2
            (asked,) = loop.submit([request], alone=alone)
            asked.add_done_callback(lambda _, name=name: answered.append(name))
            answers.append((request, asked))
            if chance.random() < 0.2:
                chance.choice(answers)[1].cancel()
            if caller == 0 and number % 5 == 0:
                pause(loop, chance.choice(["keep", "recompute"]))
                push(loop, next(weights))
                pause(loop, None)
        for request, answer in answers:
            done = answer.result(timeout=SOON_S)
            length = len(done.token_ids)
            assert done.finish_reason in ("length", "cancelled", "timeout")
            assert length == request.max_new_tokens or done.finish_reason != "length"
            assert done.token_ids.tolist() == list(range(length))
            assert done.log_probs.tolist() == [-number for number in range(length)]
            assert (np.diff(versions_of(done)) >= 0).all()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(call, range(8)))
    assert sorted(answered) == sorted(f"{c}-{n}" for c in range(8) for n in range(60))
    assert (loop.load.queued, loop.load.running) == (0, 0)
    loop.submit([ask(1)] * 8, alone=False)  # all places are free again, or this would wait


def test_what_a_pause_restarts_enters_again_at_its_place_while_others_still_run_or_wait() -> None:
    """Two places and four requests of one call: no one's second start waits for the others."""
    loop = VllmLoop(partial(StandIn, max_num_seqs=2), EngineState(version=1), max_waiting=8)
    asked = loop.submit([ask(n) for n in (10**9, 10**9, 3, 3)], alone=False)
    until(lambda: loop.call(lambda: len(loop._running)) == 2)
    loop.call(lambda: setattr(loop.serving, "paused", "restart"))
    loop.call(loop.restart_running)
    push(loop, 2)
    pause(loop, None)
    until(lambda: loop.call(lambda: len(loop._running)) == 2)
    assert [each.vllm_id is not None for each in asked] == [True, True, False, False]
    asked[0].cancel()
    until(lambda: all(each.done() for each in asked[2:]))
    assert not asked[1].done()
    asked[1].cancel()
    for each in asked:
        done = each.result(SOON_S)
        assert set(versions_of(done)) <= {2}, "sampled from its first token"
        assert done.token_ids.tolist() == list(range(len(done.token_ids)))
    loop.close()


def test_a_probe_does_not_wait_for_a_response_to_end_where_all_places_are_taken() -> None:
    loop = VllmLoop(
        partial(StandIn, max_num_seqs=4), EngineState(version=1), max_waiting=1, probes=2
    )
    asked = loop.submit([ask(10**9)] * 3, alone=False)
    until(lambda: loop.call(lambda: len(loop._running)) == 2)
    for _ in range(2):
        probes = loop.submit([ask(4, priority=-1)] * 3, alone=False)
        for each in probes:
            assert each.result(SOON_S).finish_reason == "length"
    assert [each.vllm_id is not None for each in asked] == [True, True, False]
    loop.close()


def test_what_is_restarted_was_not_answered_and_is_late_at_its_old_time() -> None:
    loop = VllmLoop(StandIn, EngineState(version=1), max_waiting=8)
    (late,) = loop.submit([ask(10**9, timeout_s=1.5)], alone=False)
    until(lambda: loop.call(lambda: bool(loop._running)))
    loop.call(loop.restart_running)
    assert not late.done()
    assert late.result(SOON_S).finish_reason == "timeout"
    loop.close()


def test_preemptions_are_those_that_vllm_makes_for_want_of_room() -> None:
    """Neither those of a push, nor without those of requests that end between two looks."""
    loop = VllmLoop(StandIn, EngineState(version=1), max_waiting=8)
    (first,) = loop.submit([ask(10**9)], alone=False)
    until(lambda: loop.call(lambda: bool(loop._running)))
    loop.call(loop.llm.preempt_all)
    pause(loop, "recompute")
    push(loop, 2)
    loop.call(loop.llm.preempt_all)
    first.cancel()
    pause(loop, None)
    loop.submit([ask(1)], alone=False)[0].result(SOON_S)
    until(lambda: loop.load.running == 0)
    assert loop.load.preemptions == 2
    loop.close()


def test_what_a_dead_attempt_has_asked_is_given_back_also_what_comes_later(loop: VllmLoop) -> None:
    """Its batch runs alone, and more of it waits, here and at the door."""
    batch = loop.submit([ask(10**9, id="run/1")] * 2, alone=True)
    waiting = loop.submit([ask(3, id="run/1"), ask(3, id="other/1"), ask(3)], alone=False)
    until(lambda: bool(loop.llm.entered))
    assert loop.cancel_other_attempts("run", "2") == 3
    late = loop.submit([ask(3, id="run/1")], alone=True)
    late += loop.submit([ask(3, id="run/1"), ask(3, id="run/2")], alone=False)
    reasons = [each.result(SOON_S).finish_reason for each in (*batch, *waiting, *late)]
    assert reasons == ["cancelled"] * 3 + ["length"] * 2 + ["cancelled"] * 2 + ["length"]
    assert (loop.load.queued, loop.load.running) == (0, 0)
    loop.submit([ask(1)] * 8, alone=False)  # all places are free again, or this would wait


def test_a_step_that_hangs_is_seen_and_one_that_waits_for_work_is_not(loop: VllmLoop) -> None:
    time.sleep(0.05)
    assert loop.progress.stalled_s() == 0.0
    goes_on, step = threading.Event(), loop.llm.llm_engine.step

    def hangs() -> list[Any]:
        goes_on.wait(SOON_S)
        return step()

    loop.llm.llm_engine.step = hangs
    (asked,) = loop.submit([ask(1)], alone=True)
    until(lambda: loop.progress.stalled_s() > 0.1)
    goes_on.set()
    asked.result(SOON_S)
    until(lambda: loop.progress.stalled_s() == 0.0)


def test_the_load_of_a_stretch_is_that_since_the_one_before(loop: VllmLoop) -> None:
    loop.load_summary()
    pause(loop, "keep")
    asked = loop.submit([ask(5)] * 5, alone=False)
    until(lambda: loop.load.queued == 5)
    pause(loop, None)
    for each in asked:
        each.result(SOON_S)
    busy = loop.load_summary()
    assert (busy.queued_max, busy.running_max) == (5, 3)
    assert 0.0 < busy.queued_mean <= 5
    time.sleep(0.1)
    (asked,) = loop.submit([ask(1)], alone=False)
    asked.result(SOON_S)
    begin, end = loop.load_summary().idle[-1]
    assert 0.1 <= end - begin < SOON_S


def test_a_batch_that_runs_alone_enters_alone_and_what_joins_fills_the_room(loop: VllmLoop) -> None:
    pause(loop, "keep")
    asked = loop.submit([ask(4)] * 5, alone=False)
    asked += loop.submit([ask(4)] * 7, alone=True) + loop.submit([ask(4)] * 2, alone=False)
    pause(loop, None)
    for each in asked:
        each.result(timeout=SOON_S)
    assert [len(names) for names in loop.llm.entered] == [3, 2, 7, 2]


def test_requests_that_vllm_refuses_fail_and_so_do_those_that_wait(loop: VllmLoop) -> None:
    pause(loop, "keep")
    asked = loop.submit([ask(4)] * 5, alone=False)
    loop.llm.enqueue = lambda *_, **__: 1 / 0
    pause(loop, None)
    for each in asked:
        with pytest.raises(RuntimeError, match="ZeroDivisionError"):
            each.result(timeout=SOON_S)


def test_calls_wait_for_a_batch_that_runs_alone_and_for_nothing_else(loop: VllmLoop) -> None:
    (joined,) = loop.submit([ask(10**6)], alone=False)
    assert loop.call(lambda: loop.call(lambda: 3)) == 3, "from within, at once"
    assert not joined.done()
    joined.cancel()
    (alone,) = loop.submit([ask(3000)], alone=True)
    until(lambda: len(loop.llm.entered) == 2)
    assert loop.call(lambda: alone.done())
    assert joined.done()


def test_what_a_call_raises_is_raised_at_its_caller_and_the_thread_goes_on(loop: VllmLoop) -> None:
    def fail() -> None:
        raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong"):
        loop.call(fail)
    assert len(loop.submit([ask(2)], alone=True)[0].result(SOON_S).token_ids) == 2


@pytest.mark.parametrize("alone", [True, False])
def test_a_failure_to_take_requests_in_is_told_to_them_and_to_those_behind(
    loop: VllmLoop, monkeypatch: pytest.MonkeyPatch, alone: bool
) -> None:
    def fail(*_: Any, **__: Any) -> list[str]:
        raise ValueError("a prompt that vLLM does not like")

    monkeypatch.setattr(loop.llm, "enqueue", fail)
    pause(loop, "keep")
    asked = loop.submit([ask(3), ask(3)], alone=alone) + loop.submit([ask(3)], alone=False)
    pause(loop, None)
    for each in asked:
        with pytest.raises(RuntimeError, match="ValueError: a prompt that vLLM does not like"):
            each.result(timeout=SOON_S)
    assert loop.serving.failure is not None


def test_tokens_that_vllm_sampled_ahead_are_of_the_weights_before_the_push() -> None:
    """With asynchronous scheduling a step is under way when its weights are to be replaced."""
    loop = VllmLoop(lambda: StandIn(ahead=True), EngineState(version=1), max_waiting=8)
    (asked,) = loop.submit([ask(10**9)], alone=False)

    def num_tokens() -> int:
        return sum(each.num_output_tokens for each in loop.llm.requests.values())

    until(lambda: loop.call(num_tokens) > 3)
    before = loop.call(lambda: (num_tokens(), loop.drain_steps(), num_tokens()))
    assert before[2] == before[0] + 1, "the step that was under way"
    push(loop, 2)
    assert loop.llm.pause is Pause.UNPAUSED
    until(lambda: loop.call(num_tokens) > before[2] + 10**3)
    asked.cancel()
    done = asked.result(timeout=SOON_S)
    num_old = int((versions_of(done) == 1).sum())
    assert before[2] <= num_old < len(done.token_ids)
    assert done.later_versions == ((num_old, 2),)
    loop.close()


def test_vllm_is_unpaused_where_settling_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = VllmLoop(lambda: StandIn(ahead=True), EngineState(version=1), max_waiting=8)

    def fail() -> None:
        raise ValueError("wrong")

    def settle() -> None:
        with monkeypatch.context() as wrong:
            wrong.setattr(loop.progress, "step", fail)
            loop.drain_steps()

    (asked,) = loop.submit([ask(10**9)], alone=False)
    until(lambda: loop.call(lambda: bool(loop.llm.core.batch_queue)))
    with pytest.raises(ValueError, match="wrong"):
        loop.call(settle)
    assert loop.llm.pause is Pause.UNPAUSED
    asked.cancel()
    loop.close()


def test_outside_of_an_actor_no_gauge_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def load() -> Any:
        raise AssertionError("nobody listens")

    context = SimpleNamespace(get_actor_name=lambda: None)
    of_a_driver = SimpleNamespace(is_initialized=lambda: True, get_runtime_context=lambda: context)
    monkeypatch.setattr(gauges, "ray", of_a_driver)
    gauges.export_gauges("engine", load, threading.Event())


def test_no_call_is_overlooked_that_comes_while_others_are_taken(loop: VllmLoop) -> None:
    answers: list[int] = []
    for number in range(50):
        call = partial(loop.call, lambda number=number: answers.append(number))
        caller = threading.Thread(target=call, daemon=True)
        with loop._wakeup:
            caller.start()
            time.sleep(0.001)  # it stands at the door, and so will the thread, with news
            loop._post(loop._inbox, lambda: None)
        caller.join(SOON_S)
        assert answers[-1:] == [number]


def test_whoever_waits_for_a_place_is_told_of_the_end() -> None:
    loop = VllmLoop(StandIn, EngineState(version=1, paused="keep"), max_waiting=2)
    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(loop.submit, [ask(1)] * 3, alone=False) for _ in range(3)]
        time.sleep(0.05)
        assert not any(each.done() for each in waiting)
        loop.close()
        for each in waiting:
            with pytest.raises(RuntimeError, match="it was shut down"):
                each.result(timeout=SOON_S)
    with pytest.raises(RuntimeError, match="it was shut down"):
        loop.call(lambda: None)


def test_a_start_that_fails_is_told() -> None:
    def fail() -> None:
        raise OSError("no memory")

    with pytest.raises(OSError, match="no memory"):
        VllmLoop(fail, EngineState(), max_waiting=1)


@pytest.mark.parametrize(
    ("versions", "by_token"),
    [
        ([(0, 3)], [3, 3, 3]),
        ([(0, 3), (2, 4)], [3, 3, 4]),
        ([(0, 3), (0, 4), (1, 5), (1, 6)], [4, 6, 6]),  # pushes between which nothing was sampled
        ([(0, 3), (3, 4)], [3, 3, 3]),
    ],
)
def test_each_token_has_the_version_that_sampled_it(versions: list, by_token: list[int]) -> None:
    answer = completion_of([7, 7, 7], [-0.5] * 3, "length", versions)
    assert versions_of(answer).tolist() == by_token
    assert answer.weight_version == by_token[0]
    assert answer.token_ids.dtype == np.int32
    assert answer.log_probs.dtype == np.float32


def test_what_was_never_sampled_is_of_no_version() -> None:
    answer = completion_of([], [], "timeout", [(0, 3)])
    assert (answer.weight_version, answer.later_versions) == (-1, ())
    assert versions_of(answer).tolist() == answer.log_probs.tolist() == []
