"""Requests in flight during weight pushes, lost engines, and which engine gets which request."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from raypo.cluster.actors import NoReplicaLeft
from raypo.concurrency import daemon_future
from raypo.rollout.collect import Sampler, Sampling
from raypo.rollout.engines import PolicyEngines, Pushes
from raypo.serving import client
from raypo.serving.requests import Completion, SamplingRequest
from raypo.types import Prompt, Rollout
from tests.stand_ins import Engine, Lossy, seed_of

Answers = Callable[[list[SamplingRequest]], list[Completion]]


def request(seed: int) -> SamplingRequest:
    return SamplingRequest(np.array([5], np.int32), 4, 1.0, seed=seed)


def completion(request: SamplingRequest, reason: str = "stop") -> Completion:
    return Completion(np.array([request.seed], np.int32), np.zeros(1, np.float32), reason, 0)


@dataclass
class Calls(Engine):
    """An engine whose calls are answered by the functions in `calls`, in order."""

    answers: Any = None
    calls: list[Answers] = field(default_factory=list)
    asked: list[list[int]] = field(default_factory=list)

    def generate(
        self, requests: Sequence[SamplingRequest], on_completion: client.OnCompletion | None = None
    ) -> client.Completions:
        """The last request is ready early; the one before is given back early."""
        self.asked.append([seed_of(each) for each in requests])
        last = len(requests) - 1
        if on_completion is not None:
            on_completion(last, completion(requests[last]))
            on_completion(last - 1, completion(requests[last - 1], "paused"))
        answers = self.calls.pop(0)
        return daemon_future(lambda: answers(list(requests)), name="engine")

    submit = generate


def whole(requests: list[SamplingRequest]) -> list[Completion]:
    return [completion(each) for each in requests]


def asking(engines: Any, pushes: Pushes | None = None) -> PolicyEngines:
    return PolicyEngines(engines, pushes)


def generated(client: PolicyEngines, *requests: SamplingRequest) -> list[Completion]:
    return client.generate(requests).result()


def joined(client: PolicyEngines, *requests: SamplingRequest) -> list[Completion]:
    """Each by itself."""
    return [client.submit([each]).result()[0] for each in requests]


def seeds(answers: list[Completion]) -> list[int]:
    return [int(each.token_ids[0]) for each in answers]


def test_what_a_pause_gives_back_is_asked_for_anew_and_keeps_its_place():
    def paused(requests: list[SamplingRequest]) -> list[Completion]:
        reasons = ["stop", "paused", "length", "paused"]
        return [completion(*each) for each in zip(requests, reasons, strict=True)]

    engines = Calls(
        calls=[paused, lambda given: [completion(each, "paused") for each in given], whole]
    )
    answer = asking(engines, Pushes()).generate([request(n) for n in range(4)])
    assert seeds(answer.result()) == [0, 1, 2, 3]
    assert engines.asked == [[0, 1, 2, 3], [1, 3], [1, 3]]


def test_what_has_come_is_told_by_its_place_among_all_requests():
    def first_only(requests: list[SamplingRequest]) -> list[Completion]:
        return [completion(requests[0]), *(completion(each, "paused") for each in requests[1:])]

    early: list[int] = []
    engines = Calls(calls=[first_only, whole])
    asking(engines, Pushes()).generate(
        [request(n) for n in range(4)], lambda index, completion: early.append(index)
    ).result()
    assert early == [3, 3]
    assert engines.asked[1] == [1, 2, 3]


@pytest.mark.parametrize("ask", [generated, joined])
@pytest.mark.parametrize("reason", ["cancelled", "timeout"])
def test_what_was_withdrawn_is_taken_for_no_response_that_has_ended(ask: Any, reason: str):
    engines = Calls(calls=[lambda given: [completion(given[0], reason)]])
    with pytest.raises(RuntimeError, match=reason):
        ask(asking(engines, Pushes()), request(7))


@pytest.mark.parametrize("ask", [generated, joined])
def test_a_request_that_is_lost_during_a_push_is_asked_for_when_it_has_ended(ask: Any):
    pushes = Pushes()
    has_begun, may_end = threading.Event(), threading.Event()

    def push() -> None:
        with pushes.push():
            has_begun.set()
            may_end.wait(10)

    def lost(requests: list[SamplingRequest]) -> list[Completion]:
        pushing.start()
        has_begun.wait(10)
        threading.Timer(0.05, may_end.set).start()
        raise NoReplicaLeft("the engine's weights are kept no longer")

    def after(requests: list[SamplingRequest]) -> list[Completion]:
        assert may_end.is_set()
        return whole(requests)

    pushing = threading.Thread(target=push)
    engines = Calls(calls=[lost, after])
    assert seeds(ask(asking(engines, pushes), request(7))) == [7]


def lost(requests: list[SamplingRequest]) -> list[Completion]:
    raise NoReplicaLeft("nothing is kept")


@pytest.mark.parametrize("ask", [generated, joined])
def test_where_weights_are_never_pushed_again_a_lost_engine_is_an_error(ask: Any):
    with pytest.raises(NoReplicaLeft, match="nothing is kept"):
        ask(asking(Calls(calls=[lost])), request(7))


@pytest.mark.parametrize("times", [1, 2])
def test_a_learner_that_waits_is_told_to_push_until_the_requests_are_served(times: int):
    pushes, engines = Pushes(), Calls(calls=[lost] * times + [whole])
    answer = asking(engines, pushes).generate([request(7)])
    for _ in range(times):
        assert not pushes.wait_for(answer, may_push=True)
        with pushes.push():
            pass
    assert pushes.wait_for(answer, may_push=True)
    assert seeds(answer.result()) == [7]


def test_requests_that_wait_for_a_push_need_no_threads():
    pushes, engines = Pushes(), Calls(calls=[whole] * 200)
    with pushes.push():
        before = threading.active_count()
        answers = [asking(engines, pushes).submit([request(n)]) for n in range(200)]
        assert threading.active_count() <= before + 1  # the loop of this process
        assert not any(answer.done() for answer in answers)
    assert [seeds(answer.result(10)) for answer in answers] == [[n] for n in range(200)]


def test_a_learner_that_has_updated_its_weights_cannot_push_them_again():
    pushes = Pushes()
    answer = asking(Calls(calls=[lost, whole]), pushes).generate([request(7)])
    with pytest.raises(NoReplicaLeft, match="nothing is kept"):
        pushes.wait_for(answer, may_push=False)
    with pushes.push():  # the next version
        pass
    assert seeds(answer.result()) == [7]


@pytest.mark.parametrize("ask", [generated, joined])
def test_who_asks_during_a_push_waits_for_its_end_also_where_it_fails(ask: Any):
    pushes, engines = Pushes(), Calls(calls=[whole])
    client = asking(engines, pushes)
    answers: list[Completion] = []
    asks = threading.Thread(target=lambda: answers.extend(ask(client, request(3))))

    def push() -> None:
        with pushes.push():
            asks.start()
            asks.join(0.05)
            assert not engines.asked
            raise RuntimeError("an engine received something else")

    with pytest.raises(RuntimeError, match="something else"):
        push()
    asks.join(10)
    assert seeds(answers) == [3]


DRAWS = [Prompt(n, "p", np.array([5], np.int32), group_index=n) for n in range(5)]


@dataclass
class Fleet(Engine):
    """Engines that record their number and the number of requests of each call."""

    answers: Any = None
    joins: bool = False
    calls: list[tuple[int, int]] = field(default_factory=list)
    number: int = -1

    def per_engine(self) -> list[Engine]:
        return [Fleet(joins=self.joins, calls=self.calls, number=n) for n in range(3)]

    def generate(
        self, requests: Sequence[SamplingRequest], on_completion: client.OnCompletion | None = None
    ) -> client.Completions:
        self.calls.append((self.number, len(requests)))
        if on_completion is not None:
            on_completion(0, completion(requests[0]))
        return daemon_future(lambda: whole(list(requests)), name="engine")

    def submit(
        self, requests: Sequence[SamplingRequest], on_completion: client.OnCompletion | None = None
    ) -> client.Completions:
        return self.generate(requests)


@pytest.mark.parametrize("count", [1, 5])
def test_exclusive_batches_are_split_by_a_fixed_rule(count: int):
    fleet = Fleet()
    sampled = Sampler(fleet, Lossy(), Sampling(1, 4, 1.0, 1.0, (), seed=0)).sample(DRAWS[:count])
    assert fleet.calls == [(0, 2), (1, 2), (2, 1)] if count == 5 else [(0, 1)]
    assert [rollout.group_index for rollout in sampled] == list(range(count))


@pytest.mark.parametrize("joins", [False, True])
def test_the_rollouts_of_a_prompt_are_reported_once_when_all_have_come(joins: bool):
    fleet, early = Fleet(joins=joins), list[list[Rollout]]()
    sampler = Sampler(fleet, Lossy(), Sampling(2, 4, 1.0, 1.0, (), seed=0))
    sampled = sampler.sample(DRAWS, on_rollouts=early.append)
    if joins:
        assert fleet.calls == [(-1, 2)] * 5  # a call for each prompt, to the least busy engine
        assert sorted(group[0].group_index for group in early) == list(range(5))
    for group in early:
        assert [rollout.sample_index for rollout in group] == [0, 1]
        assert all(any(rollout is other for other in sampled) for rollout in group)


def test_an_engine_that_fails_ends_the_calls_of_the_others():
    cancelled = threading.Event()

    class Failing(Fleet):
        def per_engine(self) -> list[Engine]:
            return [self, self]

        def generate(self, requests: Any, on_completion: Any = None) -> client.Completions:
            self.calls.append((0, len(requests)))
            if len(self.calls) == 1:
                return daemon_future(lambda: 1 / 0, name="engine")  # type: ignore[return-value]
            waiting: client.Completions = Future()
            waiting.add_done_callback(lambda done: done.cancelled() and cancelled.set())
            return waiting

    with pytest.raises(ZeroDivisionError):
        Sampler(Failing(), Lossy(), Sampling(1, 4, 1.0, 1.0, (), seed=0)).sample(DRAWS)
    assert cancelled.is_set()
