"""Replay of the experts that an engine chose, in place of the choice of the learner's routers.

R3, rollout routing replay (Ma et al. 2025, arXiv:2510.11370). The router computes its
probabilities as usual; raypo gathers them at the replayed experts, and transformers normalises
them, if the architecture does. Each architecture keeps its rule, and gradients reach the router.

N tokens of a pass, L layers with experts, E experts of a layer, k experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from raypo.models.routers import routers_of


class _Choice(TorchFunctionMode):
    """Replacement of the top-k selection over all experts in the forward pass of one router."""

    def __init__(self, experts: Tensor, num_experts: int) -> None:
        """Store the experts, int [N, k]."""
        super().__init__()
        self._experts, self._num_experts = experts, num_experts
        self.is_used = False

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        # Grouped routers also use topk for groups, of which there are fewer.
        if function is not torch.topk or args[0].shape[1:] != (self._num_experts,):
            return function(*args, **kwargs)
        self.is_used = True
        scores, experts = args[0], self._experts.long()
        if kwargs.get("sorted", True):  # in the order of torch.topk, for equal rounding
            order = scores.detach().gather(1, experts).argsort(dim=1, descending=True, stable=True)
            experts = experts.gather(1, order)
        return scores.gather(1, experts), experts


def replay(model: Any, experts: Tensor | None) -> None:
    """Set the experts of all passes until the next call.

    They remain after a pass, because activation checkpointing repeats it in the backward pass.

    Args:
        model: A Hugging Face model.
        experts: Experts of each token, int [N, L, k]. None means the routers' own choice.

    Raises:
        RuntimeError: the model does not have L MoE layers.
    """
    backbone = model.base_model
    if experts is None and not getattr(backbone, "raypo_replays", False):
        return
    backbone.raypo_replays = experts is not None
    routers = routers_of(backbone)
    if experts is not None and len(routers) != experts.shape[1]:
        raise RuntimeError(
            f"the engine recorded experts of {experts.shape[1]} layers, but the learner's model "
            f"has {len(routers)} layers with routers. Set rollout.router_replay to off."
        )
    for layer, router in enumerate(routers):
        vars(router).pop("forward", None)
        if experts is not None:
            router.forward = partial(_forward, router, experts[:, layer])


def _forward(router: Any, experts: Tensor, states: Tensor) -> Any:
    with _Choice(experts, router.num_experts) as choice:
        output = type(router).forward(router, states)
    if not choice.is_used:
        raise RuntimeError(
            f"{type(router).__name__} did not select its experts with torch.topk, so they cannot "
            "be replayed. Set rollout.router_replay to off."
        )
    return output
