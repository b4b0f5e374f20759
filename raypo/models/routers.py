"""Load of a mixture's experts by the decisions of its routers, and the loss that balances it.

L layers with experts, E experts of a layer, k experts of a token, N tokens of a pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from raypo.models.model_files import ROUTED

_recorder: ContextVar[Routing | None] = ContextVar("routing", default=None)


class Routing:
    """Sums of routing decisions over the tokens of one or several passes.

    Counted are the tokens whose state predicts a response token, once for each token that they
    predict. So the sums depend neither on padding nor on the split into microbatches.
    """

    def __init__(self, *, with_gradient: bool, is_replayed: bool = False) -> None:
        self._with_gradient, self._is_replayed = with_gradient, is_replayed
        self._counts: dict[nn.Module, Tensor] = {}
        self._probabilities: dict[nn.Module, Tensor] = {}
        self._entropies: dict[nn.Module, Tensor] = {}
        self._replaced: dict[nn.Module, Tensor] = {}
        self._states = torch.zeros(0)
        self._weights: Tensor | None = None  # [N] of the current pass
        self._decisions: list[tuple[nn.Module, Tensor, Tensor]] = []  # of the current pass

    def begin_pass(self, states: Tensor) -> None:
        """Set the tokens [M] of the next pass that count, as indices among its N tokens."""
        self.end_pass()
        self._states, self._weights = states, None

    def record(self, router: nn.Module, _: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
        """Keep the decisions of a layer: logits [N, E], weights [N, k] and indices [N, k].

        With a gradient nothing is computed here, because activation checkpointing repeats a layer's
        forward pass without this, and both must save the same tensors.
        """
        logits, _, experts = output
        if self._with_gradient:
            self._decisions.append((router, logits, experts))
            return
        with torch.no_grad():
            self._add(router, logits, experts)

    def end_pass(self) -> None:
        """Add the decisions of a pass to the sums."""
        for router, logits, experts in self._decisions:
            self._add(router, logits, experts)
        self._decisions.clear()

    def _add(self, router: nn.Module, logits: Tensor, experts: Tensor) -> None:
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self._weights is None:
            ones = torch.ones_like(self._states, dtype=logits.dtype)
            self._weights = logits.new_zeros(len(logits)).index_add(0, self._states, ones)
        log_p = logits.log_softmax(-1)
        p, constant = log_p.exp(), log_p.detach()
        chosen = torch.zeros_like(constant).scatter_(1, experts, 1.0)
        if self._is_replayed:
            # Softmax keeps the order of the logits, so the router would choose the k highest.
            own = logits.detach().topk(experts.shape[1]).indices
            replaced = (self._weights @ (1.0 - chosen.gather(1, own))).sum()
            self._replaced[router] = self._replaced.get(router, 0.0) + replaced
        for sums, value in (
            (self._counts, self._weights @ chosen),
            (self._probabilities, self._weights @ p),
            (self._entropies, -(self._weights @ (p.detach() * constant)).sum()),
        ):
            sums[router] = sums[router] + value if router in sums else value

    @property
    def counts(self) -> Tensor:
        """Number of tokens that each expert got, [L, E] float64."""
        return torch.stack([*self._counts.values()]).double()

    @property
    def entropy(self) -> Tensor:
        """Entropy of the routers' probabilities in nats, summed over tokens, [L] float64."""
        return torch.stack([*self._entropies.values()]).double()

    @property
    def replaced(self) -> Tensor:
        """Choices that the routers would have made differently, summed over tokens, [L] float64."""
        return torch.stack([*self._replaced.values()]).double()

    def balance_loss(self, counts: Tensor, top_k: int) -> Tensor:
        """Return these passes' part of the load-balancing loss of an optimizer step.

        The loss of a layer is E times the sum over experts of f P, where f is the number of tokens
        that an expert got and P its mean probability, both divided by the number of tokens of the
        whole step (Switch Transformer, arXiv:2101.03961 eq. 4 to 6, for k experts a token). It is k
        if the load is even. The result is the mean over layers. Gradients flow through P only.

        Args:
            counts: Tokens of each expert, [L, E], over the whole step and all workers.
            top_k: k.
        """
        tokens = (counts.sum(1, keepdim=True) / top_k).clamp(min=1.0)
        mean = torch.stack([*self._probabilities.values()]) / tokens
        return (counts / tokens * mean).sum(1).mean() * counts.shape[1]


def top_k_of(model: Any) -> int | None:
    """Return the number of experts of a token, or None for a model without known routers."""
    config = model.config.get_text_config()
    is_known = config.model_type in ROUTED and bool(routers_of(model))
    return config.num_experts_per_tok if is_known else None


def routers_of(model: nn.Module) -> list[Any]:
    """Return the routers of a transformers model, in the order of its layers."""
    return [m for m in model.modules() if type(m).__name__.lower().endswith("topkrouter")]


@contextmanager
def recorded(
    model: nn.Module, *, with_gradient: bool, is_replayed: bool = False
) -> Iterator[Routing]:
    """Record the routing of all passes of a model inside this context.

    Passes outside it are not recorded, such as the recomputed ones of activation checkpointing.

    Args:
        model: A module that contains a model with known routers (`top_k_of`).
        with_gradient: Keep the graph of the probabilities, for `Routing.balance_loss`.
        is_replayed: Whether the passes replay experts (`raypo.models.router_replay`), so that the
            routers themselves would choose others.
    """
    routing = Routing(with_gradient=with_gradient, is_replayed=is_replayed)
    hooks = [router.register_forward_hook(routing.record) for router in routers_of(model)]
    token = _recorder.set(routing)
    try:
        yield routing
        routing.end_pass()
    finally:
        _recorder.reset(token)
        for hook in hooks:
            hook.remove()


def about_to_pass(states: Tensor) -> None:
    """Tell a recorder, if there is one, which tokens of the next pass predict response tokens."""
    routing = _recorder.get()
    if routing is not None:
        routing.begin_pass(states)
