"""Nodes of a cluster are compared by what they say of themselves."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError

from raypo.config import PPOConfig
from raypo.doctor import node_checks
from raypo.doctor.node_checks import (
    NodeDoctor,
    NodeFacts,
    clocks,
    shared_folder,
    versions_equal,
)

GOOD = NodeFacts({"python": "3.11.7", "ray": "2.60.0"}, 0.002, 0.001, sees_mark=True)


def test_equal_nodes_give_no_alarm():
    facts = {"10.0.0.1": GOOD, "10.0.0.2": replace(GOOD, clock_s=-0.3)}
    assert versions_equal(facts).found == "python 3.11.7, ray 2.60.0, on every node"
    assert clocks(facts, at_uri=False).found == "at most 0.3 s apart"
    assert shared_folder(facts, "/data/runs").status == "ok"
    assert shared_folder(facts, "s3://bucket/runs").status == "skipped"


def test_a_node_with_another_version_or_without_a_package():
    other = replace(GOOD, versions={"python": "3.11.7", "ray": "2.59.0"})
    result = versions_equal({"10.0.0.1": GOOD, "10.0.0.2": other})
    assert (result.status, result.check) == ("fault", "versions")
    assert result.found == "ray: 2.60.0 on 10.0.0.1; 2.59.0 on 10.0.0.2"
    without = replace(GOOD, versions={"python": "3.11.7"})
    result = versions_equal({"10.0.0.1": without, "10.0.0.2": GOOD})
    assert result.found == "ray: none on 10.0.0.1; 2.60.0 on 10.0.0.2"


def test_a_clock_that_is_wrong():
    facts = {"10.0.0.1": GOOD, "10.0.0.2": replace(GOOD, clock_s=-4.2)}
    result = clocks(facts, at_uri=True)
    assert (result.status, result.found) == ("warning", "clocks differ: 10.0.0.2 is 4.2 s behind")
    facts["10.0.0.2"] = replace(GOOD, clock_s=400.0)
    assert clocks(facts, at_uri=True).status == "fault"
    assert clocks(facts, at_uri=True).found == "clocks differ: 10.0.0.2 is 400.0 s ahead"
    assert clocks(facts, at_uri=False).status == "warning"


def test_a_clock_within_the_error_of_its_measurement_is_not_wrong():
    facts = {"10.0.0.1": replace(GOOD, clock_s=2.0, error_s=1.5)}
    assert clocks(facts, at_uri=False).status == "ok"


def test_a_storage_path_that_nodes_do_not_share():
    facts = {"10.0.0.1": GOOD, "10.0.0.2": replace(GOOD, sees_mark=False)}
    result = shared_folder(facts, "/data/runs")
    assert result.status == "fault"
    assert result.found == ("10.0.0.2 cannot see a file that this machine wrote below storage_path")


class Handle:
    """Actor of a node, in this process: `handle.method.remote(...)` calls the method."""

    def __init__(self, doctor: Any, error: Exception | None = None) -> None:
        self._doctor, self._error = doctor, error

    def __getattr__(self, name: str) -> Any:
        def remote(*arguments: Any) -> Any:
            return self._error or getattr(self._doctor, name)(*arguments)

        return SimpleNamespace(remote=remote)


class OldNode(NodeDoctor):
    """Node with another Ray, whose clock is slow, and which sees no file of this machine."""

    def now(self) -> float:
        return super().now() - 60.0

    def facts(self, mark: str) -> tuple[dict[str, str], bool]:
        return super().facts(mark)[0] | {"ray": "2.59.0"}, Path(f"{mark}.other").exists()


def test_nodes_that_differ_and_one_that_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def get(answer: Any, timeout: float) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr("ray.get", get)
    monkeypatch.setattr("ray.wait", lambda *args, **kwargs: None)
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "10.0.0.1")
    monkeypatch.setattr(node_checks, "machine_checks", lambda *args, **kwargs: [])
    values = {
        "name": "run",
        "storage_path": str(tmp_path / "runs"),
        "model": {"policy": str(tmp_path)},
        "data": {"prompts": "rows.jsonl"},
        "reward": {"function": "exact"},
    }
    actors = {
        "10.0.0.1": Handle(NodeDoctor()),
        "10.0.0.2": Handle(OldNode()),
        "10.0.0.3": Handle(None, RayActorError(error_msg="No module named 'raypo'")),
    }
    results = {r.check: r for r in node_checks._check_nodes(PPOConfig.parse(values), actors)}
    assert {name: result.status for name, result in results.items()} == {
        "node": "fault",
        "versions": "fault",
        "clocks": "warning",
        "shared storage_path": "fault",
    }
    assert results["node"].node == "10.0.0.3"
    assert "No module named 'raypo'" in results["node"].found
    assert "2.59.0 on 10.0.0.2" in results["versions"].found
    assert "10.0.0.2 is 60.0 s behind" in results["clocks"].found
    assert results["shared storage_path"].found.startswith("10.0.0.2 cannot see ")
    assert list(tmp_path.iterdir()) == []
