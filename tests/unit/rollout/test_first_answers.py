"""Answers from before the first update: who makes them, who waits, and what they depend on."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from raypo.config import PPOConfig
from raypo.rollout import first_answers
from raypo.rollout.first_answers import FirstAnswers, digest, made_from
from raypo.serving.requests import Completion, SamplingRequest

REQUEST = SamplingRequest(np.array([5, 6], np.int32), max_new_tokens=4, temperature=1.0, seed=3)
ANSWER = Completion(np.array([7], np.int32), np.array([-0.5], np.float32), "stop", 0)
CONFIG: dict[str, Any] = {"name": "r", "model": {"policy": "p"}, "data": {"prompts": "d"}}


@pytest.fixture
def dead(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    gone: set[str] = set()
    monkeypatch.setattr(first_answers, "is_alive", lambda maker: maker not in gone)
    return gone


def find(answers: FirstAnswers, worker: Any) -> list[Completion] | str:
    return answers.find("key", worker)


def test_the_first_makes_them_and_the_others_wait(dead: set[str]):
    answers = FirstAnswers()
    assert find(answers, "one") == "make"
    assert find(answers, "two") == "wait"
    assert answers.find("another key", "three") == "make"  # pyright: ignore[reportArgumentType]
    answers.put("key", [ANSWER])
    assert find(answers, "two") == [ANSWER]


def test_no_requests_have_an_answer_too(dead: set[str]):
    answers = FirstAnswers()
    assert find(answers, "one") == "make"
    answers.put("key", [])
    assert find(answers, "two") == []


def test_another_makes_them_where_the_first_has_died_or_failed(dead: set[str]):
    answers = FirstAnswers()
    assert find(answers, "one") == "make"
    dead.add("one")
    assert find(answers, "two") == "make"
    answers.put("key", None)
    assert find(answers, "three") == "make"
    answers.put("key", [ANSWER])
    assert find(answers, "four") == [ANSWER]


@pytest.mark.parametrize(
    "changes",
    [
        {"seed": 4},
        {"temperature": 0.5},
        {"max_new_tokens": 5},
        {"top_p": 0.9},
        {"stop_token_ids": (2,)},
        {"prompt_ids": np.array([5, 7], np.int32)},
    ],
)
def test_whatever_changes_an_answer_changes_the_digest(changes: dict[str, Any]):
    assert digest([replace(REQUEST, **changes)]) != digest([REQUEST])
    assert digest([REQUEST, REQUEST]) != digest([REQUEST])


def test_an_adapter_does_not_for_it_begins_as_nothing():
    assert digest([replace(REQUEST, adapter="trial-3")]) == digest([REQUEST])


def test_engines_are_made_from_model_dtype_and_their_own_section():
    same = PPOConfig.parse(CONFIG | {"ppo": {"kl": {"coef": 0.5}}, "seed": 7})
    assert made_from(same) == made_from(PPOConfig.parse(CONFIG))
    for changes in (
        {"model": {"policy": "q"}},
        {"model": {"policy": "p", "dtype": "bfloat16"}},
        {"rollout": {"engine": {"prefix_caching": False}}},
    ):
        assert made_from(PPOConfig.parse(CONFIG | changes)) != made_from(same)
