import asyncio
import math
import pickle
import warnings
from dataclasses import replace
from fractions import Fraction
from functools import wraps

import httpx
import numpy as np
import pytest

from raypo.rewards.scoring import (
    FailedScore,
    RewardError,
    WeightedSum,
    parts_of,
    score,
    texts_of,
    too_many_failures,
)
from raypo.types import Rollout
from tests.unit.rewards.scripted_server import scripted


def rollout(response="4", label: str | None = "4", index=0):
    return Rollout(
        prompt="2+2=",
        response=response,
        prompt_ids=np.zeros(4, np.int32),
        response_ids=np.zeros(len(response), np.int32),
        log_probs=np.zeros(len(response), np.float32),
        response_mask=np.ones(len(response), bool),
        label=label,
        prompt_index=index,
        sample_index=0,
        finish_reason="stop",
        weight_version=0,
    )


ROLLOUTS = [rollout(str(number)) for number in range(4)]


def answering(answer):
    """A reward function that returns `answer` whatever it gets."""

    def my_reward(rollouts):
        return answer

    return my_reward


NAME = f"the reward function {__name__}.answering.<locals>.my_reward"


def refused(answer):
    with pytest.raises(RewardError) as error:
        score(answering(answer), ROLLOUTS)
    return str(error.value)


def test_the_function_is_called_once_with_all_rollouts_as_a_list():
    calls = []

    def my_reward(rollouts):
        calls.append(rollouts)
        return [float(r.response) for r in rollouts]

    assert score(my_reward, tuple(ROLLOUTS)) == [0.0, 1.0, 2.0, 3.0]
    assert calls == [ROLLOUTS]


def test_no_rollouts_no_call():
    assert score(answering("not called"), []) == []


def test_numbers_of_every_kind_become_floats():
    import torch

    kinds = [True, 2, np.float32(0.5), Fraction(1, 4)]
    more = [torch.tensor(1.5), torch.tensor([2.5]), np.bool_(False), np.int64(3)]
    scores = score(answering(kinds + more), ROLLOUTS * 2)

    assert scores == [1.0, 2.0, 0.5, 0.25, 1.5, 2.5, 0.0, 3.0]
    assert {type(value) for value in scores} == {float}


def test_arrays_and_tensors_are_lists():
    import pandas as pd
    import torch

    for answer in (np.arange(4.0), torch.arange(4.0), pd.Series([0, 1, 2, 3]), (0, 1, 2, 3)):
        assert score(answering(answer), ROLLOUTS) == [0, 1, 2, 3]


def test_a_client_and_a_semaphore_of_a_coroutine_function_last_from_call_to_call():
    client, few = httpx.AsyncClient(trust_env=False), asyncio.Semaphore(2)

    async def my_reward(rollouts):
        return await asyncio.gather(*map(one, rollouts))

    async def one(r):
        async with few:
            return (await client.post(url, json={"number": float(r.response)})).json()

    with scripted(lambda body, _: (200, body["number"])) as (url, _):
        for _ in range(2):
            assert score(my_reward, ROLLOUTS) == [0.0, 1.0, 2.0, 3.0]


def test_a_coroutine_function_may_call_another():
    async def one(rollouts):
        return [1.0] * len(rollouts)

    async def other(rollouts):
        return score(one, rollouts)

    assert score(other, ROLLOUTS) == [1.0] * 4


def test_a_coroutine_function_is_awaited_where_a_loop_runs_already():
    async def my_reward(rollouts):
        return [1.0] * len(rollouts)

    async def actor():
        return score(my_reward, ROLLOUTS)

    assert asyncio.run(actor()) == [1.0] * 4


@pytest.mark.parametrize("bad", [None, math.nan, math.inf, -math.inf, np.float32("nan")])
def test_what_is_not_finite_is_a_failed_sample(bad):
    scores = score(answering([1.0, bad, 1.0, 1.0]), ROLLOUTS)
    assert math.isnan(scores[1])
    assert scores[:1] + scores[2:] == [1.0] * 3


@pytest.mark.parametrize(
    "large", [10**400, -(10**4000), Fraction(10**400), 1e39, np.float64(1e300)], ids=range(5)
)
def test_a_score_that_float32_cannot_hold_is_an_error(large):
    said = refused([1.0, large, 1.0, 1.0])
    assert said.startswith(f"{NAME} returned ")
    assert said.endswith(
        "as score 1. Scores are at most 3.4e+38, the largest number of float32. Return smaller "
        "numbers, or None if there is no score."
    )
    assert "part 'a'," in refused([{"score": 1.0, "a": large}] * 4)


def test_scores_that_float32_makes_equal_are_warned_of():
    with pytest.warns(UserWarning, match=f"{NAME} returned a score above 16777216 that training"):
        score(answering([1e8, 1e8 + 1, 1e8 + 2, 0.0]), ROLLOUTS)
    with warnings.catch_warnings(action="error"):
        score(answering([1e8, -1e9, 16777217.25 - 1, 1 / 3]), ROLLOUTS)


def test_too_many_failed_samples_are_told_with_the_first_of_them():
    error = too_many_failures(2, 4, ROLLOUTS[1], name=NAME, max_failed_fraction=0.25, reason=None)
    assert str(error) == (
        f"reward.max_failed_fraction (0.25): {NAME} gave None or a number that is not finite for 2 "
        "of 4 rollouts (0.5). The first has the prompt '2+2=' and the response '1'. Correct the "
        "function, or set reward.max_failed_fraction higher so that such samples are left out."
    )


def test_a_wrong_number_of_scores_names_both_numbers():
    assert refused([1.0]) == (
        f"{NAME} returned 1 scores for 4 rollouts. Return one score per rollout, in their "
        "order, and None for a rollout without a score."
    )


@pytest.mark.parametrize(
    ("answer", "kind"),
    [(1.0, "float"), (None, "NoneType"), ("1234", "str"), ({}, "dict"), (np.float64(1), "float")],
)
def test_what_is_no_list(answer, kind):
    assert refused(answer) == f"{NAME} returned {kind}. Return a list of one score per rollout."


@pytest.mark.parametrize(
    ("bad", "shown"),
    [("good", "'good' (str)"), ([1.0], "[1.0] (list)"), ({1.0}, "{1.0} (set)")],
)
def test_what_is_no_number(bad, shown):
    assert refused([1.0, 1.0, bad, 1.0]) == (
        f"{NAME} returned {shown} as score 2. Return a number, or None if there is no score."
    )


def test_an_error_is_kept_whole():
    def my_reward(rollouts):
        raise KeyError("answer")

    with pytest.raises(RewardError) as error:
        score(my_reward, ROLLOUTS)

    name = f"the reward function {__name__}.test_an_error_is_kept_whole.<locals>.my_reward"
    assert str(error.value) == (
        f"{name} raised KeyError: 'answer' (for 4 rollouts). "
        "Correct the function; to leave single samples out, return None for them."
    )
    assert isinstance(error.value.__cause__, KeyError)
    assert error.value.__cause__.__traceback__ is not None


def test_named_parts_come_with_the_score_that_is_trained_on():
    answers = [{"score": 1.5, "right": True, "format": np.float32(0.5)}, 0.25, {"score": 2}]
    scores = score(answering(answers), [rollout(index=i) for i in range(3)])
    assert scores == [1.5, 0.25, 2.0]
    assert [parts_of(value) for value in scores] == [{"right": 1.0, "format": 0.5}, {}, {}]
    travelled = pickle.loads(pickle.dumps(scores[0]))
    assert (travelled, parts_of(travelled)) == (1.5, {"right": 1.0, "format": 0.5})


def test_a_part_that_is_missing_is_left_out_and_a_missing_score_fails():
    parts = {"score": 1.0, "right": None, "format": math.inf, "length": 3}
    (found,) = score(answering([parts]), [rollout()])
    assert parts_of(found) == {"length": 3.0}
    (found,) = score(answering([{"score": None, "a": 1, "why": "x"}]), [rollout()])
    assert math.isnan(found)
    assert (parts_of(found), texts_of(found)) == ({"a": 1.0}, {"why": "x"})
    (found,) = score(answering([{"score": ValueError("no"), "a": 1, "why": "x"}]), [rollout()])
    assert isinstance(found, FailedScore)
    assert (found.reason, parts_of(found), texts_of(found)) == ("no", {"a": 1.0}, {"why": "x"})


def test_a_failed_score_keeps_its_reason_between_processes():
    failed = pickle.loads(pickle.dumps(FailedScore("why")))
    assert np.isnan(failed)
    assert failed.reason == "why"


def test_a_sum_keeps_parts_and_texts_and_fails_where_no_function_gave_a_score():
    first = answering([{"score": 1.0, "why": "yes"}, {"score": None, "a": 1, "why": "no"}])
    total = WeightedSum([first, answering([0.5, None])], [1.0, 2.0])
    good, bad = score(total, [rollout(index=i) for i in range(2)])
    name = total.names[0]
    assert (good, texts_of(good)) == (2.0, {f"{name}/why": "yes"})
    assert math.isnan(bad)
    assert (parts_of(bad), texts_of(bad)) == ({f"{name}/a": 1.0}, {f"{name}/why": "no"})
    assert isinstance(bad, FailedScore)


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ({"right": 1.0}, "the part 'score', which is trained on, is required"),
        ({"score": 1.0, 2: 1.0}, "The names of parts must be texts"),
        ({"score": "1"}, "part 'score', returned '1'"),
        ({"score": 1.0, "right": [1]}, r"part 'right', returned \[1\]"),
    ],
)
def test_parts_that_are_none_are_refused(answer, told):
    with pytest.raises(RewardError, match=told):
        score(answering([answer]), [rollout()])


def test_a_decorated_function_gets_the_columns_that_it_names():
    def decorated(function):
        return wraps(function)(lambda *args, **keys: function(*args, **keys))

    @decorated
    def of_trl(prompts, completions, answer):
        return [float(each) for each in answer]

    @decorated
    def of_verl(data_source, solution_str, ground_truth):
        return float(solution_str == ground_truth)

    rows = [replace(each, row={"id": 7, "answer": 3}) for each in ROLLOUTS]
    assert score(of_trl, rows) == [3.0] * 4
    assert score(of_verl, [rollout("4"), rollout("5")]) == [1.0, 0.0]
