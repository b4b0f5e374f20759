"""Answers from before the first update: who makes them, who waits, and what they depend on."""

import threading
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
    monkeypatch.setattr(first_answers, "LOOK_EVERY_S", 0.01)
    return gone


def claim(answers: FirstAnswers, maker: Any, *, count: int = 1) -> bool:
    return answers.claim("key", count, maker)


def test_the_first_makes_them_and_the_others_wait_for_all_shares(dead: set[str]):
    answers = FirstAnswers()
    assert not claim(answers, "one", count=2)
    heard: list[bool] = []
    waiting = threading.Thread(target=lambda: heard.append(claim(answers, "two", count=2)))
    waiting.start()
    answers.put("key", 1, [])
    waiting.join(0.1)
    assert not heard
    answers.put("key", 0, [ANSWER])
    waiting.join(10)
    assert heard == [True]
    assert answers.get("key", 0) == [ANSWER]
    assert not answers.claim("another key", 1, "three")  # pyright: ignore[reportArgumentType]


def test_another_makes_them_where_the_first_has_died(dead: set[str]):
    answers = FirstAnswers()
    assert not claim(answers, "one")
    dead.add("one")
    assert not claim(answers, "two")
    answers.put("key", 0, [ANSWER])
    assert claim(answers, "three")


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
