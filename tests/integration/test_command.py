"""The `raypo` command as a user has it: interrupted, killed, resumed, and given wrong input."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from tests.integration.task import numbers, raypo, read_metrics

TIMEOUT_S = 420


def wait_for_steps(command: subprocess.Popen[str], run: Path, count: int) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while len(read_metrics(run)) < count:
        assert command.poll() is None, command.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.05)


def left_over_processes() -> list[psutil.Process]:
    """What a command started and has not ended; Ray's own go within seconds of it."""
    mark = os.environ["RAYPO_TEST_COMMAND"]
    found = [
        process
        for process in psutil.process_iter(["environ"])
        if (process.info["environ"] or {}).get("RAYPO_TEST_COMMAND") == mark
        and process.pid != os.getpid()
    ]
    return psutil.wait_procs(found, timeout=30)[1]


def test_interrupted_and_killed_it_resumes_to_the_very_same_numbers(
    first: SimpleNamespace, task: Path, monkeypatch: pytest.MonkeyPatch
):
    """The same that a run from Python has, which nobody disturbed."""
    runs = task.parent / "runs"
    monkeypatch.setenv("RAYPO_TEST_COMMAND", str(os.getpid()))

    broken = runs / "broken"
    command = raypo("train", task, "name=broken")
    wait_for_steps(command, broken, 1)
    os.killpg(command.pid, signal.SIGINT)  # what a terminal does at Ctrl-C
    out, error = command.communicate(timeout=TIMEOUT_S)
    assert command.returncode == 130, error
    assert json.loads((broken / "summary.json").read_text())["status"] == "interrupted"
    done = len(read_metrics(broken))
    assert 1 <= done < 4
    assert left_over_processes() == []

    command = raypo("train", task, "name=broken")
    wait_for_steps(command, broken, 3)
    os.killpg(command.pid, signal.SIGKILL)
    command.wait()

    command = raypo("train", task, "name=broken")
    out, error = command.communicate(timeout=TIMEOUT_S)
    assert command.returncode == 0, error
    assert "Resuming after step" in out
    assert "step 4/4" in out
    assert numbers(read_metrics(broken)) == numbers(first.metrics)

    again = raypo("train", task, "name=broken")
    out, error = again.communicate(timeout=30)
    assert again.returncode == 0, error
    assert "is finished" in out


def test_the_driver_loads_no_model_code():
    """It starts others; what it imported itself, every start would wait for."""
    heavy = ("transformers", "vllm", "deepspeed")
    code = f"import sys, raypo.trainer; print([m for m in {heavy!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_fresh_starts_over_and_a_reward_function_that_raises_ends_the_run_with_its_error(
    first: SimpleNamespace, task: Path
):
    """In the folder of a run that is finished, and was of another config."""
    folder = task.parent / "runs" / "raises"
    shutil.copytree(first.folder, folder)
    config = folder / "config.yaml"
    config.write_text(config.read_text().replace("name: tiny", "name: raises"))
    (task.parent / "bad_reward.py").write_text(
        "def broken(rollouts):\n    raise KeyError('no such label')\n"
    )
    spec = f"{task.parent}/bad_reward.py:broken"
    arguments = ("train", task, "name=raises", f"reward.function={spec}")
    command = raypo(*arguments)
    out, error = command.communicate(timeout=60)
    assert command.returncode == 2, out
    assert "--fresh" in error
    assert read_metrics(folder) == first.metrics

    command = raypo(*arguments, "--fresh")
    out, error = command.communicate(timeout=TIMEOUT_S)
    assert command.returncode == 1, out
    assert "no such label" in error
    assert "bad_reward.py" in error
    assert json.loads((folder / "summary.json").read_text())["status"] == "failed"
    assert read_metrics(folder) == []
    assert not (folder / "policy").exists()
