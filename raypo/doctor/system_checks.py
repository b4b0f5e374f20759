"""Checks of a machine's limits, shared memory, network, compilers and sandbox."""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
import socket
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from ipaddress import ip_address
from pathlib import Path

import psutil

from raypo.cluster.devices import SHARED_MEMORY, check_shared_memory
from raypo.cluster.hardware import CGROUP, GB, memory_bytes
from raypo.cluster.network import GLOO_INTERFACE, interface_of, is_loopback
from raypo.config import AnyConfig, OnlineConfig
from raypo.custom.loader import source_files
from raypo.doctor.result import Result, fault, ok, skipped, warning
from raypo.inputs import functions_of_user
from raypo.learner.deepspeed_config import Sharding
from raypo.tools.sandbox import PythonSandbox, SandboxError

RAY_OPEN_FILES = 65_536
"""Limit of open files that Ray sets for its processes, up to the hard limit."""
OPEN_FILES = (1024, 4096)
"""Bounds (fault, warning) of the limit of open files: a Ray with one run needs more than the first,
and Ray warns below the second."""
PROCESSES = (512, 4096)
"""Bounds (fault, warning) of the limit of processes and threads: a run on one core has about 300,
and each engine, worker and reward process adds some 50 to 100."""
RAY_SHARE = 0.3
"""Share of RAM that Ray takes for its object store."""


def open_files() -> Result:
    """Check the limit of open files after Ray has raised it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        hard = RAY_OPEN_FILES
    limit = max(soft, min(hard, RAY_OPEN_FILES))
    return _limit(limit, OPEN_FILES, "open files", "ulimit -n (the hard limit: ulimit -Hn)")


def processes() -> Result:
    """Check the limits of processes and threads, for the user and for the container."""
    limits = {}
    if os.geteuid():  # it does not hold for root
        limits["ulimit -u"] = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    with suppress(OSError, ValueError):  # not there, or "max"
        limits["the container's limit (docker run --pids-limit)"] = int(
            (CGROUP / "pids.max").read_text()
        )
    limits = {name: limit for name, limit in limits.items() if limit != resource.RLIM_INFINITY}
    if not limits:
        return ok("no limit of processes")
    name = min(limits, key=lambda name: limits[name])
    return _limit(limits[name], PROCESSES, "processes and threads", name)


def _limit(limit: int, bounds: tuple[int, int], what: str, where: str) -> Result:
    least, enough = bounds
    observed, remedy = f"at most {limit} {what}", f"Raise {where} to {enough} or more."
    if limit < least:
        return fault(observed, f"Ray and its workers need more than {least}, so some fail.", remedy)
    if limit < enough:
        return warning(observed, "Runs with several workers or engines may need more.", remedy)
    return ok(observed)


def shared_memory(num_gpus: int) -> Result:
    """Compare shared memory with the needs of several GPUs, and of Ray's object store.

    Args:
        num_gpus: Number of GPUs that the run uses on this machine.

    Raises:
        ConfigError: it is too small for several GPUs.
    """
    if not os.path.isdir(SHARED_MEMORY):
        return skipped(f"there is no {SHARED_MEMORY}")
    if num_gpus > 1:
        check_shared_memory()
    usage = shutil.disk_usage(SHARED_MEMORY)
    store = int(RAY_SHARE * memory_bytes())
    observed = f"{usage.free / GB:.3g} of {usage.total / GB:.3g} GB are free"
    # Ray 2.60 lowers the size of its object store to what is free, but not below 10 GB
    # (`resolve_object_store_memory`). If that does not fit, the store is on a disk.
    if usage.free < min(store, 10 * GB):
        return warning(
            observed,
            f"Ray's object store takes up to {store / GB:.2g} GB. It will be in files on a disk, "
            "which makes pushes and batches slow.",
            "Start the container with --shm-size=16g or --ipc=host, or remove old files of "
            f"{SHARED_MEMORY}.",
        )
    return ok(observed)


def gloo(num_nodes: int, node: str) -> Result:
    """Find the address by which the learner's workers will connect to each other on CPUs.

    Args:
        num_nodes: Number of nodes.
        node: Ray's address of this node. Empty means that there is no cluster.
    """
    interfaces = psutil.net_if_addrs()
    names, host = os.environ.get(GLOO_INTERFACE), socket.gethostname()
    wanted = f"the interface of the address {node}" if node else "an existing interface"
    remedy = f"Unset {GLOO_INTERFACE}, or set it to {wanted}."
    if names is not None:
        name, source = names.split(",")[0], f"{GLOO_INTERFACE} ({names})"
    elif is_loopback(host):  # raypo then sets the interface of Ray's address for the workers
        name = interface_of(node) or interface_of("127.0.0.1") or "lo"
        source = f"the host name {host}, which resolves to loopback"
    else:
        address = socket.gethostbyname(host)
        observed = f"{address}, the address of the host name {host}"
        if interface_of(address) is not None:
            return ok(observed)
        status = fault if num_nodes > 1 else warning
        return status(
            f"{observed}: no interface has it",
            "Workers of a run would use the loopback interface, or fail to connect to each other.",
            f"Correct the entry of {host} in /etc/hosts, or set {GLOO_INTERFACE}.",
        )
    if name not in interfaces:
        return fault(
            f"{source}: there is no interface {name}, only {', '.join(sorted(interfaces))}",
            "The workers of a run could not connect to each other.",
            remedy,
        )
    addresses = [a.address for a in interfaces[name] if a.family == socket.AF_INET]
    observed = f"{', '.join(addresses) or 'no IPv4 address'} of the interface {name}, by {source}"
    if num_nodes > 1 and all(ip_address(address).is_loopback for address in addresses):
        meaning = "Workers on other nodes cannot reach this one, so all workers would hang."
        return fault(observed, meaning, remedy)
    return ok(observed)


def ports(config: AnyConfig | None, wanted: Sequence[int]) -> Result:
    """Check that a server can listen on the given ports and on `rollout.endpoint_host`.

    Args:
        config: Config of the run, or None.
        wanted: Ports that the user will need.
    """
    places = [("", port) for port in wanted]  # on every address
    if isinstance(config, OnlineConfig) and config.rollout.has_agent:
        places.append((config.rollout.endpoint_host, 0))
    for host, port in places:
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            socket.create_server((host, port), family=family).close()
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno else str(error)
            if port:
                observed = f"port {port}: {reason}"
                return fault(observed, "A server could not start there.", "Choose another port.")
            return fault(
                f"rollout.endpoint_host ({host}): {reason}",
                "Agents could not call the policy.",
                "Set it to an address of this machine, or 0.0.0.0 for all.",
            )
    if not places:
        return skipped("no --port given; Ray and raypo choose free ports")
    return ok(f"free: {', '.join(str(port or host) for host, port in places)}")


def compiler(config: AnyConfig | None) -> Result:
    """Check for the compiler that DeepSpeed needs to run an off-loaded optimizer on CPUs."""
    learner = config and config.learner
    if (
        learner is None
        or not Sharding.of(
            learner, dtype="bfloat16", num_workers=learner.num_workers, on_gpu=True
        ).offload_optimizer
    ):
        return skipped("no optimizer is off-loaded to the CPU")
    missing = [
        name
        for name, is_there in (
            ("g++", shutil.which(os.environ.get("CXX", "g++"))),
            ("ninja", shutil.which("ninja") or find_spec("ninja")),
        )
        if not is_there
    ]
    if missing:
        return fault(
            f"{' and '.join(missing)} not found",
            "DeepSpeed compiles its CPU optimizer at startup.",
            "Install them (apt install g++, pip install ninja), or remove offload_optimizer from "
            "learner.deepspeed.",
        )
    return ok("g++ and ninja for DeepSpeed's optimizer on CPUs")


def sandbox(config: AnyConfig | None) -> Result:
    """Run a one-line program in the sandbox if the user's code uses it."""
    if config is None or not _names_sandbox(config):
        return skipped("no function of the run uses raypo.tools.PythonSandbox")
    try:
        ran = asyncio.run(PythonSandbox(time_limit_s=4.0).run("print(6 * 7)"))
    except SandboxError as error:
        reason, _, remedy = str(error).partition(". ")
        return fault(reason, "Programs written by the policy could not run.", remedy)
    if ran.output.strip() != "42":
        return fault(
            f"a one-line program printed {ran.output.strip()!r}, status {ran.exit_code}",
            "Programs written by the policy would fail.",
            "Look at docs/tools.md for what the sandbox needs.",
        )
    return ok("a one-line program ran")


def _names_sandbox(config: AnyConfig) -> bool:
    specs = {spec for _, spec in functions_of_user(config)}
    files: set[Path] = {file for spec in specs for file in source_files(spec)}
    return any("PythonSandbox" in file.read_text(errors="replace") for file in files)
