"""The most FLOP/s that a learner worker's device can do: what MFU is measured against."""

from __future__ import annotations

import time

import torch

from raypo.models.linear import mkl_is_slow, product

DATA_SHEETS: tuple[tuple[str, float, float], ...] = (
    ("B200", 2250.0, 75.0),
    ("H200", 989.0, 67.0),
    ("H100 PCIe", 756.0, 51.0),
    ("H100 NVL", 835.0, 60.0),
    ("H100", 989.0, 67.0),
    ("A100", 312.0, 19.5),
    ("L40S", 362.0, 91.6),
    ("L4", 121.0, 30.3),
)
"""Part of the device's name, dense TFLOP/s in bfloat16 and in float32; the first that fits."""

MEASURED_S = 0.2
SIZES = {"cpu": 1024, "cuda": 8192}
"""Rows and columns of the matrices of a measured product."""


def peak_flops(dtype: str, declared_tflops: float | None = None) -> float:
    """FLOP/s of this worker's device: declared, else of its data sheet, else measured.

    Args:
        dtype: float32 or bfloat16.
        declared_tflops: What the config says, in 1e12 FLOP/s.
    """
    if declared_tflops is not None:
        return declared_tflops * 1e12
    if torch.cuda.is_available():
        name = torch.cuda.get_device_name()
        for part, bfloat16, float32 in DATA_SHEETS:
            if part in name:
                return (bfloat16 if dtype == "bfloat16" else float32) * 1e12
        return measured_flops(dtype, "cuda")
    return measured_flops(dtype, "cpu")


def measured_flops(dtype: str, device: str) -> float:
    """FLOP/s of the fastest of several products of two square matrices, on this process's threads.

    What a matrix library reaches here, so a bound that models come near to but do not pass.
    """
    size = SIZES[device]
    left, right = torch.ones(2, size, size, dtype=getattr(torch, dtype), device=device)
    best, deadline = float("inf"), time.perf_counter() + MEASURED_S
    is_ours = device == "cpu" and dtype == "float32" and mkl_is_slow()
    multiply = product if is_ours else torch.mm  # as the models' linear layers do
    multiply(left, right)  # the first one sets the library up
    while best == float("inf") or time.perf_counter() < deadline:
        _finish(device)
        begin = time.perf_counter()
        multiply(left, right)
        _finish(device)
        best = min(best, time.perf_counter() - begin)
    return 2 * size**3 / best


def _finish(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
