import re

import pytest

from raypo.config import ConfigError
from raypo.plan.hardware import GB, Node, parse_cluster, this_machine


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
        ("8xGPU", "'8xGPU' is no NxGPUmG, NxCPU, mG or number of nodes"),
        ("", "'' is no NxGPUmG"),
        ("2", "'2' does not say what a node has"),
        ("4xCPU,2xCPU", "'2xCPU' comes twice"),
        ("0xCPU", "'0xCPU' must be above 0"),
        ("4xCPU,0", "'0' must be above 0"),
        ("4xCPU+", "'' is no NxGPUmG"),
    ],
)
def test_what_is_no_cluster_is_refused_with_an_example(text: str, problem: str):
    with pytest.raises(ConfigError, match=re.escape(f"--cluster ({text}): {problem}")) as caught:
        parse_cluster(text)
    assert "8xGPU80G,2" in str(caught.value)


def test_this_machine_has_cores_and_memory():
    (node,) = this_machine()
    assert (node.cpus or 0) >= 1
    assert (node.ram_bytes or 0) > GB // 10
