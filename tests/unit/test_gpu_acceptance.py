"""`make gpu` as far as a CPU goes: parts that pass, fail and hang, and the report."""

import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from raypo.plan.hardware import Node
from tests.gpu import acceptance
from tests.gpu.acceptance import NO_GPU, Outcome, main, report, run_part
from tests.gpu.parts import ALWAYS, PARTS


@pytest.fixture(autouse=True)
def report_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "runs" / "gpu"
    folder.mkdir(parents=True)
    monkeypatch.setattr(acceptance, "REPOSITORY", tmp_path)
    monkeypatch.setattr(acceptance, "REPORT", folder / "report.md")
    return folder


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_each_part_says_what_it_found_or_why_it_failed(report_in: Path):
    figures = "{'gap': 0.12345, 'gpu': 'H100', 'planned_gb': 40.0, 'measured_gb': 38.25}"
    passed = run_part(
        "engine", python(f"import json; print('noise'); print(json.dumps({figures}))"), 60
    )
    assert (passed.passed, passed.told) == (True, "gap: 0.123, gpu: H100")
    failed = run_part("ipc", python("print('so far'); raise ValueError('no handle')"), 60)
    assert (failed.passed, failed.told) == (False, "ValueError: no handle")
    log = (report_in / "ipc.log").read_text()
    assert log.startswith("so far\nTraceback")
    page = report([passed, failed], "1 x H100")
    assert "1 x H100" in page
    assert ": 1 of 2 parts passed, in " in page
    assert "| engine | passed | 0 | 40 | 38.2 |  |  | gap: 0.123, gpu: H100 |" in page
    assert "| ipc | **failed** | 0 |  |  |  |  | ValueError: no handle |" in page


def test_a_part_that_hangs_is_ended_with_what_it_has_started(tmp_path: Path):
    child = tmp_path / "child"
    sleeps = f"import os, time; open({str(child)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    start = f"subprocess.Popen([sys.executable, '-c', {sleeps!r}], start_new_session=True)"
    hangs = run_part(
        "group", python(f"import subprocess, sys, time; {start}; time.sleep(60)"), limit_s=3
    )
    assert (hangs.passed, hangs.told) == (False, "not done in 3 s")
    with suppress(psutil.NoSuchProcess):
        assert psutil.Process(int(child.read_text())).status() == psutil.STATUS_ZOMBIE


def test_without_a_gpu_there_is_nothing_to_accept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(acceptance, "this_machine", lambda: [Node("this machine")])
    assert main([]) == NO_GPU
    assert "nvidia-smi finds no GPU" in capsys.readouterr().out


@pytest.mark.parametrize("gpus", [1, 8])
def test_parts_across_gpus_are_run_where_there_are_several_and_more_where_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, report_in: Path, gpus: int
):
    monkeypatch.setattr(acceptance, "this_machine", lambda: [Node("this machine", gpus=gpus)])
    asked: list[str] = []

    def run(part: str, command: list[str], limit_s: float) -> Outcome:
        assert command[1:] == ["-m", "tests.gpu.parts", part]
        asked.append(part)
        return Outcome(part, part != "ipc", 1.0, "told")

    monkeypatch.setattr(acceptance, "run_part", run)
    assert main([]) == 1
    usual = [part.__name__ for part in ALWAYS]
    assert asked == (usual if gpus == 1 else [*usual, "several"])
    assert asked[:6] == ["driver", "packages", "off_load", "ipc", "group", "attention"]
    count = len(asked)
    assert f"{count - 1} of {count} parts passed" in (report_in / "report.md").read_text()
    asked.clear()
    assert main(["driver", "more"]) == 0
    assert asked == ["driver", "more"]
    assert PARTS.keys() >= {"more", *usual}
