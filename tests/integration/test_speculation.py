"""Speculative decoding, in a process of its own for each kind (`speculation_probe.py`)."""

import subprocess
import sys

import pytest

from tests.integration.task import REPOSITORY


@pytest.mark.parametrize("kind", ["ngram", "model"])
def test_samples_are_the_policys_own(kind: str):
    probe = "tests/integration/speculation_probe.py"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", probe, "-m", "", "-q", "-p", "no:xdist", "-k", kind],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert "5 passed" in done.stdout
