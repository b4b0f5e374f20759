import math
from typing import Any

import numpy as np
import pytest

from raypo.run.callbacks import CallbackError, StepView, ask_callbacks, by_name

VIEW = StepView(7, {"rollout/score_mean": 0.5}, [])


def ask(*callbacks: Any) -> dict[str, float]:
    return ask_callbacks({f"mine.py:{n}": each for n, each in enumerate(callbacks)}, VIEW)


def test_what_callbacks_return_becomes_metrics():
    def twice(step: StepView) -> dict[str, float]:
        return {"mine/twice": 2 * step.metrics["rollout/score_mean"], "mine/step": step.step}

    assert ask(twice, lambda step: None, lambda step: {"mine/right": np.bool_(True)}) == {
        "mine/twice": 1.0,
        "mine/step": 7.0,
        "mine/right": 1.0,
    }
    assert math.isnan(ask(lambda step: {"mine/unknown": None})["mine/unknown"])


@pytest.mark.parametrize(
    ("callbacks", "told"),
    [
        ([lambda step: [1.0]], r"callbacks \(mine.py:0\) returned list. Return metrics by name"),
        ([lambda step: {"rollout/score_mean": 1.0}], "a metric with this name exists already"),
        ([lambda step: {"a": 1}, lambda step: {"a": 1}], r"\(mine.py:1\) returned 'a': a metric"),
        ([lambda step: {3: 1.0}], "returned 3: a name must be a text"),
        ([lambda step: {"a": "high"}], r"returned a: 'high' \(str\)\. Metrics must be numbers"),
        ([lambda step: step.rollouts[0]], r"raised IndexError: .* \(step 7\)"),
    ],
)
def test_what_is_no_metric_is_refused_by_the_callbacks_name(callbacks: list, told: str):
    with pytest.raises(CallbackError, match=told):
        ask(*callbacks)


def test_callbacks_of_one_name_are_all_called():
    made = [lambda step, n=n: {f"mine/{n}": n} for n in range(3)]
    callbacks = by_name(made)
    assert [name.rpartition("<lambda>")[2] for name in callbacks] == ["", " (2)", " (3)"]
    assert ask_callbacks(callbacks, VIEW) == {"mine/0": 0.0, "mine/1": 1.0, "mine/2": 2.0}
