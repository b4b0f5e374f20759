"""A worker that is left without an engine takes all workers into one more push."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from raypo.cluster.actors import NoReplicaLeft
from raypo.data.stream import Draw
from raypo.rollout.collect import PushAgain, Sampling, sample
from raypo.serving.sampling import Completion
from raypo.types import Prompt

DRAW = Draw(0, Prompt("1+1=", np.array([3], dtype=np.int32), 0))
SAMPLING = Sampling(1, 1, temperature=1.0, top_p=1.0, stop_token_ids=(), seed=0)
TOKENIZER = SimpleNamespace(batch_decode=lambda rows, **_: ["" for _ in rows])


class Engine:
    """Answers with how often it was pushed to; refuses until that is often enough."""

    def __init__(self, serves_from: int) -> None:
        self.serves_from, self.pushes, self.calls = serves_from, 0, 0
        self.generate = SimpleNamespace(remote=lambda requests: self)

    def result(self) -> list[Completion]:
        self.calls += 1
        if self.pushes < self.serves_from:
            raise NoReplicaLeft("nobody")
        row = np.zeros(1, dtype=np.float32)
        return [Completion(row.astype(np.int32), row, "length", self.pushes)]

    def push(self) -> None:
        self.pushes += 1


class Together:
    """This worker, and as many others that are left without an engine."""

    def __init__(self, others_lost: int) -> None:
        self._others_lost = others_lost

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        return values + self._others_lost


def answers(engine: Engine, workers: Any, draws: list[Draw] | None = None) -> list[int]:
    again = PushAgain(engine.push, workers)
    given = [DRAW] if draws is None else draws
    return [r.weight_version for r in sample(given, engine, TOKENIZER, SAMPLING, again)]


def test_where_nobody_lost_an_engine_nothing_is_pushed():
    engine = Engine(serves_from=0)
    assert answers(engine, Together(0)) == [0]
    assert (engine.pushes, engine.calls) == (0, 1)


def test_who_lost_it_asks_again_after_the_push():
    engine = Engine(serves_from=1)
    assert answers(engine, Together(0)) == [1]
    assert (engine.pushes, engine.calls) == (1, 2)


def test_who_has_his_answers_joins_the_push_and_keeps_them():
    engine = Engine(serves_from=0)
    assert answers(engine, Together(1)) == [0]
    assert (engine.pushes, engine.calls) == (1, 1)


def test_who_has_no_prompts_joins_the_push():
    engine = Engine(serves_from=0)
    assert answers(engine, Together(1), draws=[]) == []
    assert (engine.pushes, engine.calls) == (1, 0)


def test_without_other_workers_to_ask_the_loss_is_told():
    with pytest.raises(NoReplicaLeft):
        sample([DRAW], Engine(serves_from=1), TOKENIZER, SAMPLING)
