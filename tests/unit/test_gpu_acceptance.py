"""`make gpu` as far as a CPU goes: parts that pass, fail and hang, and the report."""

import sys

import pytest

from raypo.plan.hardware import Node
from tests.gpu import acceptance
from tests.gpu.acceptance import NO_GPU, Outcome, main, report, run_part
from tests.gpu.parts import PARTS


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_each_part_says_what_it_found_or_why_it_failed():
    figures = "import json; print('noise'); print(json.dumps({'gap': 0.12345, 'gpu': 'H100'}))"
    passed = run_part("engine", python(figures))
    assert (passed.passed, passed.told) == (True, "gap: 0.123, gpu: H100")
    failed = run_part("ipc", python("raise ValueError('no handle')"))
    assert (failed.passed, failed.told) == (False, "ValueError: no handle")
    hangs = run_part("group", python("import time; time.sleep(60)"), timeout_s=0.3)
    assert (hangs.passed, hangs.told) == (False, "not done in 0.3 s")
    page = report([passed, failed, hangs], "1 x H100")
    assert "1 x H100" in page
    assert ": 1 of 3 parts passed." in page
    assert "| ipc | **failed** | 0 | ValueError: no handle |" in page


def test_without_a_gpu_there_is_nothing_to_accept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(acceptance, "this_machine", lambda: [Node("this machine")])
    assert main([]) == NO_GPU
    assert "nvidia-smi finds no GPU" in capsys.readouterr().out


def test_a_part_that_is_asked_for_is_run_and_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(acceptance, "this_machine", lambda: [Node("this machine", gpus=1)])
    monkeypatch.setattr(acceptance, "REPOSITORY", tmp_path)
    monkeypatch.setattr(acceptance, "REPORT", tmp_path / "runs" / "report.md")
    asked = []

    def run(part: str, command: list[str]) -> Outcome:
        asked.append(command[1:])
        return Outcome(part, part == "driver", 1.0, "told")

    monkeypatch.setattr(acceptance, "run_part", run)
    assert main(["driver", "ipc"]) == 1
    assert asked == [["-m", "tests.gpu.parts", part] for part in ("driver", "ipc")]
    assert "1 of 2 parts passed" in (tmp_path / "runs" / "report.md").read_text()
    assert main(["driver"]) == 0


def test_the_acceptance_has_all_its_parts():
    assert list(PARTS) == [
        "driver",
        "packages",
        "off_load",
        "ipc",
        "group",
        "engine",
        "engine_in_float32",
        "run",
        "microbatch",
    ]
