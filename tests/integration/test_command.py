"""The `raypo` command as a user has it: interrupted, killed, resumed, and given wrong input."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from tests.integration.task import numbers, raypo, read_metrics

TIMEOUT_S = 420


def wait_until(command: subprocess.Popen[str], condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert command.poll() is None, command.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.02)


def wait_for_steps(command: subprocess.Popen[str], run: Path, count: int) -> None:
    wait_until(command, lambda: len(read_metrics(run)) >= count)


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


def test_killed_it_resumes_to_the_very_same_numbers_and_ends_at_an_interrupt(
    first: SimpleNamespace, task: Path, monkeypatch: pytest.MonkeyPatch
):
    """The numbers of a run from Python that nobody disturbed, although this one has more steps."""
    monkeypatch.setenv("RAYPO_TEST_COMMAND", str(os.getpid()))
    run = task.parent / "runs" / "broken"
    arguments = ("train", task, "name=broken", "num_steps=20")

    def steps() -> int:
        return len(read_metrics(run))

    command = raypo(*arguments)
    wait_until(command, lambda: steps() == 3)
    os.killpg(command.pid, signal.SIGKILL)
    command.wait()

    command = raypo(*arguments)
    wait_until(command, lambda: steps() == 2)  # step 3 was after the last checkpoint
    wait_until(command, lambda: steps() >= 4)
    os.killpg(command.pid, signal.SIGINT)  # what a terminal does at Ctrl-C
    out, error = command.communicate(timeout=TIMEOUT_S)
    assert command.returncode == 130, error
    assert "Resuming after step 2" in out
    assert json.loads((run / "summary.json").read_text())["status"] == "interrupted"
    assert numbers(read_metrics(run)[:4]) == numbers(first.metrics)
    assert left_over_processes() == []


def test_the_driver_loads_no_model_code():
    """It starts others; what it imported itself, every start would wait for."""
    heavy = ("transformers", "vllm", "deepspeed")
    code = f"import sys, raypo.trainer; print([m for m in {heavy!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
