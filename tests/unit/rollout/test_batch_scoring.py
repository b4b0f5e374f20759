import math
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from raypo.config import ModelSection, RewardSection
from raypo.rewards.scoring import FailedScore, RewardError
from raypo.rollout.batch_scoring import Scorer, Scoring, source_weights
from raypo.types import Rollout
from tests.stand_ins import RewardModel


def rollouts(*labels: float) -> list[Rollout]:
    none = np.zeros(0, np.float32)
    return [
        Rollout("", "", none, none, none, none, label, 0, number, "stop", 0)
        for number, label in enumerate(labels)
    ]


def model(factor: float) -> RewardModel:
    return RewardModel(lambda given: [factor * r.label for r in given])


def judges(**changes) -> Scorer:
    values = {
        "function": lambda given: [1.0] * len(given),
        "models": (model(10.0), model(100.0)),
        "reward": RewardSection.model_validate({"weights": {"function": 3.0, "model": 2.0}}),
        "model": ModelSection.model_validate(
            {"policy": "p", "reward": ["a", {"path": "b", "weight": 0.5}]}
        ),
    } | changes
    weights = source_weights(values["reward"], values["model"])
    return Scorer(values["function"], values["models"], weights)


def by_source(scorer: Scorer, given: list[Rollout]) -> list[dict[str, float]]:
    return [dict(each.scores_by_source) for each in scorer.score(given)]


def test_sources_add_by_their_weights():
    judge = judges()
    (source,) = by_source(judge, rollouts(4.0))
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
    assert by_source(judge, rollouts(4.0, 5.0)) == [{"model": 4.0}, {"model": 5.0}]


def test_a_source_that_failed_makes_the_score_nan():
    assert math.isnan(judges().total({"function": math.nan, "model_0": 1.0, "model_1": 1.0}))


def test_a_sum_that_float32_cannot_hold_makes_the_score_nan():
    assert math.isnan(judges().total({"function": 3e38, "model_0": 3e38, "model_1": 0.0}))


def test_nothing_to_judge_asks_nobody():
    broken = RewardModel(lambda given: pytest.fail("asked"))
    assert judges(models=(broken, broken)).score([]) == []


def test_servers_are_asked_while_the_function_works_and_add_by_their_weight():
    both = threading.Barrier(2, timeout=10)

    def function(given):
        both.wait()
        return [1.0] * len(given)

    def servers(given):
        both.wait()  # breaks unless both are called at the same time
        return [r.label for r in given[:1]] + [TimeoutError("no answer in 1 s")]

    reward = RewardSection.model_validate({"url": "http://a/score", "weights": {"url": 0.5}})
    weights = source_weights(reward, ModelSection(policy="p"))
    judge = Scorer(function, (), weights, {"url": servers})
    first, second = by_source(judge, rollouts(4.0, 5.0))
    assert first == {"function": 1.0, "url": 4.0}
    assert judge.total(first) == 1.0 + 0.5 * 4.0
    assert judge.model_total(first) == 0.0
    assert math.isnan(judge.total(second))
    failed = second["url"]
    assert isinstance(failed, FailedScore)
    assert failed.reason == "no answer in 1 s"


def draws(*sizes: int) -> list[list[Rollout]]:
    """Of each draw its rollouts, all labels different."""
    numbers = iter(range(100))
    return [
        [
            replace(rollouts(float(next(numbers)))[0], group_index=draw, sample_index=n)
            for n in range(size)
        ]
        for draw, size in enumerate(sizes)
    ]


def test_who_is_apart_judges_a_draw_while_others_are_sampled_and_whoever_is_not_sees_all():
    asked: dict[str, list[list[float]]] = {"function": [], "url": [], "model": []}
    first_is_judged = threading.Event()

    def says(name: str) -> Callable[[list[Rollout]], list[float]]:
        def judge(given: list[Rollout]) -> list[float]:
            asked[name].append([each.label for each in given])
            if name == "url":
                first_is_judged.set()
            return [each.label for each in given]

        return judge

    judge = Scorer(
        says("function"), (RewardModel(says("model")),), {}, {"url": says("url")}, models_apart=True
    )
    groups = draws(2, 1, 2)
    scoring = Scoring(judge)
    assert scoring.scores_early
    scoring.add(groups[1])
    scoring.add(groups[1])
    assert first_is_judged.wait(10)
    assert asked["function"] == []
    everything = [rollout for group in groups for rollout in group]
    scored = scoring.results(everything)
    assert [each.key for each in scored] == [each.key for each in everything]
    assert [each.score for each in scored] == [3 * each.label for each in everything]
    assert asked["function"] == [[0.0, 1.0, 2.0, 3.0, 4.0]]
    assert asked["url"] == [[2.0], [0.0, 1.0, 3.0, 4.0]]
    assert sorted(asked["model"]) == [[0.0, 1.0], [2.0], [3.0, 4.0]], "whatever came when"


def test_models_beside_the_learner_are_asked_when_all_is_sampled():
    model = RewardModel(lambda given: [float(len(given))] * len(given))
    scoring = Scoring(Scorer(None, (model,), {}))
    assert not scoring.scores_early
    groups = draws(2, 2)
    scoring.add(groups[1])
    assert [each.score for each in scoring.results([*groups[0], *groups[1]])] == [4.0] * 4


def test_a_function_with_processes_is_called_by_as_many_threads_and_its_error_is_told():
    together = threading.Barrier(2, timeout=10)

    def function(given: list[Rollout]) -> list[float]:
        together.wait()
        if given[0].group_index == 1:
            raise ValueError("no")
        return [1.0] * len(given)

    scoring = Scoring(Scorer(function, (), {}, processes=2))
    groups = draws(1, 1)
    for group in groups:
        scoring.add(group)
        time.sleep(0.02)
    with pytest.raises(RewardError, match="raised ValueError: no"):
        scoring.results([*groups[0], *groups[1]])
