"""A worker that is left without an engine takes all workers into one more push."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch

from raypo.cluster.actors import NoReplicaLeft
from raypo.collectives import Workers
from raypo.rollout.collect import PushAgain, Sampler, Sampling
from raypo.run.services import own_engines
from raypo.serving.requests import Completion, SamplingRequest
from raypo.types import Prompt
from tests.stand_ins import Engine, Lossy

DRAW = Prompt(0, "1+1=", np.array([3], dtype=np.int32), group_index=0)
SAMPLING = Sampling(1, 1, temperature=1.0, top_p=1.0, stop_token_ids=(), seed=0)
TOKENIZER = Lossy()


class Pushed(Engine):
    """Answers with how often it was pushed to; refuses until that is often enough."""

    def __init__(self, serves_from: int) -> None:
        super().__init__(self._answer)
        self.serves_from, self.pushes, self.calls = serves_from, 0, 0

    def _answer(self, requests: list[SamplingRequest]) -> list[Completion]:
        self.calls += 1
        if self.pushes < self.serves_from:
            raise NoReplicaLeft("nobody")
        row = np.zeros(1, dtype=np.float32)
        return [Completion(row.astype(np.int32), row, "length", self.pushes)]

    def push(self) -> None:
        self.pushes += 1


@dataclass(frozen=True)
class Together(Workers):
    """This worker, and as many others that are left without an engine until the push."""

    others_lost: int = 0
    sums: list[int] = field(default_factory=list)

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        self.sums.append(int(values))
        return values + (self.others_lost if len(self.sums) == 1 else 0)


def answers(engine: Pushed, workers: Workers, draws: list[Prompt] | None = None) -> list[int]:
    again = PushAgain(engine.push, workers)
    given = [DRAW] if draws is None else draws
    return [r.weight_version for r in Sampler(engine, TOKENIZER, SAMPLING, again).sample(given)]


def test_where_nobody_lost_an_engine_nothing_is_pushed():
    engine = Pushed(serves_from=0)
    assert answers(engine, Together(others_lost=0)) == [0]
    assert (engine.pushes, engine.calls) == (0, 1)


def test_who_lost_it_asks_again_after_the_push():
    engine = Pushed(serves_from=1)
    assert answers(engine, Together(others_lost=0)) == [1]
    assert (engine.pushes, engine.calls) == (1, 2)


def test_where_the_push_was_in_vain_there_is_another():
    engine = Pushed(serves_from=2)
    assert answers(engine, Together(others_lost=0)) == [2]
    assert (engine.pushes, engine.calls) == (2, 3)


def test_who_has_his_answers_joins_the_push_and_keeps_them():
    engine = Pushed(serves_from=0)
    assert answers(engine, Together(others_lost=1)) == [0]
    assert (engine.pushes, engine.calls) == (1, 1)


def test_who_has_no_prompts_joins_the_push():
    engine = Pushed(serves_from=0)
    assert answers(engine, Together(others_lost=1), draws=[]) == []
    assert (engine.pushes, engine.calls) == (1, 0)


def test_without_other_workers_to_ask_the_loss_is_told():
    with pytest.raises(NoReplicaLeft):
        Sampler(Pushed(serves_from=1), TOKENIZER, SAMPLING).sample([DRAW])


def test_several_engines_of_one_worker_get_an_equal_lot_each():
    """The answers come in the order of the prompts."""
    draws = [replace(DRAW, group_index=number) for number in range(5)]
    asked: list[tuple[int, int]] = []

    def one(number: int) -> Engine:
        def answers(requests: list[SamplingRequest]) -> list[Completion]:
            asked.append((number, len(requests)))
            row = np.array([number], dtype=np.int32)
            return [Completion(row, row.astype(np.float32), "length", number)] * len(requests)

        return Engine(answers)

    class Three(Engine):
        def per_engine(self) -> list[Engine]:
            return [one(0), one(1), one(2)]

    engine = Three(lambda requests: pytest.fail("one of the three is asked"))
    rollouts = Sampler(engine, TOKENIZER, SAMPLING).sample(draws)
    assert asked == [(0, 2), (1, 2), (2, 1)]
    assert [rollout.weight_version for rollout in rollouts] == [0, 0, 1, 1, 2]
    asked.clear()
    assert len(Sampler(engine, TOKENIZER, SAMPLING).sample(draws[:1])) == 1
    assert asked == [(0, 1)]


def test_each_engine_belongs_to_a_worker_and_each_worker_has_one():
    def of(rank: int, workers: int, engines: int) -> list[int]:
        return own_engines(Workers(rank, workers), engines)

    assert [of(rank, 4, 2) for rank in range(4)] == [[0], [1], [0], [1]]
    assert [of(rank, 2, 5) for rank in range(2)] == [[0, 2, 4], [1, 3]]
    assert of(0, 1, 1) == [0]


@pytest.mark.parametrize(("workers", "engines"), [(5, 4), (6, 4), (3, 2), (4, 3), (8, 4)])
def test_engines_have_the_same_to_do_whatever_the_number_of_workers(workers: int, engines: int):
    """With a critic on workers of its own there are more workers than engines."""
    asked = [own_engines(Workers(rank, workers), engines) for rank in range(workers)]
    of_each = [
        sum(1 / len(own) for own in asked if number in own) / workers for number in range(engines)
    ]
    assert of_each == pytest.approx([1 / engines] * engines)
