"""Linear layers that compute in float32: with oneDNN, and from bfloat16 weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from raypo.config import ConfigError

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


class Float32Head(nn.Linear):
    """Head of a language model whose logits are float32, from weights and states in half precision.

    The product of two bfloat16 numbers is exact in float32, so only the sums are rounded. Gradients
    have the dtype of the weights.

    Paper: MiniMax 2025, arXiv:2506.13585, section 3.2 (head in float32 in training and sampling).
    """

    def forward(self, input: Tensor) -> Tensor:
        """Apply the layer: [..., I] -> [..., O] float32."""
        bias = None if self.bias is None else self.bias.float()
        return linear(input.float(), self.weight.float(), bias)


def with_float32_logits(model: Any) -> Any:
    """Make a causal language model in half precision compute float32 logits; return the model.

    Raises:
        ConfigError: its head is not a linear layer.
    """
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise ConfigError(
            f"model.head_dtype (float32): the head of {type(model).__name__} is a "
            f"{type(head).__name__}, not a linear layer. Set model.head_dtype to model."
        )
    if head.weight.dtype in (torch.bfloat16, torch.float16):
        head.__class__ = Float32Head
    return model


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
    if isinstance(layer, Float32Head):
        return float32_product
    if isinstance(layer, OneDnnLinear) and layer.fits(layer.weight):
        return product
    return linear


def float32_product(left: Tensor, right: Tensor) -> Tensor:
    """Compute left [N, I] @ right.T [I, O] from factors in half precision: [N, O] float32."""
    if left.is_cuda:  # without float32 copies of the factors; torch lacks it on CPUs
        return torch.mm(left, right.t(), out_dtype=torch.float32)
    return linear(left.float(), right.float())
