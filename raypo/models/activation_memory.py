"""Less memory for the activations of long rows: checkpoints on the host, and MLPs in tiles.

N tokens, H hidden size.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint


def checkpoint_layers(network: Any, *, on_host: bool = False) -> None:
    """Keep only the inputs of a Hugging Face model's layers; recompute the rest in the backward.

    Args:
        network: The model.
        on_host: Keep the inputs in pinned host memory. On CPUs they would only be copied.
    """
    network.gradient_checkpointing_enable({"use_reentrant": False})
    for layer in network.modules() if on_host else ():
        if hasattr(layer, "_gradient_checkpointing_func"):
            layer._gradient_checkpointing_func = partial(
                _with_inputs_on_host, layer._gradient_checkpointing_func
            )


def _with_inputs_on_host(checkpointed: Callable[..., Any], *arguments: Any) -> Any:
    # A checkpoint saves its inputs outside of its own hooks, so they reach these.
    with save_on_cpu(pin_memory=torch.cuda.is_available()):
        return checkpointed(*arguments)


def tile_mlps(network: nn.Module, tokens: int) -> int:
    """Compute a model's dense MLPs for a number of tokens at a time, and again in the backward.

    Their activations, several times as wide as the hidden states, then exist for one tile only. The
    results are the same. The gradients of the weights are summed over tiles in the weights' dtype.

    Args:
        network: A Hugging Face model. Its dense MLPs may have adapters.
        tokens: Number of tokens of a tile.

    Returns:
        The number of MLPs that were changed.
    """
    mlps = dense_mlps(network)
    for mlp in mlps:
        mlp.forward = partial(_in_tiles, mlp.forward, tokens)
    return len(mlps)


def dense_mlps(network: nn.Module) -> list[nn.Module]:
    """Return the MLPs whose only argument is the hidden states, except those of experts.

    Mixtures of experts may have none, and some architectures (OPT) have no modules for their MLPs.
    """
    return [module for name, module in network.named_modules() if _is_dense_mlp(name, module)]


def _is_dense_mlp(name: str, module: nn.Module) -> bool:
    kind = type(module)
    takes_states = len(inspect.signature(kind.forward).parameters) == 2  # self and the states
    is_mlp = kind.__name__.endswith("MLP") and "Moe" not in kind.__name__
    return takes_states and is_mlp and "expert" not in name.lower()


def _in_tiles(forward: Callable[[Tensor], Tensor], tokens: int, states: Tensor) -> Tensor:
    """Apply a function to states [..., N, H], tile by tile."""
    if states.shape[-2] <= tokens:
        return forward(states)
    tiles = states.split(tokens, dim=-2)
    if torch.is_grad_enabled():
        again = partial(checkpoint, forward, use_reentrant=False, preserve_rng_state=False)
        return torch.cat([again(tile) for tile in tiles], dim=-2)
    return torch.cat([forward(tile) for tile in tiles], dim=-2)
