"""What the command prints, and with which status it ends."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import raypo.cli
from raypo.doctor import preflight
from raypo.doctor.preflight import as_json, lines, verdict
from raypo.doctor.result import Check, fault, ok, skipped, warning

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


def test_the_verdict():
    assert verdict([FAULT, WARNING, OK]) == "1 fault: a run would fail here."
    assert verdict([WARNING, WARNING]).startswith("2 warnings: a run can start")
    assert verdict([OK, skipped("-")]) == "nothing is wrong."


def told(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["raypo", "doctor", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        raypo.cli.main()
    assert isinstance(ended.value.code, int)
    return ended.value.code


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
    assert told(monkeypatch, "--json") == 0
    output = json.loads(capsys.readouterr().out)
    assert [entry["status"] for entry in output] == ["ok", "warning", "ok"]  # first: the versions
    planted[:] = [FAULT, OK]
    assert told(monkeypatch) == 1
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
    assert told(monkeypatch, path, "--json") == 1
    config, _, port = json.loads(capsys.readouterr().out)
    assert (config["check"], config["status"], port["check"]) == ("config", "fault", "ports")
    assert "lerner" in config["found"]


def test_cluster_without_an_address_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert told(monkeypatch, "--cluster") == 2
    assert "--cluster: no Ray cluster is named" in capsys.readouterr().err
