"""The code example: its tasks, and its reward, which really runs what is written."""

import asyncio
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest

from examples.code.make_data import SHOWN, bodies, make_task, make_tokenizer
from examples.code.reward import INPUTS, hidden_tests
from raypo import PPOConfig, Rollout, SFTConfig
from raypo.tools.sandbox import PythonSandbox, SandboxError

CODE = Path(__file__).parents[2] / "examples" / "code"
TASK = make_task("a*b+1", SHOWN)


@pytest.fixture(autouse=True, scope="module")
def _needs_namespaces() -> None:
    try:
        asyncio.run(PythonSandbox().run(""))
    except SandboxError as error:
        pytest.skip(str(error))


def judged(*responses: str) -> list[dict[str, float]]:
    blank = np.zeros(1, np.int32)
    rollouts = [
        Rollout("", body, blank, blank, blank, blank, TASK["tests"], 0, 0, "stop", 0)
        for body in responses
    ]
    return asyncio.run(hidden_tests(rollouts))


def test_other_code_that_gives_the_same_is_as_right():
    right = {"score": 1.0, "solved": 1.0, "runs": 1.0}
    assert judged("a*b+1", "1+b*a", "a*b+1") == [right] * 3


def test_what_gives_something_else_runs_and_does_not_solve():
    (some,) = judged("a*b+(a==20)")
    assert some == {"score": 0.25, "solved": 0.0, "runs": 1.0}


@pytest.mark.parametrize("body", ["a*", "c", "a//0", "exit()"])
def test_what_does_not_run_gets_nothing(body):
    assert judged(body) == [{"score": 0.0, "solved": 0.0, "runs": 0.0}]


def test_a_program_that_prints_on_its_own_has_not_passed():
    (cheat,) = judged("print('passed') or a*b+1")
    assert cheat == {"score": 0.0, "solved": 0.0, "runs": 0.0}


def test_bodies_give_different_outputs_on_the_hidden_inputs():
    every = bodies()
    outputs = {tuple(make_task(body, ())["tests"]) for body in every}
    assert len(outputs) == len(every) == 25


def test_tasks_are_python_and_fit_the_run_files():
    tokenizer = make_tokenizer()
    sft, ppo = SFTConfig.load(CODE / "sft.yaml"), PPOConfig.load(CODE / "ppo.yaml")
    assert ppo.model.policy == f"runs/{sft.name}/policy"
    for task in (make_task(body, each) for body in bodies() for each in permutations(SHOWN, 3)):
        *asserts, begin = task["prompt"].splitlines()
        names: dict = {}
        exec(begin + task["body"], names)
        exec("\n".join(asserts), names)
        assert [names["f"](*each) for each in INPUTS] == task["tests"]
        assert not any(f"f({a}, {b})" in task["prompt"] for a, b in INPUTS)
        ids = tokenizer(task["prompt"])["input_ids"]
        assert tokenizer.decode(ids) == task["prompt"]
        assert len(ids) <= ppo.data.max_prompt_tokens
        assert len(tokenizer(task["body"])["input_ids"]) < ppo.rollout.max_new_tokens
