"""raypo's scheduler beside vLLM's own, in another process: importing vLLM disables compiling."""

import subprocess
import sys

from tests.integration.task import REPOSITORY


def test_random_schedules_are_those_of_vllms_own_scheduler():
    probe = "tests/integration/lean_scheduler_probe.py"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", probe, "-m", "", "-q", "-p", "no:xdist"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
