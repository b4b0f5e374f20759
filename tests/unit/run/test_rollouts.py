"""Batches that all workers get from the first one, and the push that all of them repeat."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from raypo.cluster.actors import NoReplicaLeft
from raypo.collectives import Workers
from raypo.metrics.clock import Clock
from raypo.rollout.engines import PolicyEngines, Pushes
from raypo.rollout.step_batch import StepBatch
from raypo.run.phases import Phase
from raypo.run.rollouts import Rollouts
from raypo.serving.requests import Completion, SamplingRequest
from tests.stand_ins import Engine
from tests.unit.learner.plain import on_workers


@dataclass
class Weights:
    """Pushes that count themselves."""

    roles: Any = None
    pushes: Pushes = field(default_factory=Pushes)
    count: int = 0

    def push_again(self) -> None:
        with self.pushes.push():
            self.count += 1


class Controller:
    """A controller whose batch needs a completion of an engine that has lost its weights."""

    def __init__(self, weights: Weights, phases: Any) -> None:
        self.weights, self.phases = weights, phases

    def take(self, step: int) -> Future[Any]:
        self.phases.now = Phase.SCORE
        return self._answer(StepBatch([], [], 0, {"rollout/refills": 1.0}))

    def settle(self) -> Future[Any]:
        return self._answer(None)

    def _answer(self, value: Any) -> Future[Any]:
        def sample(requests: list[SamplingRequest]) -> list[Completion]:
            if self.weights.count < 2:
                raise NoReplicaLeft("no engine holds the weights")
            return [Completion(np.zeros(1, np.int32), np.zeros(1, np.float32), "stop", 0)]

        @dataclass
        class Later(Engine):
            def generate(self, requests: Any, on_completion: Any = None) -> Any:
                answer: Future[Any] = Future()
                try:
                    answer.set_result(self.answers(list(requests)))
                except NoReplicaLeft as error:
                    answer.set_exception(error)
                return answer

        engines = PolicyEngines(Later(sample), self.weights.pushes)  # type: ignore[arg-type]
        made: Future[Any] = Future()
        request = SamplingRequest(np.array([5], np.int32), 1, 1.0, seed=0)
        engines.generate([request]).add_done_callback(lambda _: made.set_result(value))
        return made


def rollouts_of(workers: Workers, *, mode: str) -> tuple[Rollouts, Weights, Any]:
    weights = Weights()
    phases: Any = SimpleNamespace(now=Phase.LEARN, entered=[])  # after a checkpoint
    phases.enter = phases.entered.append
    config = SimpleNamespace(rollout=SimpleNamespace(mode=mode))
    run: Any = SimpleNamespace(workers=workers, config=config)
    inputs: Any = SimpleNamespace(rollouts=None)
    rollouts = Rollouts(run, None, inputs, None, phases, weights)  # type: ignore[arg-type]
    if workers.rank == 0:
        rollouts._controller = Controller(weights, phases)  # type: ignore[assignment]
    return rollouts, weights, phases


@pytest.mark.parametrize("num_workers", [1, 2])
def test_all_workers_push_again_until_the_batch_is_complete(num_workers: int):
    def take(workers: Workers) -> tuple[int, Phase, dict[str, float]]:
        rollouts, weights, phases = rollouts_of(workers, mode="sync")
        batch = rollouts.take(1, Clock())
        assert phases.entered == [Phase.GENERATE], "after a checkpoint, learners hold memory"
        return weights.count, phases.now, batch.metrics

    told = on_workers(num_workers, take)
    assert [count for count, _, _ in told] == [2] * num_workers
    assert {phase for _, phase, _ in told} == {Phase.SCORE}
    assert [metrics for *_, metrics in told] == [{"rollout/refills": 1.0}, {}][:num_workers]


def test_after_an_update_the_weights_of_the_last_push_are_gone():
    rollouts, _, _ = rollouts_of(Workers(), mode="one_step_off")
    with pytest.raises(NoReplicaLeft, match="no engine holds the weights"):
        rollouts.settle()
