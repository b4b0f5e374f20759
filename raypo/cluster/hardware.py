"""Nodes for a plan: parsed from the option `--cluster`, or detected on this machine.

Grammar of the option:

    nodes = group *("+" group)        8xGPU80G,2 + 64xCPU,256G
    group = item *("," item)
    item  = N "x" KIND                N GPUs of a kind, like 8xH100 or 8xA100-80G, on a node
          | N "xGPU" M "G"            N GPUs of M GB each, of unknown kind: no times are predicted
          | N "xCPU"                  N CPU cores on a node
          | M "G" or M "T"            M GB or TB of memory on a node
          | M "Gbit"                  M Gbit/s from a node to others; default: typical for the GPU
          | N                         N nodes of this kind; default 1

The number of nodes may also precede the GPUs, like 2x8xH100.

A GB is 1e9 bytes, as in data sheets. Omitted resources are not checked.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from raypo.cluster.gpus import GPUS, Gpu, gpu_of
from raypo.cluster.placement import LabelledResources, Resources
from raypo.config import ConfigError

GB = 10**9
EXAMPLES = "8xH100,2 (two nodes, each with 8 GPUs; 8xGPU80G says only their memory) or 4xCPU,16G"
NVIDIA_SMI = ["nvidia-smi", "--query-gpu=memory.total,name", "--format=csv,noheader,nounits"]
NVIDIA_SMI_TIMEOUT_S = 2.0

CGROUP = Path("/sys/fs/cgroup")
"""Folder with a container's resource limits, in the format of cgroup version 2 or 1."""
MEMINFO = Path("/proc/meminfo")

_ITEMS = [
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        r"(?:(?P<count>\d+)x)?(?P<gpus>\d+)xGPU(?P<gpu_gb>\d+(?:\.\d+)?)G",
        r"(?P<cpus>\d+)xCPU",
        r"(?:(?P<count>\d+)x)?(?P<gpus>\d+)x(?P<kind>[a-z][\w-]*)",
        r"(?P<gbit>\d+(?:\.\d+)?)Gbit",
        r"(?P<ram_gb>\d+(?:\.\d+)?)G",
        r"(?P<ram_tb>\d+(?:\.\d+)?)T",
        r"(?P<count>\d+)",
    )
]
"""Patterns of an item. The named groups capture its quantities."""


@dataclass(frozen=True)
class Node:
    """Machine and its resources. None means that a quantity is unknown and is not checked."""

    name: str
    gpus: int = 0
    gpu_bytes: int | None = None
    """Memory of each GPU in bytes."""
    cpus: int | None = None
    ram_bytes: int | None = None
    gpu: Gpu | None = None
    """Kind of the node's GPUs."""
    network_gbs: float | None = None
    """Network bandwidth to other nodes, in GB/s."""
    labels: Mapping[str, str] | None = None
    """Ray's labels of the node."""

    @property
    def resources(self) -> Resources:
        """Resources in Ray's form. An unknown number of CPUs counts as unlimited."""
        resources: Resources = {
            "CPU": math.inf if self.cpus is None else self.cpus,
            "GPU": self.gpus,
        }
        return resources if self.labels is None else LabelledResources(resources, self.labels)


def parse_cluster(text: str) -> list[Node]:
    """Parse nodes from a string like `8xGPU80G,2`. The grammar is in this module's docstring.

    Raises:
        ConfigError: an item is unknown, given twice, or zero.
    """
    nodes: list[Node] = []
    for group in text.split("+"):
        node, count = _parse_group(group, text)
        nodes += [replace(node, name=f"node {len(nodes) + i}") for i in range(count)]
    return nodes


def this_machine() -> list[Node]:
    """Detect this machine's resources without torch and Ray."""
    gpus = _detect_gpus()
    return [
        Node(
            "this machine",
            gpus=len(gpus),
            gpu_bytes=min(size for size, _ in gpus) if gpus else None,
            gpu=gpu_of(gpus[0][1]) if gpus else None,
            cpus=cpu_count(),
            ram_bytes=memory_bytes(),
        )
    ]


def cpu_count() -> int:
    """Return the number of CPU cores, or the container's limit if it is lower, like Ray."""
    cores = os.cpu_count() or 1
    for names in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        try:
            text = " ".join((CGROUP / name).read_text() for name in names)
            quota, period = map(int, text.split())
        except (OSError, ValueError):  # the file is missing, or contains "max"
            continue
        if quota > 0:
            cores = min(cores, max(1, quota // period))
    return cores


def _parse_group(group: str, text: str) -> tuple[Node, int]:
    quantities: dict[str, float] = {}
    gpu: Gpu | None = None
    for item in map(str.strip, group.split(",")):
        match = next(filter(None, (pattern.fullmatch(item) for pattern in _ITEMS)), None)
        groups = match.groupdict() if match else {}
        item_values: dict[str, str | float] = {k: v for k, v in groups.items() if v is not None}
        if terabytes := item_values.pop("ram_tb", None):
            item_values["ram_gb"] = 1000 * float(terabytes)
        if kind := str(item_values.pop("kind", "")):
            gpu = next((gpu for gpu in GPUS if gpu.name.lower() == kind.lower()), None)
            item_values = {**item_values, "gpu_gb": gpu.memory_gb} if gpu else {}
        if not item_values:
            kinds = ", ".join(gpu.name for gpu in GPUS)
            raise _parse_error(
                text,
                f"{item!r} is not NxKIND ({kinds}), NxGPUmG, NxCPU, mG, mT, mGbit or a number "
                "of nodes",
            )
        for name, value in item_values.items():
            if name in quantities or float(value) <= 0:
                problem = "comes twice" if name in quantities else "must be above 0"
                raise _parse_error(text, f"{item!r} {problem}")
            quantities[name] = float(value)
    if not quantities.keys() - {"count", "gbit"}:
        raise _parse_error(text, f"{group.strip()!r} does not describe a node")
    node = Node(
        "",
        gpus=int(quantities.get("gpus", 0)),
        gpu_bytes=int(quantities["gpu_gb"] * GB) if "gpu_gb" in quantities else None,
        cpus=int(quantities["cpus"]) if "cpus" in quantities else None,
        ram_bytes=int(quantities["ram_gb"] * GB) if "ram_gb" in quantities else None,
        gpu=gpu,
        network_gbs=quantities["gbit"] / 8 if "gbit" in quantities else None,
    )
    return node, int(quantities.get("count", 1))


def _parse_error(text: str, problem: str) -> ConfigError:
    return ConfigError(f"--cluster ({text}): {problem}. Write it like {EXAMPLES}.")


def _detect_gpus() -> list[tuple[int, str]]:
    """Return the memory in bytes and the name of each NVIDIA GPU that this process may use."""
    if shutil.which(NVIDIA_SMI[0]) is None:
        return []
    try:
        completed = subprocess.run(
            NVIDIA_SMI, capture_output=True, text=True, timeout=NVIDIA_SMI_TIMEOUT_S, check=True
        )
        rows = [line.split(",", 1) for line in completed.stdout.splitlines() if line.strip()]
        memories = [(int(size) * 1024**2, name.strip()) for size, name in rows]
    except (OSError, ValueError, subprocess.SubprocessError):
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return memories
    return memories[: len([name for name in visible.split(",") if name.strip() not in ("", "-1")])]


def memory_bytes() -> int:
    """Return the size of the RAM in bytes, or the container's limit if it is lower."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            total = min(total, int((CGROUP / name).read_text()))
        except (OSError, ValueError):  # the file is missing, or contains "max"
            continue
    return total


def available_memory() -> int:
    """Return the bytes of RAM that are free or easy to free, within the container's limit."""
    free = memory_bytes()
    with suppress(FileNotFoundError):  # macOS has no such file
        lines = (line.split() for line in MEMINFO.read_text().splitlines())
        free = next(int(size) * 1024 for name, size, *_ in lines if name == "MemAvailable:")
    for folder, used, cache in (
        ("", "memory.current", "inactive_file"),
        ("memory/", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            in_use = int((CGROUP / f"{folder}{used}").read_text())
            stat = (CGROUP / f"{folder}memory.stat").read_text().split()
        except (OSError, ValueError):
            continue
        freeable = int(stat[stat.index(cache) + 1]) if cache in stat else 0
        free = min(free, memory_bytes() - in_use + freeable)
    return max(0, free)
