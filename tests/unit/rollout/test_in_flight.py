"""Requests under way while weights are pushed: what is given back or lost is asked for anew."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from raypo.cluster.actors import NoReplicaLeft
from raypo.concurrency import daemon_future
from raypo.rollout.in_flight import EnginesInFlight, Pushes
from raypo.serving import client
from raypo.serving.requests import Completion, SamplingRequest
from tests.stand_ins import Engine, seed_of

Answers = Callable[[list[SamplingRequest]], list[Completion]]


def request(seed: int) -> SamplingRequest:
    return SamplingRequest(np.array([5], np.int32), 4, 1.0, seed=seed)


def completion(request: SamplingRequest, reason: str = "stop") -> Completion:
    return Completion(np.array([request.seed], np.int32), np.zeros(1, np.float32), reason, 0)


@dataclass
class Engines(Engine):
    """Each call is answered by the next of `calls`."""

    answers: Any = None
    calls: list[Answers] = field(default_factory=list)
    asked: list[list[int]] = field(default_factory=list)

    def submit(
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


def whole(requests: list[SamplingRequest]) -> list[Completion]:
    return [completion(each) for each in requests]


def generated(asking: EnginesInFlight, *requests: SamplingRequest) -> list[Completion]:
    return asking.generate(requests).result()


def joined(asking: EnginesInFlight, *requests: SamplingRequest) -> list[Completion]:
    """Each by itself."""
    return [asking.submit([each]).result()[0] for each in requests]


def seeds(answers: list[Completion]) -> list[int]:
    return [int(each.token_ids[0]) for each in answers]


def test_what_a_pause_gives_back_is_asked_for_anew_and_keeps_its_place():
    def paused(requests: list[SamplingRequest]) -> list[Completion]:
        reasons = ["stop", "paused", "length", "paused"]
        return [completion(*each) for each in zip(requests, reasons, strict=True)]

    engines = Engines(
        calls=[paused, lambda given: [completion(each, "paused") for each in given], whole]
    )
    answer = EnginesInFlight(engines, Pushes()).generate([request(n) for n in range(4)])
    assert seeds(answer.result()) == [0, 1, 2, 3]
    assert engines.asked == [[0, 1, 2, 3], [1, 3], [1, 3]]


def test_what_has_come_is_told_by_its_place_among_all_requests():
    def first_only(requests: list[SamplingRequest]) -> list[Completion]:
        return [completion(requests[0]), *(completion(each, "paused") for each in requests[1:])]

    early: list[int] = []
    engines = Engines(calls=[first_only, whole])
    EnginesInFlight(engines, Pushes()).generate(
        [request(n) for n in range(4)], lambda index, completion: early.append(index)
    ).result()
    assert early == [3, 3]
    assert engines.asked[1] == [1, 2, 3]


def test_what_a_pause_gives_back_is_asked_for_anew_where_each_is_asked_by_itself():
    engines = Engines(calls=[lambda given: [completion(given[0], "paused")], whole, whole])
    assert seeds(joined(EnginesInFlight(engines, Pushes()), request(1), request(2))) == [1, 2]
    assert engines.asked == [[1], [1], [2]]


@pytest.mark.parametrize("ask", [generated, joined])
@pytest.mark.parametrize("reason", ["cancelled", "timeout"])
def test_what_was_withdrawn_is_taken_for_no_response_that_has_ended(ask: Any, reason: str):
    engines = Engines(calls=[lambda given: [completion(given[0], reason)]])
    with pytest.raises(RuntimeError, match=reason):
        ask(EnginesInFlight(engines, Pushes()), request(7))


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
    engines = Engines(calls=[lost, after])
    assert seeds(ask(EnginesInFlight(engines, pushes), request(7))) == [7]


@pytest.mark.parametrize("ask", [generated, joined])
def test_without_a_push_a_lost_engine_is_an_error(ask: Any):
    def lost(requests: list[SamplingRequest]) -> list[Completion]:
        raise NoReplicaLeft("nothing is kept")

    engines = Engines(calls=[lost])
    with pytest.raises(NoReplicaLeft, match="nothing is kept"):
        ask(EnginesInFlight(engines, Pushes()), request(7))


@pytest.mark.parametrize("ask", [generated, joined])
def test_who_asks_during_a_push_waits_for_its_end_also_where_it_fails(ask: Any):
    pushes, engines = Pushes(), Engines(calls=[whole])
    asking = EnginesInFlight(engines, pushes)
    answers: list[Completion] = []
    asks = threading.Thread(target=lambda: answers.extend(ask(asking, request(3))))

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
