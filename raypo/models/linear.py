"""Linear layers in float32 on CPUs for which MKL, torch's choice, has no fast path."""

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
    """`nn.Linear` whose float32 products on CPU are oneDNN's, forward and backward.

    The sums are float32 too, in another order: results agree to rounding.
    """

    def forward(self, input: Tensor) -> Tensor:
        """[..., I] -> [..., O]."""
        if input.numel() == 0 or not (self.fits(input) and self.fits(self.weight)):
            return super().forward(input)
        return _Linear.apply(input, self.weight, self.bias)  # type: ignore[no-any-return]

    @staticmethod
    def fits(tensor: Tensor) -> bool:
        """Whether oneDNN takes it."""
        return tensor.dtype == torch.float32 and tensor.device.type == "cpu"


def use_fastest_linear(model: nn.Module) -> None:
    """Let the linear layers of a model be `OneDnnLinear`, where that is known to be faster here."""
    if not mkl_is_slow():
        return
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = OneDnnLinear


@cache
def mkl_is_slow() -> bool:
    """Whether this is a CPU with AVX-512 that is not Intel's: MKL does not use AVX-512 there.

    Decided by name and not by a trial, so that a run is the same each time.
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
        flat = product(input.flatten(0, -2), weight, bias)
        return flat.view(*input.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        input, weight = ctx.saved_tensors
        grad = grads[0].flatten(0, -2)  # [N, O]
        of_input, of_weight, of_bias = ctx.needs_input_grad
        return (
            product(grad, weight.t()).view(input.shape) if of_input else None,
            product(grad.t(), input.flatten(0, -2).t()) if of_weight else None,
            grad.sum(0) if ctx.has_bias and of_bias else None,
        )


def product(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """oneDNN's left [N, I] times right [O, I] transposed, plus bias [O]: [N, O]."""
    return torch.ops.mkldnn._linear_pointwise(left, right, bias, "none", [], "")


def product_for(layer: nn.Linear) -> Callable[[Tensor, Tensor], Tensor]:
    """The product left [N, I] times right [O, I] transposed as a layer makes it: [N, O]."""
    if isinstance(layer, OneDnnLinear) and layer.fits(layer.weight):
        return product
    return linear
