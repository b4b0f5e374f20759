"""Float32 linear layers for CPUs on which MKL, torch's default, is slow."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

# N tokens, I inputs, O outputs.


class OneDnnLinear(nn.Linear):
    """`nn.Linear` that uses oneDNN for float32 on CPU, forward and backward.

    Results agree with MKL's except for rounding: both sum in float32, in different orders.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Apply the layer: [..., I] -> [..., O]."""
        if input.numel() == 0 or not (self.fits(input) and self.fits(self.weight)):
            return super().forward(input)
        flat = _Linear.apply(input.flatten(0, -2), self.weight, self.bias)
        # Shaped out here: torch forbids in-place operations on views that a Function has made.
        return flat.view(*input.shape[:-1], -1)

    @staticmethod
    def fits(tensor: Tensor) -> bool:
        """Return True if oneDNN can handle this tensor."""
        return tensor.dtype == torch.float32 and tensor.device.type == "cpu"


def use_fastest_linear(model: nn.Module) -> None:
    """Turn a model's linear layers into `OneDnnLinear` if that is faster on this CPU."""
    if not mkl_is_slow():
        return
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = OneDnnLinear


@cache
def mkl_is_slow() -> bool:
    """Return True on an AMD CPU with AVX-512, because MKL does not use AVX-512 there.

    The CPU's name decides, not a benchmark, so that runs are reproducible.
    """
    if torch.cuda.is_available() or not torch.backends.mkldnn.is_available():
        return False
    try:
        is_foreign = "AuthenticAMD" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return is_foreign and torch.backends.cpu.get_cpu_capability() == "AVX512"


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(input, weight)
        ctx.has_bias = bias is not None
        return product(input, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        input, weight = ctx.saved_tensors
        grad = grads[0]  # [N, O]
        of_input, of_weight, of_bias = ctx.needs_input_grad
        return (
            product(grad, weight.t()) if of_input else None,
            product(grad.t(), input.t()) if of_weight else None,
            grad.sum(0) if ctx.has_bias and of_bias else None,
        )


def product(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute left [N, I] @ right.T [I, O] + bias [O] with oneDNN: [N, O]."""
    return torch.ops.mkldnn._linear_pointwise(left, right, bias, "none", [], "")


def product_for(layer: nn.Linear) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the function with which a layer computes left [N, I] @ right.T [I, O]."""
    if isinstance(layer, OneDnnLinear) and layer.fits(layer.weight):
        return product
    return linear
