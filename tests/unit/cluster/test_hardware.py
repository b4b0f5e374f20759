import os
import re
from pathlib import Path

import pytest

from raypo.cluster import hardware
from raypo.cluster.gpus import gpu_of
from raypo.cluster.hardware import GB, Node, cpu_count, parse_cluster, this_machine
from raypo.config import ConfigError


def test_two_nodes_of_eight_gpus():
    nodes = parse_cluster("8xGPU80G,2")
    assert [node.name for node in nodes] == ["node 0", "node 1"]
    assert {(n.gpus, n.gpu_bytes, n.cpus, n.ram_bytes) for n in nodes} == {(8, 80 * GB, None, None)}


def test_cores_memory_and_kinds_of_nodes_in_any_order():
    first, second, third = parse_cluster("512G, 8xgpu40g ,96xCPU + 2,4xCPU,16G")
    assert first == Node("node 0", gpus=8, gpu_bytes=40 * GB, cpus=96, ram_bytes=512 * GB)
    assert second == Node("node 1", cpus=4, ram_bytes=16 * GB)
    assert third.name == "node 2"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("8xGPU", "'8xGPU' is not NxKIND (B200, H200, "),
        ("", "'' is not NxKIND"),
        ("2", "'2' does not describe a node"),
        ("2x8xH100,2", "'2' comes twice"),
        ("4xCPU,2xCPU", "'2xCPU' comes twice"),
        ("0xCPU", "'0xCPU' must be above 0"),
        ("4xCPU,0", "'0' must be above 0"),
        ("4xCPU+", "'' is not NxKIND"),
    ],
)
def test_what_is_no_cluster_is_refused_with_an_example(text: str, problem: str):
    with pytest.raises(ConfigError, match=re.escape(f"--cluster ({text}): {problem}")) as caught:
        parse_cluster(text)
    assert "8xGPU80G says" in str(caught.value)


def test_nodes_may_stand_in_front_and_ram_in_terabytes():
    assert parse_cluster("2x8xH100,1.5T") == parse_cluster("8xH100,1500G,2")
    assert parse_cluster("2x8xGPU80G") == parse_cluster("8xGPU80G,2")


def test_a_kind_says_what_its_data_sheet_does():
    (node,) = parse_cluster("8xa100-80g,200Gbit")
    assert (node.gpus, node.gpu_bytes, node.network_gbs) == (8, 80 * GB, 25.0)
    assert node.gpu is not None
    assert node.gpu.memory_gbs == 2039
    (node,) = parse_cluster("1xL40S")
    assert node.gpu_bytes == 48 * GB
    names = {
        "NVIDIA A100-SXM4-80GB": "A100-80G",
        "NVIDIA A100-PCIE-40GB": "A100",
        "NVIDIA L40S": "L40S",
        "NVIDIA L4": "L4",
        "NVIDIA H100 80GB HBM3": "H100",
        "NVIDIA H100 PCIe": "H100-PCIe",
        "A100-80G": "A100-80G",  # as Ray names it
    }
    for told, name in names.items():
        gpu = gpu_of(told)
        assert gpu is not None
        assert gpu.name == name
    for told in ("NVIDIA GeForce RTX 4090", "NVIDIA L40", "NVIDIA GH200 480GB", "NVIDIA T400 4GB"):
        assert gpu_of(told) is None


def test_a_container_has_the_cores_of_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(hardware, "CGROUP", tmp_path)
    assert cpu_count() == 8
    limit = tmp_path / "cpu.max"
    for text, cores in (("max 100000", 8), ("350000 100000", 3), ("5000 100000", 1)):
        limit.write_text(text)
        assert cpu_count() == cores == this_machine()[0].cpus
    limit.unlink()
    (tmp_path / "cpu").mkdir()
    for quota, cores in ((-1, 8), (200000, 2)):  # of the first version
        (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text(f"{quota}\n")
        (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
        assert cpu_count() == cores
