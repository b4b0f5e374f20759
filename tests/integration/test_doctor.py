"""`raypo doctor` on a healthy machine, with planted faults of functions, and on two nodes."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from raypo.config import load_run_config
from raypo.doctor.gpu_checks import measure_links, pass_tensor
from raypo.doctor.result import Result, run_checks
from raypo.doctor.run_checks import reward_check
from raypo.doctor.service_checks import service_checks
from tests.integration.ray_cluster import Host, started_cluster
from tests.integration.task import REPOSITORY, write_task
from tests.unit.rewards.scripted_server import scripted

FUNCTIONS = """
import time

def raises(rollouts):
    return [1 / len(r.response) for r in rollouts]

def nan(rollouts):
    return [float("nan") if not r.response else 1.0 for r in rollouts]

def same(rollouts):
    return [0.5 for _ in rollouts]

def slow(rollouts):
    time.sleep(1.1 * len(rollouts))
    return [float(r.response == r.label) for r in rollouts]

def hangs(rollouts):
    time.sleep(600)
"""


def doctor(*arguments: str | Path, env: dict[str, str] | None = None) -> tuple[int, list[Any]]:
    """Exit status and results of the command."""
    done = subprocess.run(
        [sys.executable, "-m", "raypo.cli", "doctor", "--json", *map(str, arguments)],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), **(env or {})},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def alarms(results: list[Any]) -> list[Any]:
    return [result for result in results if result["status"] in ("fault", "warning")]


def test_a_healthy_machine_and_two_recipes_give_no_alarm(tmp_path: Path):
    shutil.copytree(REPOSITORY / "examples/quickstart", tmp_path / "quickstart")
    shutil.rmtree(tmp_path / "quickstart/data", ignore_errors=True)
    made = [sys.executable, str(tmp_path / "quickstart/make_data.py")]
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    subprocess.run(made, check=True, cwd=tmp_path, env=env, capture_output=True)
    sft = doctor(tmp_path / "quickstart/sft.yaml", f"storage_path={tmp_path}/runs")
    ppo = doctor(write_task(tmp_path / "task"))
    for status, results in (sft, ppo):
        assert alarms(results) == []
        assert status == 0
        checks = {result["check"]: result["status"] for result in results}
        for name in ("inputs", "models", "fit", "run folder", "reward function", "storage_path"):
            assert checks[name] == "ok"
    assert not (tmp_path / "runs").exists()
    assert not (tmp_path / "task" / "runs").exists()


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("task")
    (folder / "score.py").write_text(FUNCTIONS)
    return write_task(folder)


def tried(task: Path, function: str, *, limit_s: float = 120.0) -> Result:
    overrides = [f"reward.function={task.parent}/score.py:{function}"]
    config = load_run_config(task, overrides)
    (result,) = run_checks(reward_check(config, task, overrides, limit_s=limit_s))
    return result


def test_a_reward_function_that_raises(task: Path):
    result = tried(task, "raises")
    assert result.status == "fault"
    assert "ZeroDivisionError" in result.found


def test_a_reward_function_that_returns_nan(task: Path):
    result = tried(task, "nan")
    assert result.status == "fault"
    assert "no score" in result.found
    assert "reward.max_failed_fraction" in result.remedy


def test_a_reward_function_that_scores_all_alike(task: Path):
    result = tried(task, "same")
    assert (result.status, "no right answer" in result.found) == ("warning", True)


def test_a_slow_reward_function(task: Path):
    result = tried(task, "slow")
    assert (result.status, "s for each response" in result.found) == ("warning", True)


def test_a_reward_function_that_hangs_is_ended(task: Path):
    begin = time.monotonic()
    result = tried(task, "hangs", limit_s=30.0)
    assert (result.status, result.is_hung) == ("fault", True)
    assert time.monotonic() - begin < 60.0
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True)
    assert f"{task.parent}/score.py:hangs" not in listed.stdout


def test_links_are_measured_by_processes_over_gloo():
    links = measure_links("gloo", 2, message_bytes=1 << 20)
    assert 0.001 < links.all_reduce < 1000.0
    assert 0.001 < links.point_to_point < 1000.0


def test_a_tensor_reaches_another_process():
    pass_tensor("cpu")


@pytest.mark.parametrize(
    ("status", "mode", "expected"),
    [(200, "online", "ok"), (401, "online", "fault"), (200, "disabled", "skipped")],
)
def test_the_key_of_wandb_is_tried_and_not_printed(
    task: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    status: int,
    mode: str,
    expected: str,
):
    pytest.importorskip("wandb")
    viewer = {"id": "1", "username": "me", "entity": "me", "flags": "{}", "teams": {"edges": []}}
    key = "5391" * 10
    for name in ("HOME", "WANDB_CONFIG_DIR", "WANDB_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("WANDB_API_KEY", key)
    monkeypatch.setenv("WANDB_MODE", mode)
    config = load_run_config(task, ["logging.wandb.project=p"])
    with scripted(lambda body, number: (status, {"data": {"viewer": viewer}})) as (url, requests):
        monkeypatch.setenv("WANDB_BASE_URL", url.removesuffix("/score"))
        (result,) = run_checks(service_checks(config))
    assert result.status == expected
    assert bool(requests) == (mode == "online")
    assert key not in str(result)


WAIT = """
import time
import ray

ray.init(log_to_driver=False)
while len(ray.nodes()) < 2:
    time.sleep(0.2)
"""
"""Script that waits until the second node has joined the cluster."""


@pytest.mark.filterwarnings("ignore")
def test_two_nodes_are_checked_and_compared(tmp_path: Path):
    """Their addresses are of the loopback interface: gloo's fault with several nodes is real."""
    config = write_task(tmp_path / "task")
    with started_cluster([Host(), Host("127.0.0.2")]) as cluster:
        env = cluster.env | {"RAY_ADDRESS": cluster.address}
        subprocess.run([sys.executable, "-c", WAIT], env=os.environ | env, check=True, timeout=60)
        status, results = doctor(config, "--cluster", env=env)
    by_node = {r["node"]: r for r in results if r["check"] == "gloo's address"}
    assert len(by_node) == 2
    assert "127.0.0.2" in by_node
    for result in by_node.values():
        assert result["status"] == "fault"
        assert "Workers on other nodes cannot reach this one" in result["meaning"]
    assert status == 1
    compared = {r["check"]: r["status"] for r in results if not r["node"]}
    for name in ("versions", "clocks", "shared storage_path", "inputs", "models", "fit"):
        assert compared[name] == "ok"
    assert {r["node"] for r in results if r["check"] == "open files"} == by_node.keys()
    assert alarms([r for r in results if r["check"] != "gloo's address"]) == []
