"""`raypo train` that is interrupted by Ctrl-C and goes on; `raypo sweep` at SIGTERM."""

import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from raypo.storage.run_files import RunFiles
from raypo.tuning.record import read_trials
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


@pytest.mark.parametrize("whole_group", [False, True])
def test_sigterm_ends_a_sweep_in_seconds(task: Path, whole_group: bool):
    """A signal to the whole process group ends the local Ray, too; Ray would wait for it and abort.

    The records of trials are there, from which the same command goes on.
    """
    name = f"terminated-{whole_group}"
    values = {
        "name": name,
        "base": str(task),
        "storage_path": str(task.parent / "runs"),
        "space": {"seed": {"grid": [1, 2, 3]}},
        "overrides": {"num_steps": 1000},
        "searcher": "grid",
        "metric": "rollout/score_mean",
    }
    path = task.parent / f"{name}.yaml"
    path.write_text(yaml.safe_dump(values))
    sweep = task.parent / "runs" / name
    command = raypo("sweep", path)
    wait_for_steps(command, sweep / "trials" / f"{name}-00000", 1)
    began = time.monotonic()
    (os.killpg if whole_group else os.kill)(command.pid, signal.SIGTERM)
    out, error = command.communicate(timeout=TIMEOUT_S)
    assert time.monotonic() - began < 30.0
    assert command.returncode == 130, error
    assert "Stopping all trials" in out
    assert "GCS" not in error
    assert read_trials(RunFiles.at(str(sweep)))[0].point == {"seed": 1}
