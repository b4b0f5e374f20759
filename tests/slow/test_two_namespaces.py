"""The same on two nodes in network namespaces of their own: nothing but a wire between them."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.ray_cluster import Host, started_cluster
from tests.integration.task import write_task
from tests.slow.test_cluster import assert_weights_arrived, nodes_of_engines, submit

NET = "10.213.7"


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    """Two namespaces, joined by a virtual cable."""
    names = [f"raypo{os.getpid()}{side}" for side in "ab"]
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and the command ip")
    try:
        for name in names:
            _ip("netns", "add", name)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespace can be made here: {error.stderr.decode().strip()}")
    try:
        _ip("link", "add", "wire0", "netns", names[0], "type", "veth",
            "peer", "name", "wire0", "netns", names[1])  # fmt: skip
        hosts = []
        for number, name in enumerate(names, start=1):
            inside = ("-n", name)
            _ip(*inside, "addr", "add", f"{NET}.{number}/24", "dev", "wire0")
            _ip(*inside, "link", "set", "wire0", "up")
            _ip(*inside, "link", "set", "lo", "up")
            hosts.append(Host(f"{NET}.{number}", ("ip", "netns", "exec", name), "wire0"))
        yield hosts
    finally:
        for name in names:
            _ip("netns", "del", name)


def test_weights_reach_an_engine_behind_a_wire(tmp_path: Path, hosts: list[Host]):
    config = write_task(tmp_path / "task")
    with started_cluster(hosts) as cluster:
        submit(cluster, config, prefix=hosts[0].prefix)
        assert len(nodes_of_engines(cluster, prefix=hosts[0].prefix)) == 2
    assert_weights_arrived(tmp_path / "task")
