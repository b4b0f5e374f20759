"""Peak memory of this process."""

from __future__ import annotations

import sys
from pathlib import Path

GB = 1e9


def peak_memory() -> dict[str, float]:
    """Return the peak memory of this process so far, in GB (1e9 bytes).

    `memory` is the peak resident RAM, including shared pages. `gpu_memory` is the peak that torch's
    allocator has reserved. No other process can use reserved memory. `gpu_memory` is absent if the
    process has not used a GPU.
    """
    peaks = {"memory": _resident() / GB}
    torch = sys.modules.get("torch")  # do not import torch just for this
    if torch is not None and torch.cuda.is_initialized():
        peaks["gpu_memory"] = torch.cuda.max_memory_reserved() / GB
    return peaks


def _resident() -> int:
    """Return the peak resident memory in bytes, from /proc on Linux, else from `getrusage`."""
    try:
        # On Linux, getrusage includes the parent's memory at the fork, and psutil has no peak.
        lines = Path("/proc/self/status").read_text().splitlines()
    except FileNotFoundError:
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS
    (peak,) = (line.split()[1] for line in lines if line.startswith("VmHWM:"))
    return int(peak) * 1024
