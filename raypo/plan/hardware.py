"""Nodes that a run may get: as a text describes them, or as this machine has them.

    text  = group *("+" group)        8xGPU80G,2 + 64xCPU,256G
    group = item *("," item)
    item  = N "xGPU" M "G"            N GPUs of M GB each, on a node
          | N "xCPU"                  N CPU cores on a node
          | M "G"                     M GB of memory on a node
          | N                         so many nodes of this kind; 1 if it is left out

GB are 1e9 bytes, as data sheets count. What a text does not say is not checked.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

from raypo.config import ConfigError

GB = 10**9
EXAMPLES = "8xGPU80G,2 (two nodes, each with 8 GPUs of 80 GB) or 4xCPU,16G (one, without GPUs)"
NVIDIA_SMI = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
NVIDIA_SMI_TIMEOUT_S = 2.0

_GPUS = re.compile(r"(\d+)xGPU(\d+(?:\.\d+)?)G", re.IGNORECASE)
_CPUS = re.compile(r"(\d+)xCPU", re.IGNORECASE)
_MEMORY = re.compile(r"(\d+(?:\.\d+)?)G", re.IGNORECASE)
_COUNT = re.compile(r"\d+")


@dataclass(frozen=True)
class Node:
    """One machine; None: nobody said, so it is not checked."""

    name: str
    gpus: int = 0
    gpu_bytes: int | None = None
    """Memory of each GPU."""
    cpus: int | None = None
    ram_bytes: int | None = None

    @property
    def resources(self) -> dict[str, float]:
        """As Ray counts them; what nobody said is without bounds."""
        return {"CPU": math.inf if self.cpus is None else self.cpus, "GPU": self.gpus}


def parse_cluster(text: str) -> list[Node]:
    """The nodes of a text like `8xGPU80G,2`; the grammar stands at the head of this module.

    Raises:
        ConfigError: an item is none of the four, comes twice, or is zero.
    """
    nodes: list[Node] = []
    for group in text.split("+"):
        node, count = _group(group, text)
        nodes += [replace(node, name=f"node {len(nodes) + i}") for i in range(count)]
    return nodes


def this_machine() -> list[Node]:
    """What is here, without torch and without Ray."""
    gpus = _gpu_memories()
    return [
        Node(
            "this machine",
            gpus=len(gpus),
            gpu_bytes=min(gpus) if gpus else None,
            cpus=os.cpu_count(),
            ram_bytes=_memory(),
        )
    ]


def _group(group: str, text: str) -> tuple[Node, int]:
    found: dict[str, float] = {}

    def put(name: str, number: str) -> None:
        value = float(number)
        if name in found or value <= 0:
            problem = "comes twice" if name in found else "must be above 0"
            raise _refusal(text, f"{item.strip()!r} {problem}")
        found[name] = value

    for item in group.split(","):
        if match := _GPUS.fullmatch(item.strip()):
            put("gpus", match[1])
            put("gpu_gb", match[2])
        elif match := _CPUS.fullmatch(item.strip()):
            put("cpus", match[1])
        elif match := _MEMORY.fullmatch(item.strip()):
            put("ram_gb", match[1])
        elif match := _COUNT.fullmatch(item.strip()):
            put("count", match[0])
        else:
            raise _refusal(text, f"{item.strip()!r} is no NxGPUmG, NxCPU, mG or number of nodes")
    if not found.keys() - {"count"}:
        raise _refusal(text, f"{group.strip()!r} does not say what a node has")
    node = Node(
        "",
        gpus=int(found.get("gpus", 0)),
        gpu_bytes=int(found["gpu_gb"] * GB) if "gpu_gb" in found else None,
        cpus=int(found["cpus"]) if "cpus" in found else None,
        ram_bytes=int(found["ram_gb"] * GB) if "ram_gb" in found else None,
    )
    return node, int(found.get("count", 1))


def _refusal(text: str, problem: str) -> ConfigError:
    return ConfigError(f"--cluster ({text}): {problem}. Write it like {EXAMPLES}.")


def _gpu_memories() -> list[int]:
    """Bytes of each NVIDIA GPU that this process may use."""
    if shutil.which(NVIDIA_SMI[0]) is None:
        return []
    try:
        done = subprocess.run(
            NVIDIA_SMI, capture_output=True, text=True, timeout=NVIDIA_SMI_TIMEOUT_S, check=True
        )
        memories = [int(line) * 1024**2 for line in done.stdout.split()]
    except (OSError, ValueError, subprocess.SubprocessError):
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return memories
    return memories[: len([each for each in visible.split(",") if each.strip() not in ("", "-1")])]


def _memory() -> int:
    """Bytes of memory, or the container's limit where that is smaller."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            total = min(total, int(Path(limit).read_text()))
        except (OSError, ValueError):  # not there, or "max"
            continue
    return total
