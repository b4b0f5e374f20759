"""Limits, ports, shared memory, gloo's interface, compiler and sandbox, with planted faults."""

import shutil
import socket
import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raypo.config import ConfigError, PPOConfig
from raypo.doctor import system_checks
from raypo.doctor.system_checks import compiler, gloo, ports, sandbox, shared_memory

GB = 10**9
Usage = namedtuple("Usage", ["total", "used", "free"])


def config_of(tmp_path: Path, **sections: Any) -> PPOConfig:
    values: dict[str, Any] = {
        "name": "run",
        "model": {"policy": str(tmp_path)},
        "data": {"prompts": "rows.jsonl"},
        "reward": {"function": "exact"},
    }
    return PPOConfig.parse(values | sections)


LOWERED = """
import os, resource
from raypo.doctor.system_checks import open_files, processes

os.geteuid = lambda: 1000
for name, limit, check in (
    ("NOFILE", 8192, open_files),
    ("NOFILE", 2048, open_files),
    ("NOFILE", 512, open_files),
    ("NPROC", 3000, processes),
    ("NPROC", 300, processes),
):
    resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (limit, limit))
    result = check()
    print(result.status, result.found)
os.geteuid = lambda: 0
print("root:", "ulimit" in processes().remedy)
"""


def test_real_limits_that_are_lowered_step_by_step():
    """In a process of its own, because a hard limit cannot be raised again."""
    done = subprocess.run(
        [sys.executable, "-c", LOWERED], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == [
        "ok at most 8192 open files",
        "warning at most 2048 open files",
        "fault at most 512 open files",
        "warning at most 3000 processes and threads",
        "fault at most 300 processes and threads",
        "root: False",
    ]


def test_the_limit_of_a_containers_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "pids.max").write_text("100\n")
    monkeypatch.setattr(system_checks, "CGROUP", tmp_path)
    result = system_checks.processes()
    assert (result.status, result.found) == ("fault", "at most 100 processes and threads")
    assert "--pids-limit" in result.remedy


def test_shared_memory_of_docker(monkeypatch: pytest.MonkeyPatch):
    small = Usage(64 << 20, 0, 64 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: small)
    monkeypatch.setattr(system_checks, "memory_bytes", lambda: 32 * GB)
    assert shared_memory(1).status == "warning"
    assert "9.6 GB" in shared_memory(0).meaning
    with pytest.raises(ConfigError, match=r"^/dev/shm \(0\.0671 GB on "):
        shared_memory(2)


def test_shared_memory_that_rays_objects_fit_into(monkeypatch: pytest.MonkeyPatch):
    """Ray takes what is free, if that is at least 10 GB."""
    monkeypatch.setattr(system_checks, "memory_bytes", lambda: 2000 * GB)
    for free, status in ((12 * GB, "ok"), (9 * GB, "warning")):
        usage = Usage(free, 0, free)
        monkeypatch.setattr(shutil, "disk_usage", lambda path, usage=usage: usage)
        assert shared_memory(8).status == status


def test_gloo_on_loopback_is_a_fault_with_several_nodes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert gloo(1, "").status == "ok"
    result = gloo(2, "10.0.0.1")
    assert result.status == "fault"
    assert result.found == "127.0.0.1 of the interface lo, by GLOO_SOCKET_IFNAME (lo)"
    assert "Unset GLOO_SOCKET_IFNAME" in result.remedy


def test_gloo_with_an_interface_that_is_not_there(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth77")
    result = gloo(1, "")
    assert result.status == "fault"
    assert result.found.startswith("GLOO_SOCKET_IFNAME (eth77): there is no interface eth77, only ")
    assert result.remedy == "Unset GLOO_SOCKET_IFNAME, or set it to an existing interface."
    assert gloo(2, "10.0.0.1").remedy == (
        "Unset GLOO_SOCKET_IFNAME, or set it to the interface of the address 10.0.0.1."
    )


def test_gloo_by_the_hosts_name(monkeypatch: pytest.MonkeyPatch):
    """raypo sets the interface of Ray's address for its workers, so that is what counts."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(socket, "gethostbyname", lambda host: "127.0.1.1")
    own = SimpleNamespace(family=socket.AF_INET, address="10.0.0.5")
    loopback = SimpleNamespace(family=socket.AF_INET, address="127.0.0.1")
    interfaces = {"lo": [loopback], "eth0": [own]}
    monkeypatch.setattr("psutil.net_if_addrs", lambda: interfaces)
    monkeypatch.setattr(
        system_checks, "interface_of", lambda address: "eth0" if address == "10.0.0.5" else None
    )
    assert gloo(2, "10.0.0.5").found.startswith("10.0.0.5 of the interface eth0")
    assert gloo(2, "10.0.0.5").status == "ok"
    assert gloo(2, "10.0.0.6").status == "fault"
    monkeypatch.setattr(socket, "gethostbyname", lambda host: "10.0.0.5")
    assert gloo(2, "10.0.0.6").status == "ok"


def test_a_host_whose_name_leads_to_an_address_that_it_does_not_have(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(socket, "gethostbyname", lambda host: "203.0.113.7")
    alone, several = gloo(1, ""), gloo(2, "10.0.0.6")
    assert (alone.status, several.status) == ("warning", "fault")
    assert several.found.startswith("203.0.113.7, ")


def test_loopback_has_another_name_on_some_systems(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(socket, "gethostbyname", lambda host: "127.0.1.1")
    loopback = SimpleNamespace(family=socket.AF_INET, address="127.0.0.1")
    monkeypatch.setattr("psutil.net_if_addrs", lambda: {"lo0": [loopback]})
    assert gloo(1, "").status == "ok"


def test_a_port_in_use():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = ports(None, [port])
    assert (result.status, result.found) == ("fault", f"port {port}: Address already in use")
    assert ports(None, [port]).status == "ok"
    assert ports(None, []).status == "skipped"


def test_an_endpoint_at_an_address_of_another_machine(tmp_path: Path):
    def result(host: str) -> Any:
        rollout = {"agent": "agent.py:Agent", "endpoint_host": host, "max_episode_tokens": 64}
        return ports(config_of(tmp_path, rollout=rollout, reward={}), [])

    assert result("127.0.0.1").status == "ok"
    assert result("203.0.113.7").status == "fault"
    assert "rollout.endpoint_host (203.0.113.7): " in result("203.0.113.7").found


def test_an_off_loaded_optimizer_without_a_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    off = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
    config = config_of(tmp_path, learner={"deepspeed": off})
    assert compiler(config).status == "ok"
    monkeypatch.setenv("PATH", str(tmp_path))
    result = compiler(config)
    assert (result.status, result.found) == ("fault", "g++ not found")
    assert compiler(config_of(tmp_path)).status == "skipped"


def test_the_sandbox_is_tried_if_a_function_uses_it(tmp_path: Path, python_sandbox: None):
    (tmp_path / "score.py").write_text(
        "from raypo.tools.sandbox import PythonSandbox\ndef score(rollouts): ...\n"
    )
    config = config_of(tmp_path, reward={"function": f"{tmp_path}/score.py:score"})
    assert sandbox(config).status == "ok"
    assert sandbox(config_of(tmp_path)).status == "skipped"


def test_a_host_without_a_sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "score.py").write_text("PythonSandbox = 1\n")
    config = config_of(tmp_path, reward={"function": f"{tmp_path}/score.py:score"})
    monkeypatch.setattr(sys, "platform", "darwin")
    result = sandbox(config)
    assert (result.status, result.found) == ("fault", "there is no sandbox on darwin")
    assert result.remedy.startswith("Python in a sandbox needs Linux")
