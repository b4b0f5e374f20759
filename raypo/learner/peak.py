"""Peak FLOP/s of a device, the basis of MFU."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from raypo.cluster.gpus import gpu_of
from raypo.models.linear import mkl_is_slow, product

MEASURED_S = 0.2
SIZES = {"cpu": 1024, "cuda": 8192}
"""Number of rows and columns of the matrices in the measured matmul, by device type."""


def peak_flops(dtype: str, declared_tflops: float | None = None) -> float:
    """Return the peak FLOP/s of this worker's device.

    It is taken from the config, else from the GPU's data sheet, else it is measured.

    Args:
        dtype: float32 or bfloat16.
        declared_tflops: Value from the config, in 1e12 FLOP/s. None means that it is not set.
    """
    if declared_tflops is not None:
        return declared_tflops * 1e12
    if torch.cuda.is_available():
        gpu = gpu_of(torch.cuda.get_device_name())
        return gpu.tflops(dtype) * 1e12 if gpu else measured_flops(dtype, "cuda")
    return measured_flops(dtype, "cpu")


def measured_flops(dtype: str, device: str) -> float:
    """Measure FLOP/s as the fastest of several matmuls of two square matrices.

    A CPU matmul uses this process's threads. Models approach this bound but do not exceed it.
    """
    size = SIZES[device]
    left, right = torch.ones(2, size, size, dtype=getattr(torch, dtype), device=device)
    is_ours = device == "cpu" and dtype == "float32" and mkl_is_slow()
    multiply = product if is_ours else torch.mm  # as the models' linear layers do
    multiply(left, right)  # warm-up
    return 2 * size**3 / _fastest(lambda: multiply(left, right), device)


def _fastest(work: Callable[[], object], device: str) -> float:
    """Return the duration of the fastest of several calls, in seconds."""
    best, deadline = float("inf"), time.perf_counter() + MEASURED_S
    while best == float("inf") or time.perf_counter() < deadline:
        _finish(device)
        begin = time.perf_counter()
        work()
        _finish(device)
        best = min(best, time.perf_counter() - begin)
    return best


def _finish(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
