"""Default run, demo, engines and run of the acceptance, on this CPU: all of them but the GPU."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.gpu.parts import DEFAULT_STEPS
from tests.integration.task import REPOSITORY

SIZES = {"hidden_size": 448, "intermediate_size": 64, "vocab_size": 128}
TOKENS = {
    "prompts": 4,
    "samples": 2,
    "prompt": 128,
    "response": 16,
    "max_tokens_per_microbatch": 512,
}


def part(call: str) -> dict[str, Any]:
    """Run a part in a process of its own, for there is one engine a process."""
    code = (
        f"import json; from tests.gpu import parts; parts.SIZES = {SIZES}; parts.TOKENS = {TOKENS};"
        f"print(json.dumps(parts.{call}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_a_default_run_is_killed_and_resumed():
    """The same command and run file as on a GPU."""
    figures = part("default_run(device='cpu')")
    assert len(figures["score"]) == DEFAULT_STEPS
    assert figures["resumed_s"] > 0.0


def test_the_pipeline_of_the_demo_runs_through():
    figures = part("demo({'sft': 40, 'reward_model': 5, 'ppo': 1}, device='cpu')")
    assert {"sft_s", "sft_score", "pair_accuracy", "reward_model_s", "ppo_s"} <= figures.keys()


@pytest.mark.parametrize("name", ["engine", "engine_llama"])
def test_an_engine_sleeps_takes_pushes_wakes_and_agrees(name: str):
    figures = part(f"{name}('float32', layers=2, device='cpu')")
    for name in ("gap", "keep_old_tokens", "recompute_old_tokens", "recompute_new_tokens"):
        assert figures[name] < 1e-3, name
    assert figures["push_s"] > 0.0


def test_a_run_is_killed_goes_on_and_is_told_beside_its_plan():
    figures = part("run('float32', layers=2, device='cpu')")
    assert figures["measured_s"] > 0.0
    assert {"learner_gb", "engine_gb", "reference_gb", "reward_0_gb"} <= figures.keys()
