"""Value and score heads that compute in float32, whatever the dtype of the backbone.

bfloat16 has about three significant digits, too few for scores: after 10 come 10.0625 and 10.125.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from raypo.models.shares import whole

HEADS = ("score", "classifier", "classification_head")
"""Names of classification heads."""


class Float32Linear(nn.Linear):
    """Linear layer that computes in float32, whatever the dtype of its input.

    Its weights are float32 too (float64 stays float64). In bfloat16 training, DeepSpeed rounds
    every parameter and keeps a float32 master weight. This layer then multiplies with the master
    weights, while gradients go to the parameters.
    """

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool = True, like: Tensor
    ) -> None:
        """Create a layer with newly initialised weights.

        Args:
            in_features: Size of the input.
            out_features: Size of the output.
            bias: Add a bias.
            like: A weight of the backbone. It determines the device, and the dtype if that is wider
                than float32.
        """
        dtype = torch.promote_types(like.dtype, torch.float32)
        super().__init__(in_features, out_features, bias, device=like.device, dtype=dtype)
        self.masters: dict[str, Tensor] = {}
        """Float32 master weights by parameter name. Empty if the parameters are not rounded."""

    def forward(self, input: Tensor) -> Tensor:
        """Apply the layer: [..., in] of any dtype -> [..., out], float32 or float64."""
        weight = self._exact("weight")
        assert weight is not None
        return linear(input.to(weight.dtype), weight, self._exact("bias"))

    def _exact(self, name: str) -> Tensor | None:
        parameter, master = getattr(self, name), self.masters.get(name)
        if parameter is None or master is None:
            return parameter
        through = parameter - parameter.detach()  # 0; routes the gradient to the parameter
        return master + through.to(master.dtype)


def with_float32_heads(model: Any) -> Any:
    """Replace the linear layers of a classifier's head by `Float32Linear`; return the model."""
    for name in HEADS:
        head = getattr(model, name, None)
        if isinstance(head, nn.Linear):
            setattr(model, name, _float32(head))
        elif isinstance(head, nn.Module):
            for inner, layer in list(head.named_modules()):
                if isinstance(layer, nn.Linear):
                    head.set_submodule(inner, _float32(layer))
    return model


def _float32(layer: nn.Linear) -> Float32Linear:
    has_bias = layer.bias is not None
    exact = Float32Linear(layer.in_features, layer.out_features, bias=has_bias, like=layer.weight)
    with whole(layer):
        exact.load_state_dict(layer.state_dict())
    return exact
