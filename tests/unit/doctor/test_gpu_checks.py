"""GPUs by a planted nvidia-smi: driver, memory that others hold, links. No GPU is needed."""

import os
from pathlib import Path
from typing import Any

import pytest

from raypo.config import ConfigError, PPOConfig
from raypo.doctor import gpu_checks
from raypo.doctor.gpu_checks import (
    GpuMemory,
    Links,
    compare_links,
    driver,
    find_gpus,
    gpu_memory,
)
from raypo.doctor.result import ok, run_checks

MIB = 1 << 20
H100 = "NVIDIA H100 80GB HBM3"


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Return a function that plants an nvidia-smi, which says what a real one would say."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def plant(gpus: str, processes: str = "", status: int = 0) -> None:
        script = tmp_path / "nvidia-smi"
        (tmp_path / "gpus").write_text(gpus)
        (tmp_path / "processes").write_text(processes)
        script.write_text(
            f'#!/bin/sh\ncase "$1" in *compute-apps*) cat {tmp_path}/processes;; '
            f"*) cat {tmp_path}/gpus;; esac\nexit {status}\n"
        )
        script.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    return plant


def rows(*used: int) -> str:
    return "".join(f"{i}, GPU-{i}, {H100}, 81559, {mib}\n" for i, mib in enumerate(used))


def test_gpus_as_nvidia_smi_lists_them(smi, monkeypatch: pytest.MonkeyPatch):
    smi(rows(4, 500))
    assert find_gpus()[1] == GpuMemory(1, "GPU-1", H100, 81559 * MIB, 500 * MIB)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert [gpu.index for gpu in find_gpus()] == [1]
    for names in ("0, 1", "GPU-1,GPU-0", "GPU-"):  # a uuid may be shortened
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", names)
        assert len(find_gpus()) == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert find_gpus() == []


def test_a_driver_whose_tool_does_not_work(smi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    smi("Failed to initialize NVML: Driver/library version mismatch\n", status=18)
    assert find_gpus() == []  # no driver is loaded: a machine without GPUs
    loaded = tmp_path / "version"
    loaded.touch()
    monkeypatch.setattr(gpu_checks, "DRIVER_FILE", loaded)
    with pytest.raises(ConfigError, match="Driver/library version mismatch"):
        find_gpus()


def test_memory_that_a_stranger_holds(smi):
    smi(rows(4, 20_000), f"GPU-1, {os.getpid()}, 19000\n")
    result = gpu_memory(find_gpus, lambda: None)
    assert result.status == "warning"
    assert result.found.startswith(f"GPU 1: 21 of 85.5 GB are in use by process {os.getpid()} (")
    assert result.found.endswith(") 19.9 GB")
    assert gpu_memory(find_gpus, lambda: (2, 60 * 10**9)).status == "warning"
    result = gpu_memory(find_gpus, lambda: (2, 70 * 10**9))
    assert (result.status, result.meaning) == (
        "fault",
        "The run needs 70 GB on 2 GPUs; less is free.",
    )
    result = gpu_memory(find_gpus, lambda: (1, 70 * 10**9))  # the other GPU is free
    assert (result.status, "if Ray gives it" in result.meaning) == ("warning", True)


def test_memory_that_is_held_outside_the_container(smi):
    smi(rows(20_000))
    result = gpu_memory(find_gpus, lambda: None)
    assert "in use by processes that are not visible from here" in result.found


def test_free_gpus_give_no_alarm(smi):
    smi(rows(4, 500))
    assert gpu_memory(find_gpus, lambda: (2, 70 * 10**9)).status == "ok"


OLD_DRIVER = """
__version__ = "2.13.0+cu130"
class version: cuda = "13.0"
class cuda:
    @staticmethod
    def is_available(): return False
    @staticmethod
    def init(): raise RuntimeError("The NVIDIA driver on your system is too old (version 12040).")
"""


def test_a_driver_that_is_too_old_for_torchs_cuda(
    smi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The check imports torch in a process of its own, so its stand-in is a file."""
    smi(rows(4))
    (tmp_path / "torch.py").write_text(OLD_DRIVER)
    monkeypatch.syspath_prepend(str(tmp_path))
    only = [check for check in gpu_checks.gpu_checks(None) if check.name == "GPU driver"]
    (result,) = run_checks(only)
    assert result.status == "fault"
    assert "has 1 GPU, and torch 2.13.0+cu130 (CUDA 13.0) cannot use them" in result.found
    assert "driver on your system is too old" in result.found
    assert result.remedy.startswith("Update the driver")


def test_a_torch_for_cpus_on_a_machine_with_gpus():
    import torch

    gpus = [GpuMemory(0, "GPU-0", H100, 80 << 30, 0)]
    if torch.version.cuda is not None:
        pytest.skip("this torch is built for GPUs")
    assert driver(gpus, "auto", "float32").status == "warning"
    with pytest.raises(ConfigError, match="has 1 GPU"):
        driver(gpus, True, "float32")


def test_links_are_compared_with_the_data_sheet():
    gpus = [GpuMemory(i, f"GPU-{i}", H100, 80 << 30, 0) for i in range(2)]
    assert compare_links(Links(300.0, 330.0), gpus).status == "ok"
    result = compare_links(Links(21.0, 330.0), gpus)
    assert result.status == "warning"
    assert result.found == (
        "NCCL: all-reduce 21 GB/s, point to point 330 GB/s; data sheet of the H100: 450 GB/s"
    )
    assert compare_links(Links(300.0, 21.0), gpus).status == "warning"
    unknown = [GpuMemory(0, "GPU-0", "NVIDIA X1", 80 << 30, 0)]
    assert compare_links(Links(1.0, 1.0), unknown).status == "ok"


def test_without_gpus_no_process_is_started(smi, monkeypatch: pytest.MonkeyPatch):
    smi("")
    monkeypatch.setattr(gpu_checks, "call_in_subprocess", None)
    results = run_checks(gpu_checks.gpu_checks(None))
    assert [result.status for result in results] == ["skipped"] * 4


def test_an_error_of_a_tensors_handle_is_told_at_once(monkeypatch: pytest.MonkeyPatch):
    def refuse(tensor: object) -> bytes:
        raise RuntimeError("CUDA error: operation not supported")

    monkeypatch.setattr(gpu_checks.ForkingPickler, "dumps", refuse)
    with pytest.raises(RuntimeError, match="operation not supported"):
        gpu_checks.pass_tensor("cpu")


def config_of(tmp_path: Path, **sections: Any) -> PPOConfig:
    values = {
        "name": "run",
        "model": {"policy": str(tmp_path)},
        "data": {"prompts": "rows.jsonl"},
        "reward": {"function": "exact"},
    }
    return PPOConfig.parse(values | sections)


def test_gpus_that_the_run_does_not_use_are_not_checked(smi, tmp_path: Path):
    smi(rows(20_000))
    config = config_of(tmp_path, learner={"use_gpu": False})
    results = run_checks(gpu_checks.gpu_checks(config))
    assert [result.found for result in results] == ["learner.use_gpu is false"]


def test_a_container_without_gpus_on_a_host_with_a_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """It is told once, and a fault only for a run that needs the GPUs."""
    (tmp_path / "version").touch()
    monkeypatch.setattr(gpu_checks, "DRIVER_FILE", tmp_path / "version")
    calls: list[str] = []

    def absent(query: str) -> list[str]:
        calls.append(query)
        raise FileNotFoundError("nvidia-smi")

    monkeypatch.setattr(gpu_checks, "_smi", absent)
    for use_gpu, status in (("auto", "warning"), (True, "fault")):
        config = config_of(tmp_path, learner={"use_gpu": use_gpu})
        results = run_checks(gpu_checks.gpu_checks(config))
        assert [r.status for r in results] == [status, "skipped", "skipped", "skipped"]
        assert len(calls) == 1
        calls.clear()


def test_only_the_links_that_the_run_uses_are_tried(
    smi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    smi(rows(4, 4))
    monkeypatch.setattr(gpu_checks, "call_in_subprocess", lambda function, *_, **__: ok("tried"))

    def tried(config: PPOConfig | None) -> list[str]:
        results = run_checks(gpu_checks.gpu_checks(config))
        return [r.check for r in results if r.found == "tried" and r.check != "GPU driver"]

    assert tried(None) == ["CUDA IPC", "NCCL"]
    assert tried(config_of(tmp_path)) == ["CUDA IPC"]
    assert tried(config_of(tmp_path, learner={"num_workers": 2})) == ["CUDA IPC", "NCCL"]
    assert tried(config_of(tmp_path, placement={"mode": "dedicated"})) == ["NCCL"]
    assert tried(config_of(tmp_path, rollout={"engine": {"transport": "object"}})) == []
