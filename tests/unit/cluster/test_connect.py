"""Addresses are tried before Ray sees them: it would retry for minutes."""

import json
import os
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from raypo.cluster import connect as module
from raypo.cluster.connect import (
    ClusterError,
    cluster_address,
    connect,
    dashboard_token,
    untold_environment,
    worker_environment,
)
from raypo.config import ClusterSection, ConfigError


@pytest.fixture
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_nothing_at_cluster_address_is_told_with_the_key(free_port: int):
    address = f"127.0.0.1:{free_port}"
    with pytest.raises(ConfigError) as caught:
        connect(ClusterSection(address=address))
    assert str(caught.value).startswith(f"cluster.address ({address}): nothing listens there")
    assert "ray start --head" in str(caught.value)


def test_nothing_at_ray_address_is_told_with_the_variable(
    free_port: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{free_port}")
    with pytest.raises(ConfigError, match=r"RAY_ADDRESS \(127"):
        connect(ClusterSection())


def test_ray_client_is_refused_with_what_works():
    with pytest.raises(ConfigError, match="ray job submit"):
        connect(ClusterSection(address="ray://head:10001"))


def test_an_address_without_a_port_is_told(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ConfigError, match="an address is host:port"):
        connect(ClusterSection(address="headnode"))


def test_the_config_wins_over_the_variable(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RAY_ADDRESS", "b:2")
    assert cluster_address(ClusterSection(address="a:1")) == ("a:1", "cluster.address")
    assert cluster_address(ClusterSection()) == ("b:2", "RAY_ADDRESS")
    monkeypatch.delenv("RAY_ADDRESS")
    assert cluster_address(ClusterSection())[0] is None


def test_variables_that_the_user_has_set_are_kept(monkeypatch: pytest.MonkeyPatch):
    for name in module._WORKER_DEFAULTS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    environment = worker_environment()
    assert environment["NCCL_DEBUG"] == "INFO"
    assert environment["NCCL_CUMEM_ENABLE"] == "0"
    assert environment["TOKENIZERS_PARALLELISM"] == "false"


def test_a_local_ray_that_does_not_come_up_is_told_in_words(monkeypatch: pytest.MonkeyPatch):
    def init(**_: object) -> None:
        raise Exception("The current node timed out during startup.")  # as Ray does

    alone = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    monkeypatch.setattr(os, "environ", alone)
    monkeypatch.setattr(module.ray, "init", init)
    with pytest.raises(ClusterError, match=r"did not start .* within 30 s"):
        connect(ClusterSection())
    assert alone["RAY_TRAIN_ENABLE_PREEMPTION_WATCHER"] == "0"


def test_every_nccl_variable_and_device_flag_of_the_user_reaches_the_workers(
    monkeypatch: pytest.MonkeyPatch,
):
    theirs = {
        "NCCL_SOCKET_IFNAME": "eth1",
        "NCCL_CUMEM_ENABLE": "1",
        "TOKENIZERS_PARALLELISM": "true",
        "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
        "CUDA_VISIBLE_DEVICES": "0,1",
    }
    for name, value in theirs.items():
        monkeypatch.setenv(name, value)
    environment = worker_environment()
    assert {name: environment[name] for name in theirs} == theirs
    assert environment["NCCL_DEBUG"] == "WARN"


@pytest.mark.parametrize(
    ("mode", "job", "untold"),
    [
        ("worker", "theirs", ["NCCL_CUMEM_ENABLE", "OMP_WAIT_POLICY", "TOKENIZERS_PARALLELISM"]),
        ("driver", "theirs", ["NCCL_CUMEM_ENABLE", "OMP_WAIT_POLICY", "TOKENIZERS_PARALLELISM"]),
        ("driver", "ours", []),
    ],
)
def test_workers_of_a_ray_that_the_user_has_started_are_told_what_they_lack(
    mode: str, job: str, untold: list[str], monkeypatch: pytest.MonkeyPatch
):
    for name in module._WORKER_DEFAULTS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    number = {"worker": module.ray.WORKER_MODE, "driver": module.ray.SCRIPT_MODE}[mode]
    said = {"env_vars": {"NCCL_DEBUG": "INFO"}}  # to ray.init, and so to all workers
    context = SimpleNamespace(worker=SimpleNamespace(mode=number), runtime_env=said)
    monkeypatch.setattr(module.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(module.ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(module, "_job", lambda: job)
    monkeypatch.setattr(module, "_our_job", "ours")
    found = untold_environment()
    assert sorted(found) == untold
    assert found == {name: worker_environment()[name] for name in untold}


def test_what_the_job_says_is_not_said_twice(monkeypatch: pytest.MonkeyPatch):
    job = {"runtime_env": {"env_vars": {"NCCL_DEBUG": "INFO"}}}
    monkeypatch.setenv(module.JOB_CONFIG_VARIABLE, json.dumps(job))
    beside = module._beside_the_job(os.environ)
    assert "NCCL_DEBUG" not in beside
    assert beside["NCCL_CUMEM_ENABLE"] == worker_environment()["NCCL_CUMEM_ENABLE"]
    monkeypatch.delenv(module.JOB_CONFIG_VARIABLE)
    assert module._beside_the_job(os.environ) == worker_environment()


def test_the_token_is_looked_for_where_ray_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    assert dashboard_token() is None
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("from home\n")
    assert dashboard_token() == "from home"
    (tmp_path / "named").write_text("from the named file")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "named"))
    assert dashboard_token() == "from the named file"
    monkeypatch.setenv("RAY_AUTH_TOKEN", "from the variable")
    assert dashboard_token() == "from the variable"
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    assert dashboard_token() is None
