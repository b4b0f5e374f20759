"""The batches that workers send to engines, and the completions that they get early."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from raypo.collectives import Workers
from raypo.concurrency import daemon_future
from raypo.deployment.spec import SharedCall
from raypo.rollout.collect import Sampler, Sampling
from raypo.rollout.dispatch import sample_on_engines
from raypo.serving import client
from raypo.serving.requests import Completion, SamplingRequest
from raypo.types import Prompt, Rollout
from tests.stand_ins import Engine, Lossy, completed, seed_of
from tests.unit.learner.plain import on_workers

PROMPT = np.array([5], np.int32)


def request(seed: int) -> SamplingRequest:
    return SamplingRequest(PROMPT, 4, 1.0, seed=seed)


def completion(seed: int) -> Completion:
    return Completion(np.array([seed], np.int32), np.zeros(1, np.float32), "stop", 0)


@dataclass
class Fleet:
    """Engines that work on a call once, whoever makes it; answers are the requests' seeds."""

    lots: dict[str, list[int]] = field(default_factory=dict)
    """By the id of the call and the engine's number, what was asked."""
    lock: threading.Lock = field(default_factory=threading.Lock)


@dataclass
class Engines:
    """As one worker sees them."""

    fleet: Fleet
    preferred: tuple[int, ...]

    def per_engine(self) -> list[Engines]:
        return [Engines(self.fleet, (number,)) for number in self.preferred]

    def generate(
        self,
        requests: Sequence[SamplingRequest],
        on_completion: client.OnCompletion | None = None,
        shared: SharedCall | None = None,
    ) -> client.Completions:
        assert shared is not None
        seeds = [seed_of(each) for each in requests]
        with self.fleet.lock:
            assert self.fleet.lots.setdefault(shared.id, seeds) == seeds, "one id, two lots"
        return completed([completion(seeds[place]) for place in shared.part])

    def submit(self, requests: Any, on_completion: Any = None) -> client.Completions:
        raise AssertionError("a synchronous worker sends batches")


def seeds(answers: Sequence[Completion]) -> list[int]:
    return [int(each.token_ids[0]) for each in answers]


def together(workers: Workers, fleet: Fleet, own: Sequence[tuple[int, ...]], count: int):
    """Each worker asks for as many responses as its rank says, and `count` more."""
    requests = [request(10 * workers.rank + number) for number in range(workers.rank + count)]
    answers = sample_on_engines(requests, Engines(fleet, own[workers.rank]), sharing=workers)
    assert seeds(answers) == [each.seed for each in requests]
    return len(answers)


def test_what_all_workers_ask_an_engine_is_one_lot_in_the_order_of_their_ranks():
    fleet = Fleet()
    on_workers(3, lambda workers: together(workers, fleet, [(0,), (0,), (0,)], 1))
    assert list(fleet.lots.values()) == [[0, 10, 11, 20, 21, 22]]


def test_workers_with_engines_of_their_own_share_the_others():
    """Two engines: workers 0 and 1 have one each, worker 2 has both."""
    fleet = Fleet()
    on_workers(3, lambda workers: together(workers, fleet, [(0,), (1,), (0, 1)], 2))
    by_engine = {id.rpartition(":")[2]: lot for id, lot in fleet.lots.items()}
    assert by_engine == {"(0,)": [0, 1, 20, 21], "(1,)": [10, 11, 12, 22, 23]}


def test_a_worker_without_prompts_asks_with_the_others_and_gets_nothing():
    fleet = Fleet()
    counts = on_workers(2, lambda workers: together(workers, fleet, [(0,), (0,)], 0))
    assert counts == [0, 1]
    assert list(fleet.lots.values()) == [[10]]


@dataclass
class Slow(Engine):
    """An engine that reports early completions twice, as one that was restarted."""

    answers: Any = None
    early: list[int] = field(default_factory=list)
    has_ended: threading.Event = field(default_factory=threading.Event)

    def generate(
        self,
        requests: Sequence[SamplingRequest],
        on_completion: client.OnCompletion | None = None,
        shared: SharedCall | None = None,
    ) -> client.Completions:
        for place in 2 * self.early:
            assert on_completion is not None
            on_completion(place, completion(100 + place))

        def result() -> list[Completion]:
            assert self.has_ended.wait(10)
            return [completion(200 + place) for place in range(len(requests))]

        return daemon_future(result, name="slow")


def test_the_rollouts_of_a_draw_are_heard_when_all_have_come_and_stay_what_they_were():
    engine, heard = Slow(early=[0, 3, 2]), list[list[Rollout]]()
    draws = [Prompt(draw, "p", PROMPT, group_index=draw) for draw in range(3)]
    sampler = Sampler(engine, Lossy(), Sampling(2, 4, 1.0, 1.0, (), seed=0))
    some_are_heard = threading.Event()

    def hear(rollouts: list[Rollout]) -> None:
        heard.append(rollouts)
        some_are_heard.set()

    rollouts: list[Rollout] = []
    sampling_thread = threading.Thread(
        target=lambda: rollouts.extend(sampler.sample(draws, on_rollouts=hear))
    )
    sampling_thread.start()
    assert some_are_heard.wait(10)
    engine.has_ended.set()
    sampling_thread.join(10)
    assert [[each.group_index for each in group] for group in heard] == [[1, 1]]
    assert [int(each.response_ids[0]) for each in rollouts] == [200, 201, 102, 103, 204, 205]
    assert all(one is other for one, other in zip(rollouts[2:4], heard[0], strict=True))


def test_who_does_not_listen_is_told_nothing_and_gets_all():
    engine = Slow(has_ended=threading.Event())
    engine.has_ended.set()
    assert seeds(sample_on_engines([request(n) for n in range(3)], engine)) == [200, 201, 202]
