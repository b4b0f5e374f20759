"""The arithmetic example's tasks, tokens and run files."""

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from examples.arithmetic.make_data import draw_tasks, make_tokenizer
from raypo.config import PPOConfig, SFTConfig
from raypo.rewards.verifiers import number_answer
from raypo.types import Rollout

ARITHMETIC = Path(__file__).parents[2] / "examples" / "arithmetic"


@pytest.fixture(scope="module")
def tasks() -> list[dict[str, str]]:
    return list(draw_tasks(random.Random(0), 200, without=set()).values())


def test_every_answer_is_right_and_in_the_form_of_gsm8k(tasks):
    for task in tasks:
        working, result = task["answer"].split("\n#### ")
        assert eval(working.replace("=", "==")), task
        assert working.endswith(f"={result}")
        numbers = {word.strip(".") for word in task["question"].split() if word[0].isdigit()}
        assert numbers == set(working.partition("=")[0].replace("-", "+").split("+"))


def test_the_verifier_accepts_the_answers_of_the_data(tasks):
    blank = np.zeros(1, np.int32)
    rollout = Rollout("", "", blank, blank, blank, blank, "", 0, 0, "stop", 0)
    right = [replace(rollout, response=t["answer"], label=t["answer"]) for t in tasks]
    assert number_answer(right) == [1.0] * len(tasks)


def test_tokens_give_the_text_back_within_the_lengths_of_the_run_files(tasks):
    tokenizer = make_tokenizer()
    for task, limit in (
        (t[key], n) for t in tasks for key, n in (("question", 32), ("answer", 19))
    ):
        ids = tokenizer(task)["input_ids"]
        assert tokenizer.decode(ids) == task
        assert tokenizer.pad_token_id not in ids
        assert len(ids) <= limit


@pytest.mark.parametrize(("name", "kind"), [("sft", SFTConfig), ("grpo", PPOConfig)])
def test_run_files_evaluate_pass_at_1_and_8(name, kind):
    config = kind.load(ARITHMETIC / f"{name}.yaml")
    assert config.eval.pass_at == (1, 8)
