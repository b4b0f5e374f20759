"""Engine and run of the acceptance on a GPU, small and on this CPU: all of them but the GPU."""

import json
import os
import subprocess
import sys
from typing import Any

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
    """In a process of its own, for there is one engine a process."""
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


def test_an_engine_sleeps_takes_pushes_wakes_and_agrees():
    figures = part("engine('float32', layers=2, device='cpu')")
    for name in ("gap", "keep_old_tokens", "recompute_old_tokens", "recompute_new_tokens"):
        assert figures[name] < 1e-3, name
    assert figures["push_s"] > 0.0


def test_a_run_is_killed_goes_on_and_is_told_beside_its_plan():
    figures = part("run('float32', layers=2, device='cpu')")
    assert figures["measured_s"] > 0.0
    assert {"learner_gb", "engine_gb", "reference_gb", "reward_0_gb"} <= figures.keys()
