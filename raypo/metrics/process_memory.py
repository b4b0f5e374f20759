"""The most memory that this process has held so far."""

from __future__ import annotations

import sys
from pathlib import Path

GB = 1e9


def peak_memory() -> dict[str, float]:
    """`memory`: peak of resident RAM, shared pages too; `gpu_memory`: what torch took of its GPU.

    In GB (1e9 bytes). The second only where the process has used a GPU: the peak of what torch's
    allocator has reserved there, the memory that no other process can have.
    """
    peaks = {"memory": _resident() / GB}
    torch = sys.modules.get("torch")  # a driver need not import it for this
    if torch is not None and torch.cuda.is_initialized():
        peaks["gpu_memory"] = torch.cuda.max_memory_reserved() / GB
    return peaks


def _resident() -> int:
    """Bytes; the high-water mark that Linux keeps, elsewhere what `getrusage` says.

    On Linux `getrusage` also counts what the parent held when it forked, and psutil has no peak.
    """
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except FileNotFoundError:
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS
    (peak,) = (line.split()[1] for line in lines if line.startswith("VmHWM:"))
    return int(peak) * 1024
