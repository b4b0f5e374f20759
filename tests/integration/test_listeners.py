"""A Ray that raypo has started listens on the loopback interface only."""

from __future__ import annotations

from ipaddress import ip_address
from typing import Any

import psutil
import pytest
import ray


@ray.remote
class Replica:
    def node(self) -> str:
        return ray.util.get_node_ip_address()


@pytest.mark.usefixtures("local_ray")
def test_no_process_of_a_local_ray_listens_to_other_machines():
    actor: Any = Replica.remote()
    assert ray.get(actor.node.remote()) == "127.0.0.1"
    # This process itself may have the store of another test's process group.
    addresses = {
        f"{connection.laddr.ip} {process.name()}"
        for process in psutil.Process().children(recursive=True)
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert any("raylet" in name for name in addresses)
    assert any("Replica" in name for name in addresses)
    for name in addresses:
        address = ip_address(name.split()[0].removeprefix("::ffff:"))
        assert address.is_loopback, name
