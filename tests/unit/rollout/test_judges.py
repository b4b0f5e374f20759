import math
import threading

import numpy as np
import pytest

from raypo.calls import Here
from raypo.config import ModelSection, RewardSection
from raypo.rewards.scoring import FailedScore
from raypo.rollout.judges import Judges
from raypo.types import Rollout
from tests.stand_ins import RewardModel


def rollouts(*labels: float) -> list[Rollout]:
    none = np.zeros(0, np.float32)
    return [
        Rollout("", "", none, none, none, none, label, 0, number, "stop", 0)
        for number, label in enumerate(labels)
    ]


def model(factor: float) -> RewardModel:
    return RewardModel(Here(lambda given: [factor * r.label for r in given]))


def judges(**changes) -> Judges:
    values = {
        "function": lambda given: [1.0] * len(given),
        "models": (model(10.0), model(100.0)),
        "reward": RewardSection.model_validate({"weights": {"function": 3.0, "model": 2.0}}),
        "model": ModelSection.model_validate(
            {"policy": "p", "reward": ["a", {"path": "b", "weight": 0.5}]}
        ),
    } | changes
    return Judges.of(
        values["function"], values["models"], reward=values["reward"], model=values["model"]
    )


def test_sources_add_by_their_weights():
    judge = judges()
    (source,) = judge.scores_by_source(rollouts(4.0))
    assert source == {"function": 1.0, "model_0": 40.0, "model_1": 400.0}
    assert judge.total(source) == 3.0 * 1.0 + 2.0 * (40.0 + 0.5 * 400.0)
    assert judge.model_total(source) == 2.0 * (40.0 + 0.5 * 400.0)


def test_one_model_alone_is_called_model():
    judge = judges(
        function=None,
        models=(model(1.0),),
        model=ModelSection.model_validate({"policy": "p", "reward": "a"}),
        reward=RewardSection(),
    )
    assert judge.scores_by_source(rollouts(4.0, 5.0)) == [{"model": 4.0}, {"model": 5.0}]


def test_a_source_that_failed_makes_the_score_nan():
    assert math.isnan(judges().total({"function": math.nan, "model_0": 1.0, "model_1": 1.0}))


def test_nothing_to_judge_asks_nobody():
    broken = RewardModel(Here(lambda given: pytest.fail("asked")))
    assert judges(models=(broken, broken)).scores_by_source([]) == []


def test_servers_are_asked_while_the_function_works_and_add_by_their_weight():
    both = threading.Barrier(2, timeout=10)

    def function(given):
        both.wait()
        return [1.0] * len(given)

    def servers(given):
        both.wait()  # breaks unless both are called at the same time
        return [r.label for r in given[:1]] + [TimeoutError("no answer in 1 s")]

    reward = RewardSection.model_validate({"url": "http://a/score", "weights": {"url": 0.5}})
    judge = Judges.of(function, (), reward=reward, model=ModelSection(policy="p"), servers=servers)
    first, second = judge.scores_by_source(rollouts(4.0, 5.0))
    assert first == {"function": 1.0, "url": 4.0}
    assert judge.total(first) == 1.0 + 0.5 * 4.0
    assert judge.model_total(first) == 0.0
    assert math.isnan(judge.total(second))
    failed = second["url"]
    assert isinstance(failed, FailedScore)
    assert failed.reason == "no answer in 1 s"
