"""Output and exit status of the command."""

import json
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from raypo.doctor import preflight
from raypo.doctor.preflight import as_json, lines, verdict
from raypo.doctor.result import Check, fault, ok, skipped, warning
from tests.command_line import exit_status

FAULT = fault("/data is full", "It ends.", "Free it.", check="storage_path", node="10.0.0.2")
WARNING = warning("2 GB", "It is slow.", "Use more.", check="shared memory")
OK = ok("free", check="ports", node="10.0.0.1")


def test_faults_come_first_and_nodes_that_are_well_share_a_line():
    results = [
        OK,
        ok("free", check="ports", node="10.0.0.2"),
        WARNING,
        skipped("-", check="x"),
        FAULT,
    ]
    assert list(lines(results)) == [
        "fault     storage_path (10.0.0.2): /data is full",
        "          It ends.",
        "          Free it.",
        "warning   shared memory: 2 GB",
        "          It is slow.",
        "          Use more.",
        "ok        ports (2 nodes): free",
        "skipped   x: -",
    ]


def test_json_has_the_same_fields_for_every_check():
    first, second = json.loads(as_json([FAULT, OK]))
    assert first == {
        "check": "storage_path",
        "status": "fault",
        "found": "/data is full",
        "meaning": "It ends.",
        "remedy": "Free it.",
        "seconds": 0.0,
        "node": "10.0.0.2",
    }
    assert first.keys() == second.keys()


@pytest.mark.parametrize(
    ("uri", "shown"),
    [
        ("s3://KEY:SECRET@bucket/runs?region=x", "s3://bucket/runs?region=x"),
        ("s3://KEY:SEC/RET@bucket", "s3://bucket"),
        ("http://me:se@cret@host:80/v1", "http://host:80/v1"),
        ("http://host:80/a@b", "http://host:80/a@b"),
        ("abfs://data?sas_token=SECRET&x=1", "abfs://data?sas_token=***&x=1"),
    ],
)
def test_users_and_keys_of_uris_are_not_printed(uri: str, shown: str):
    result = fault(f"{uri}: gone", f"It ends: {uri}", f"Look at {uri} now.", check=f"at {uri}")
    first, *more = lines([result])
    assert first == f"fault     at {shown}: {shown}: gone"
    assert [line.strip() for line in more] == [f"It ends: {shown}", f"Look at {shown} now."]
    (entry,) = json.loads(as_json([result]))
    assert (entry["check"], entry["found"]) == (f"at {shown}", f"{shown}: gone")


def test_the_verdict():
    assert verdict([FAULT, WARNING, OK]) == "1 fault: a run would fail here."
    assert verdict([WARNING, WARNING]).startswith("2 warnings: a run can start")
    assert verdict([OK, skipped("-")]) == "nothing is wrong."


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Results of the machine's checks, in place of those of this machine."""
    results: list[Any] = []

    def checks(*args: object, **kwargs: object) -> list[Check]:
        return [Check(r.check, lambda r=r: r) for r in results]

    monkeypatch.setattr(preflight, "machine_checks", checks)
    return results


def test_a_fault_ends_with_status_1_and_a_warning_with_0(
    planted: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    planted[:] = [WARNING, OK]
    assert exit_status(monkeypatch, "doctor", "--json") == 0
    output = json.loads(capsys.readouterr().out)
    assert [entry["status"] for entry in output] == ["ok", "warning", "ok"]  # first: the versions
    planted[:] = [FAULT, OK]
    assert exit_status(monkeypatch, "doctor") == 1
    captured = capsys.readouterr()
    assert captured.out.startswith("fault     storage_path: /data is full\n")
    assert captured.err == "raypo: 1 fault: a run would fail here.\n"


def test_a_wrong_config_is_a_fault_beside_the_checks_of_the_machine(
    planted: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
):
    planted[:] = [OK]
    path = tmp_path / "run.yaml"
    path.write_text("name: run\nmodel: {policy: x}\ndata: {prompts: a.jsonl}\nlerner: {}\n")
    assert exit_status(monkeypatch, "doctor", path, "--json") == 1
    config, _, port = json.loads(capsys.readouterr().out)
    assert (config["check"], config["status"], port["check"]) == ("config", "fault", "ports")
    assert "lerner" in config["found"]


@pytest.mark.parametrize("ending", ["hang", "interrupt"])
def test_no_process_is_left_behind(ending: str, tmp_path: Path):
    """In a process of its own, because the command ends without Python's own exit."""
    script = tmp_path / "run.py"
    script.write_text(ABANDONS % (ending, ending))
    with (tmp_path / "output").open("w+") as output:  # what is left would keep a pipe open
        done = subprocess.run(
            [sys.executable, script], stdout=output, stderr=subprocess.STDOUT, cwd=tmp_path
        )
    assert done.returncode == (1 if ending == "hang" else 130), (tmp_path / "output").read_text()
    pids = [int(path.read_text()) for path in (tmp_path / "parent", tmp_path / "child")]
    deadline = time.monotonic() + 5.0
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_alive, pids))


ABANDONS = """
import os, subprocess, sys, threading, time
from pathlib import Path
import raypo.cli
from raypo.doctor import preflight, result

SLEEPS = "import subprocess, sys, os; from pathlib import Path; " \
    "child = subprocess.Popen(['sleep', '300']); Path('parent').write_text(str(os.getpid())); " \
    "Path('child').write_text(str(child.pid)); child.wait()"

def hang():
    subprocess.run([sys.executable, "-c", SLEEPS])

def make(checks):
    thread = threading.Thread(target=hang, daemon=True)
    thread.start()
    while not Path("child").exists() or not Path("child").read_text():
        time.sleep(0.02)
    if "%s" == "interrupt":
        raise KeyboardInterrupt
    return [result.fault("hangs", is_hung=True, check="x")]

preflight.machine_checks = lambda *args, **kwargs: []
preflight.run_checks = make
sys.argv = ["raypo", "doctor"]  # %s
raypo.cli.main()
"""


def is_alive(pid: int) -> bool:
    with suppress(psutil.Error):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def test_cluster_without_an_address_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert exit_status(monkeypatch, "doctor", "--cluster") == 2
    assert "--cluster: no Ray cluster is named" in capsys.readouterr().err
