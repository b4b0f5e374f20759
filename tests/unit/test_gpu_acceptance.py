"""`make gpu` as far as a CPU goes: parts that pass, fail and hang, and the report."""

import os
import sys
import threading
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch

from examples.quickstart import demo
from tests.gpu import acceptance
from tests.gpu.acceptance import Outcome, report, run_part, side_by_side
from tests.gpu.parts import ON_DEMAND, PARTS


@pytest.fixture(autouse=True)
def report_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "runs" / "gpu"
    folder.mkdir(parents=True)
    monkeypatch.setenv("PYTHONPATH", str(acceptance.REPOSITORY))
    monkeypatch.setattr(acceptance, "REPOSITORY", tmp_path)
    monkeypatch.setattr(acceptance, "REPORT", folder / "report.md")
    return folder


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


NOTED = "from tests.gpu.parts import note; note(gap=0.12345); note(gpu='H100'); "


def test_each_part_says_what_it_found_or_why_it_failed(report_in: Path):
    passed = run_part(
        "engine", python(f"{NOTED} note(planned_gb=40.0, measured_gb=38.25); print('noise')"), 60
    )
    assert (passed.passed, passed.text) == (True, "gap: 0.123, gpu: H100")
    failed = run_part("ipc", python("print('so far'); raise ValueError('no handle')"), 60)
    assert not failed.passed
    assert failed.text.endswith("/ ValueError: no handle")
    log = (report_in / "ipc.log").read_text()
    assert log.startswith("so far\nTraceback")
    page = report([passed, failed], "1 x H100", 9.0)
    assert "1 x H100" in page
    assert ": 1 of 2 parts passed, in 9 s." in page
    assert "| engine | passed | " in page
    assert " | 40 | 38.2 |  |  | gap: 0.123, gpu: H100 |" in page
    assert "| ipc | **failed** | " in page


def test_a_part_that_hangs_is_ended_with_what_it_has_started(tmp_path: Path):
    child = tmp_path / "child"
    sleeps = f"import os, time; open({str(child)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    start = f"subprocess.Popen([sys.executable, '-c', {sleeps!r}], start_new_session=True)"
    noted = """print('{"gap": 0.12345}', flush=True)"""
    hangs = run_part(
        "group", python(f"{noted}; import subprocess, sys, time; {start}; time.sleep(60)"), 4
    )
    assert (hangs.passed, hangs.text) == (False, "gap: 0.123, not done in 4 s")
    with suppress(psutil.NoSuchProcess):
        assert psutil.Process(int(child.read_text())).status() == psutil.STATUS_ZOMBIE


def at_the_same_time(
    parts: list[str], gpu_gb: float, *, first: str = "", awaited: str = "", most: int = 99
) -> list[set[str]]:
    """Return the parts that ran together, each time that one began.

    Args:
        first: A part that goes on until `awaited` has begun, so that no timing decides.
    """
    running: set[str] = set()
    seen: list[set[str]] = []
    lock, has_begun = threading.Lock(), threading.Event()

    def run(part: str) -> Outcome:
        with lock:
            running.add(part)
            seen.append(set(running))
        if part == awaited:
            has_begun.set()
        if part == first:
            has_begun.wait(10)
        with lock:
            running.discard(part)
        return Outcome(part, True, 0.02, "")

    told: list[str] = []
    outcomes = side_by_side(
        parts, gpu_gb, run, lambda outcome: told.append(outcome.part), most=most
    )
    assert [each.part for each in outcomes] == parts
    assert sorted(told) == sorted(parts)
    return seen


def test_parts_run_together_as_long_as_their_memory_fits():
    usual = [part for part in PARTS if part not in ON_DEMAND]
    seen = at_the_same_time(usual, 80.0, first="demo", awaited="run")
    assert seen[0] == {"default_run"}
    assert all(len(each) == 1 for each in seen if "default_run" in each), "it has the GPU alone"
    assert all(sum(PARTS[part].gpu_gb for part in each) <= 80.0 for each in seen[1:])
    assert any({"demo", "run"} <= each for each in seen)


@pytest.mark.parametrize("has_gpu", [True, False])
def test_the_demo_says_cpu_to_deepspeed_only_where_there_is_no_gpu(
    monkeypatch: pytest.MonkeyPatch, has_gpu: bool
):
    """Ray's processes get its environment, and DeepSpeed's accelerator was the CPU on GPUs too."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(sys, "argv", ["demo"])
    monkeypatch.setattr(demo.Pipeline, "is_finished", lambda self: True)
    monkeypatch.setattr(demo.Pipeline, "run", lambda self: None)
    monkeypatch.setattr(demo.Pipeline, "conditions", lambda self: [demo.Condition("c", "1", True)])
    monkeypatch.setenv("DS_ACCELERATOR", "")
    monkeypatch.delenv("DS_ACCELERATOR")
    assert demo.main() == 0
    assert os.environ.get("DS_ACCELERATOR") == (None if has_gpu else "cpu")
