"""Data-sheet values of GPUs: FLOP/s without sparsity, and link bandwidths in one direction."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """GPU model, with sizes in GB (1e9 bytes), speeds in TFLOP/s and bandwidths in GB/s."""

    name: str
    memory_gb: float
    bfloat16_tflops: float
    float32_tflops: float
    memory_gbs: float
    """Bandwidth of the GPU's own memory."""
    link_gbs: float
    """Bandwidth to another GPU of the node, over NVLink, or over PCIe if there is no NVLink."""
    host_gbs: float
    """Bandwidth to the node's RAM, over PCIe."""
    network_gbs: float
    """Network bandwidth of a typical node, divided by its number of GPUs."""

    def tflops(self, dtype: str) -> float:
        """Return the speed of matrix multiplications in a dtype, in TFLOP/s."""
        return self.bfloat16_tflops if dtype == "bfloat16" else self.float32_tflops


GPUS = (
    Gpu("B200", 180, 2250.0, 75.0, 8000, 900, 55, 50),
    Gpu("H200", 141, 989.0, 67.0, 4800, 450, 55, 50),
    Gpu("H100-PCIe", 80, 756.0, 51.0, 2000, 55, 55, 25),
    Gpu("H100-NVL", 94, 835.0, 60.0, 3900, 300, 55, 25),
    Gpu("H100", 80, 989.0, 67.0, 3350, 450, 55, 50),
    Gpu("A100-80G", 80, 312.0, 19.5, 2039, 300, 25, 25),
    Gpu("A100", 40, 312.0, 19.5, 1555, 300, 25, 25),
    Gpu("L40S", 48, 362.0, 91.6, 864, 25, 25, 12.5),
    Gpu("L4", 24, 121.0, 30.3, 300, 12, 12, 6),
    Gpu("A10G", 24, 70.0, 31.2, 600, 25, 25, 6),
)
"""Known GPU models. `gpu_of` returns the first match, so for example H100-NVL precedes H100. If a
GPU is sold with two memory sizes under one name, the smaller size is listed. GPUs without bfloat16,
like V100 and T4, are refused (`cluster.devices`)."""


def gpu_of(name: str) -> Gpu | None:
    """Find a GPU model by the name that nvidia-smi, Ray or torch uses, like NVIDIA H100 80GB HBM3.

    Returns:
        The GPU, or None if it is unknown.
    """
    name_parts = re.split(r"[^A-Z0-9]+", name.upper())
    return next(
        (
            gpu
            for gpu in GPUS
            if all(
                part in name_parts or f"{part}B" in name_parts
                for part in gpu.name.upper().split("-")
            )
        ),
        None,
    )
