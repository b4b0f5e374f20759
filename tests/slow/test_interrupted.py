"""`raypo train` that is interrupted by Ctrl-C, goes on, and has then finished."""

import os
import signal
from pathlib import Path
from types import SimpleNamespace

from tests.integration.task import numbers, raypo, read_metrics
from tests.integration.test_command import TIMEOUT_S, wait_for_steps


def test_a_run_that_was_interrupted_ends_with_the_very_same_numbers(
    first: SimpleNamespace, task: Path
):
    run = task.parent / "runs" / "interrupted"
    command = raypo("train", task, "name=interrupted")
    wait_for_steps(command, run, 1)
    os.killpg(command.pid, signal.SIGINT)  # what a terminal does at Ctrl-C
    _, error = command.communicate(timeout=TIMEOUT_S)
    assert command.returncode == 130, error
    assert 1 <= len(read_metrics(run)) < 4

    command = raypo("train", task, "name=interrupted")
    out, error = command.communicate(timeout=TIMEOUT_S)
    assert command.returncode == 0, error
    assert "Resuming after step" in out
    assert numbers(read_metrics(run)) == numbers(first.metrics)

    command = raypo("train", task, "name=interrupted")
    out, error = command.communicate(timeout=30)
    assert command.returncode == 0, error
    assert "is finished" in out
