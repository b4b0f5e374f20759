"""Environments in processes: what goes wrong in one costs one episode, and no other."""

from __future__ import annotations

import re

import pytest
from transformers import AutoTokenizer

from raypo.rollout.batch_scoring import Scorer
from raypo.rollout.collect import is_trainable
from tests.tiny import tiny_tokenizer
from tests.unit.rollout.test_episodes import played

CLASSES = "tests.unit.rollout.pooled"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return AutoTokenizer.from_pretrained(tiny_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def test_what_goes_wrong_in_a_process_costs_its_episode_and_says_so(tokenizer):
    reasons = {
        "hang": "TimeoutError: step gave no answer in 1 s (rollout.step_timeout_s)",
        "die": "RuntimeError: step: its process died with status 7",
        "end": "SystemExit: 3",
        "lock": "TypeError: with rollout.environment_processes an environment is pickled, but this",
        "answer": "TypeError: with rollout.environment_processes what it returns is pickled, but t",
        "late": "TimeoutError: no server",
        "odd": "Odd: 1 and 2",
    }
    labels = ("good", *reasons, "good")
    rollouts = played(
        tokenizer,
        labels=labels,
        samples=1,
        environment=f"{CLASSES}:Wrong",
        environment_processes=2,
        step_timeout_s=1,
    )
    scored = Scorer(None, (), {}).score(rollouts)
    assert [is_trainable(each) for each in scored] == [label == "good" for label in labels]
    for label, each in zip(labels, rollouts, strict=True):
        assert each.episode is not None
        assert (each.episode.error or "").startswith(reasons.get(label, ""))
        assert each.episode.error is not None or label == "good"


def test_what_a_module_keeps_for_its_coroutines_lasts_from_step_to_step(tokenizer):
    keys = {"environment": f"{CLASSES}:Keeps", "environment_processes": 1}
    (each,) = played(tokenizer, labels=("",), samples=1, **keys)
    assert each.episode is not None
    assert (each.episode.error, each.episode.num_turns) == (None, 3)


def test_an_environment_is_closed_as_its_last_turn_left_it(tokenizer, tmp_path):
    log = tmp_path / "closed"
    played(
        tokenizer,
        labels=(str(log),),
        samples=3,
        environment=f"{CLASSES}:Closes",
        environment_processes=2,
    )
    assert log.read_text() == "3 3 3 "


@pytest.mark.parametrize(("name", "turns"), [("ClosesUnmade", "0 "), ("ClosesHalfway", "2 ")])
def test_an_environment_that_fails_is_closed_as_it_has_left_itself(
    tokenizer, tmp_path, name, turns
):
    log = tmp_path / "closed"
    keys = {"environment": f"{CLASSES}:{name}", "environment_processes": 1}
    (each,) = played(tokenizer, labels=(str(log),), samples=1, **keys)
    assert each.episode is not None
    assert re.fullmatch(
        r"OSError: it does not answer \(File .*pooled.py\", line \d+, in (reset|step)\)",
        each.episode.error or "",
    )
    assert log.read_text() == turns
