"""The engine of the acceptance on a GPU, small and on this CPU: all of it but the GPU."""

import os
import subprocess
import sys

from tests.integration.task import REPOSITORY


def test_an_engine_sleeps_takes_a_push_wakes_and_agrees():
    """In a process of its own, for there is one engine a process."""
    small = {"hidden_size": 448, "intermediate_size": 64, "vocab_size": 64}
    code = (
        f"from tests.gpu import parts; parts.SIZES = {small}; "
        "print(parts.engine('float32', layers=1, device='cpu'))"
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
    figures = eval(done.stdout.splitlines()[-1])
    assert figures["gap"] < 1e-3
    assert figures["push_s"] > 0.0
