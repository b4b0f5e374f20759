"""Compilation of a model's elementwise parts: norms, rotary embeddings and gated MLPs.

On GPUs these parts are bound by memory traffic, and transformers runs each as several kernels.
Attention stays as it is, and so does every module that does not fit: with an adapter in it, of a
mixture of experts, or with other arguments. The numbers are equal except for rounding, because a
compiled kernel does not round its intermediate results to bfloat16.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from functools import cache
from types import MethodType
from typing import Any

import torch
from torch import nn

from raypo.models.compiled import compiled
from raypo.models.linear import OneDnnLinear

ROTARY = "apply_rotary_pos_emb"
"""Name of transformers' function for rotary embeddings in the module of each architecture."""


def compile_on_gpus(network: nn.Module) -> None:
    """Compile the layers of a model that will run on a GPU; a no-op on CPUs."""
    if torch.cuda.is_available():
        compile_layers(network)


def compile_layers(network: nn.Module, *, backend: str = "inductor") -> int:
    """Compile the norms, the rotary embeddings and the MLPs of a Hugging Face model.

    ZeRO-3 changes a module's weights around its forward pass, so its models must stay as they are.

    Args:
        network: The model, with its adapters.
        backend: Backend of torch.compile.

    Returns:
        The number of modules that were compiled.
    """
    modules = list(_modules(network))
    for module in modules:
        module.forward = MethodType(_compiled(type(module).forward, backend), module)
    # The attention finds the function in the namespace of its architecture.
    for name in {type(module).__module__ for module in network.modules()}:
        function = getattr(sys.modules[name], ROTARY, None)
        if inspect.isfunction(function) and not hasattr(function, "_torchdynamo_orig_callable"):
            setattr(sys.modules[name], ROTARY, _compiled(function, backend))
    return len(modules)


@cache
def _compiled(function: Callable[..., Any], backend: str) -> Callable[..., Any]:
    """Compile a function once, so that all modules of a class share its code."""
    return compiled(function, backend=backend)


def _modules(network: nn.Module) -> Iterator[nn.Module]:
    for name, module in network.named_modules():
        kind = type(module)
        takes_states = len(inspect.signature(kind.forward).parameters) == 2  # self and the states
        is_mlp = _is_mlp(module) and "expert" not in name.lower()
        if takes_states and (_is_norm(module) or is_mlp):
            yield module


def _is_norm(module: nn.Module) -> bool:
    names = {name for name, _ in module.named_parameters()}
    return type(module).__name__.endswith("RMSNorm") and names == {"weight"}


def _is_mlp(module: nn.Module) -> bool:
    linears = {"gate_proj", "up_proj", "down_proj"}
    kind = type(module).__name__
    return (
        kind.endswith("MLP")
        and "Moe" not in kind
        and all(
            type(child) in (nn.Linear, OneDnnLinear)
            if name in linears
            else not list(child.parameters())
            for name, child in module.named_children()
        )
    )
