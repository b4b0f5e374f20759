"""The code example: its tasks, and its reward, which really runs what is written."""

import asyncio
import json
import random
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from examples.code import reward
from examples.code.make_data import (
    FIRST,
    INPUTS,
    NUM_EVAL,
    NUMBERS,
    SECOND,
    main,
    make_task,
    make_tokenizer,
    with_bug,
)
from examples.code.reward import hidden_tests
from raypo import PPOConfig, Rollout, SFTConfig

CODE = Path(__file__).parents[2] / "examples" / "code"
TASK = make_task("product", "a", "plus", 2)
PATIENCE_S = 60.0
"""Time limit of programs that end, in seconds, on a machine that is busy with other tests."""


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reward, "LIMIT_S", PATIENCE_S)


pytestmark = pytest.mark.usefixtures("python_sandbox")


def judged(*responses: str) -> list[dict[str, float]]:
    blank = np.zeros(1, np.int32)
    rollouts = [
        Rollout("", body, blank, blank, blank, blank, TASK["tests"], 0, 0, "stop", 0)
        for body in responses
    ]
    return asyncio.run(hidden_tests(rollouts))


def test_other_code_that_gives_the_same_is_as_right():
    right = {"score": 1.0, "solved": 1.0, "runs": 1.0}
    assert judged("a*b+2", "2+b*a", "a*b+2") == [right] * 3


def test_what_gives_something_else_runs_and_does_not_solve():
    (some,) = judged("a*b+2*(a==20)")
    assert some == {"score": 0.25, "solved": 0.0, "runs": 1.0}


@pytest.mark.parametrize("body", ["a*", "c", "a//0", "exit()"])
def test_what_does_not_run_gets_nothing(body):
    assert judged(body) == [{"score": 0.0, "solved": 0.0, "runs": 0.0}]


def test_a_program_that_the_clock_has_ended_is_run_again(monkeypatch):
    monkeypatch.setattr(reward, "LIMIT_S", 0.0)
    assert judged("a*b+2+0") == [{"score": 0.0, "solved": 0.0, "runs": 0.0}]
    monkeypatch.setattr(reward, "LIMIT_S", PATIENCE_S)
    assert judged("a*b+2+0") == [{"score": 1.0, "solved": 1.0, "runs": 1.0}]


def test_a_program_that_prints_on_its_own_has_not_passed():
    (cheat,) = judged("print('passed') or a*b+2")
    assert cheat == {"score": 0.0, "solved": 0.0, "runs": 0.0}


def test_bugs_are_programs_that_run_and_most_are_wrong():
    draw = random.Random(0)
    tasks = [make_task(*each) for each in product(FIRST, "ab", SECOND, NUMBERS)]
    bugs = [with_bug(task["body"], draw) for task in tasks]
    right = [outputs_of(bug) == task["tests"] for bug, task in zip(bugs, tasks, strict=True)]
    assert 0.1 < sum(right) / len(right) < 0.6


def outputs_of(body: str) -> list[list[int]]:
    return [[a, b, eval(body, {"a": a, "b": b})] for a, b in INPUTS]


def test_tasks_are_python_and_fit_the_run_files():
    tokenizer = make_tokenizer()
    sft, ppo = SFTConfig.load(CODE / "sft.yaml"), PPOConfig.load(CODE / "ppo.yaml")
    assert ppo.model.policy == f"runs/{sft.name}/policy"
    for task in (make_task(*each) for each in product(FIRST, "ab", SECOND, NUMBERS)):
        names: dict = {}
        exec(task["prompt"] + task["body"], names)
        assert [[*each, names["f"](*each)] for each in INPUTS] == task["tests"]
        ids = tokenizer(task["prompt"])["input_ids"]
        assert tokenizer.decode(ids) == task["prompt"]
        assert len(ids) <= ppo.data.max_prompt_tokens
        assert len(tokenizer(task["body"])["input_ids"]) < ppo.rollout.max_new_tokens


def test_only_the_held_out_tasks_are_not_trained(tmp_path: Path):
    main(tmp_path)
    prompts = {}
    for name in ("demonstrations", "prompts", "eval"):
        lines = (tmp_path / f"{name}.jsonl").read_text().splitlines()
        prompts[name] = {json.loads(line)["prompt"] for line in lines}
    assert prompts["demonstrations"] == prompts["prompts"]
    assert len(prompts["eval"]) == NUM_EVAL
    assert not prompts["eval"] & prompts["prompts"]
