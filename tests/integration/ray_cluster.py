"""A Ray cluster of `ray start` processes with ports and folders of its own; gone after the test."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray.autoscaler._private.fake_multi_node.node_provider import (
    FAKE_HEAD_NODE_ID,
    FakeMultiNodeProvider,
)

from tests.integration.task import REPOSITORY

START_S = 120.0
WITHOUT_TOKEN = {"RAY_AUTH_MODE": "disabled"}
"""Of a cluster on loopback, or in a namespace that nobody else reaches."""
FAKE_NODES = {
    "RAY_FAKE_CLUSTER": "1",
    "RAY_OVERRIDE_NODE_ID_FOR_TESTING": FAKE_HEAD_NODE_ID,
    "AUTOSCALER_UPDATE_INTERVAL_S": "1",
}
AUTOSCALER_V2 = {"RAY_enable_autoscaler_v2": "1", "RAY_CLOUD_INSTANCE_ID": FAKE_HEAD_NODE_ID}
"""Variables of a head whose autoscaler adds processes of this machine."""


@dataclass(frozen=True)
class Host:
    """Where a node runs: this machine, or one of its network namespaces."""

    ip: str = "127.0.0.1"
    prefix: tuple[str, ...] = ()
    interface: str = "lo"


@dataclass(frozen=True)
class StartedCluster:
    address: str
    dashboard: str
    env: dict[str, str]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def started_cluster(
    hosts: Sequence[Host],
    *,
    home: Path | None = None,
    autoscaler: Mapping[str, Any] | None = None,
    version: str = "v2",
) -> Iterator[StartedCluster]:
    """One node a host, each with one CPU and an object store of its own.

    Args:
        home: Home folder of the user who starts it; Ray asks for the token that lies there. None:
            it asks for none.
        autoscaler: Node types that Ray's autoscaler may add, as processes of this machine.
        version: v1 or v2 of the autoscaler.
    """
    head, *others = hosts
    port, dashboard_port = free_port(), free_port()
    address, dashboard = f"{head.ip}:{port}", f"http://{head.ip}:{dashboard_port}"
    head_arguments = [
        "--head",
        f"--port={port}",
        "--include-dashboard=true",
        f"--dashboard-host={head.ip}",
        f"--dashboard-port={dashboard_port}",
        f"--ray-client-server-port={free_port()}",
    ]
    with ExitStack() as nodes:
        folder = Path(nodes.enter_context(short_folder()))
        # Ray keeps the address of what was started last below this folder.
        own = {"RAY_TMPDIR": str(folder)} | ({"HOME": str(home)} if home else WITHOUT_TOKEN)
        arguments, of_head = [*head_arguments, f"--temp-dir={folder}/ray"], dict[str, str]()
        if autoscaler is not None:
            config = folder / "autoscaler.json"
            config.write_text(json.dumps(_autoscaler(autoscaler, address)))
            arguments.append(f"--autoscaling-config={config}")
            of_head |= FAKE_NODES | (AUTOSCALER_V2 if version == "v2" else {})
        nodes.enter_context(_node(head, arguments, folder / "head.log", own | of_head))
        _wait_for(dashboard, head)
        for number, host in enumerate(others):
            log = folder / f"node_{number}.log"
            nodes.enter_context(_node(host, [f"--address={address}"], log, own))
        yield StartedCluster(address, dashboard, environment_of(head) | own)


def _autoscaler(node_types: Mapping[str, Any], address: str) -> dict[str, Any]:
    """The config of Ray's fake autoscaler, whose nodes are processes of this machine.

    `ray.cluster_utils.AutoscalingCluster` would end every Ray of the machine first.
    """
    head = {"resources": {"CPU": 1}, "node_config": {}, "max_workers": 0}
    return {
        "cluster_name": "fake_multinode",
        "max_workers": 8,
        "idle_timeout_minutes": 10,
        "provider": {
            "type": "external",  # Ray's wheel lacks the default config of type fake_multinode
            "module": f"{FakeMultiNodeProvider.__module__}.{FakeMultiNodeProvider.__name__}",
            "gcs_address": address,
            "head_node_id": FAKE_HEAD_NODE_ID,
            "launch_multiple": True,
            "use_node_id_as_ip": True,
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
        },
        "auth": {},
        "available_node_types": {"ray.head.default": head, **node_types},
        "head_node_type": "ray.head.default",
        "upscaling_speed": 1.0,
        "file_mounts": {},
        "cluster_synced_files": [],
        "initialization_commands": [],
        **{f"{who}setup_commands": [] for who in ("", "head_", "worker_")},
        **{f"{who}_start_ray_commands": [] for who in ("head", "worker")},
    }


def short_folder() -> tempfile.TemporaryDirectory[str]:
    """Ray puts sockets below it, whose paths may have 107 characters."""
    return tempfile.TemporaryDirectory(prefix="raypo-", dir="/tmp", ignore_cleanup_errors=True)


@contextmanager
def _node(host: Host, arguments: list[str], log: Path, own: Mapping[str, str]) -> Iterator[None]:
    command = [
        *(*host.prefix, str(Path(sys.executable).with_name("ray")), "start", "--block"),
        *arguments,
        f"--node-ip-address={host.ip}",
        f"--dashboard-agent-listen-port={free_port()}",
        "--num-cpus=1",
        "--object-store-memory=200000000",
        "--disable-usage-stats",
    ]
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**environment_of(host), **own},
            start_new_session=True,
        )
    try:
        yield
    finally:
        process.terminate()  # `ray start --block` ends what it has started
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=30)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def environment_of(host: Host) -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    paths = [str(Path(sys.executable).parent), own.get("PATH", "")]
    return own | {
        "PATH": os.pathsep.join(paths),
        "PYTHONPATH": str(REPOSITORY),
        "GLOO_SOCKET_IFNAME": host.interface,
        "CI": "1",
    }


def _wait_for(dashboard: str, host: Host) -> None:
    check = (
        "import sys, urllib.error, urllib.request\n"
        "try: urllib.request.urlopen(sys.argv[1] + '/api/version', timeout=5).read()\n"
        "except urllib.error.HTTPError as error: assert error.code == 401"  # it wants the token
    )
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        command = [*host.prefix, sys.executable, "-S", "-c", check, dashboard]
        if subprocess.run(command, capture_output=True, check=False).returncode == 0:
            return
        time.sleep(1.0)
    raise TimeoutError(f"{dashboard} did not answer in {START_S:g} s.")
