"""Load of a policy's experts over a step: metrics, and the loss that balances it.

L layers with experts, E experts of a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

from raypo.collectives import Workers
from raypo.models.networks import Policy, SequenceScorer
from raypo.models.routers import Routing, recorded, top_k_of

P = TypeVar("P", bound=Sized)


class RouterBalance:
    """Routing of one step's updates.

    For a model without routers that raypo knows, all methods do nothing. Microbatches that are
    empty run a placeholder, whose tokens do not count.
    """

    def __init__(
        self,
        module: Policy | SequenceScorer,
        *,
        coef: float,
        workers: Workers,
        is_replayed: bool = False,
    ) -> None:
        """Start a step.

        Args:
            module: The policy, inside DeepSpeed.
            coef: `learner.router_aux_coef`.
            workers: The workers that train the policy.
            is_replayed: True if the engine's experts replace the routers' choice.
        """
        self._module, self._workers, self._coef = module, workers, coef
        self._is_replayed = is_replayed
        # Only tokens whose states are read count (`about_to_pass`). Of a reward model that would be
        # the last token of each response alone, which does not tell an expert's load.
        self._top_k = top_k_of(module.model) if isinstance(module, Policy) else None
        self._counts: list[Tensor] = []  # [L, E] of each microbatch
        self._entropies: list[Tensor] = []  # [L] of each microbatch
        self._of_update: Tensor | None = None  # [L, E], of the current update over all workers
        self._losses: list[Tensor] = []
        self._replaced: list[Tensor] = []
        """[2] of each microbatch of the first update: choices that a router would have made
        differently, and all choices."""
        self._num_updates = 0

    def begin_update(self, pieces: Sequence[P], read: Callable[[P], object]) -> None:
        """Count each expert's tokens in an optimizer step, which the loss has to know beforehand.

        Args:
            pieces: This worker's microbatches.
            read: Forward pass of a microbatch.
        """
        self._num_updates += 1
        if self._top_k is None or not self._coef:
            return
        total = torch.zeros((), dtype=torch.float64)
        with torch.no_grad():
            for piece in pieces:
                with recorded(self._module, with_gradient=False) as routing:
                    read(piece)
                total = total + routing.counts.cpu() * bool(len(piece))
        self._of_update = self._workers.sum(total)

    @contextmanager
    def recorded(self, piece: Sized) -> Iterator[Routing | None]:
        """Record the forward pass of a microbatch."""
        if self._top_k is None:
            yield None
            return
        with recorded(
            self._module, with_gradient=self._coef > 0.0, is_replayed=self._is_replayed
        ) as routing:
            yield routing
        self._counts.append(routing.counts * bool(len(piece)))
        if self._is_replayed and self._num_updates == 1:  # later, the routers have changed
            choices = torch.stack([routing.replaced.sum(), routing.counts.sum()])
            self._replaced.append(choices * bool(len(piece)))
        self._entropies.append(routing.entropy * bool(len(piece)))

    def loss(self, routing: Routing | None, piece: Sized) -> Tensor | float:
        """Return a microbatch's part of the loss, times its coefficient. 0 means no loss."""
        if self._of_update is None or self._top_k is None or routing is None or not len(piece):
            return 0.0
        counts = self._of_update.to(routing.counts.device)
        loss = routing.balance_loss(counts, self._top_k)
        self._losses.append(loss.detach().double())
        return self._coef * loss

    def metrics(self, prefix: str) -> dict[str, float]:
        """Return metrics of the step over all workers; all workers call it together.

        They are the load of the busiest expert of any layer, as a multiple of an even load, and the
        mean entropy of the routers, in nats. With replayed experts also the share of choices that
        the routers would have made differently, before the step's first update.
        """
        if self._top_k is None or not self._counts:
            return {}
        loss = sum(self._losses, torch.zeros((), dtype=torch.float64)).cpu()
        of_worker = torch.stack(self._counts).sum(0).cpu()
        entropies = torch.stack(self._entropies).sum(0).cpu()
        # Without replay these are zeros, so that all workers sum equally many numbers: a worker
        # without rows does not know if the others replay.
        replaced = torch.zeros(2, dtype=torch.float64)
        if self._replaced:
            replaced = torch.stack(self._replaced).sum(0).cpu()
        sums = self._workers.sum(torch.cat([of_worker.flatten(), entropies, replaced, loss[None]]))
        sizes = (of_worker.numel(), len(entropies), 2, 1)
        counts, entropies, replaced, loss = sums.split(sizes)
        counts = counts.view_as(of_worker)
        tokens = (counts.sum(1) / self._top_k).clamp(min=1.0)  # [L]
        load = counts.amax(1) / (self._top_k * tokens / counts.shape[1])
        metrics = {
            f"{prefix}/router_load_max": float(load.max()),
            f"{prefix}/router_entropy": float((entropies / tokens).mean()),
        }
        if replaced[1] > 0:
            metrics["mismatch/router_disagreement"] = float(replaced[0] / replaced[1])
        if self._of_update is not None:
            metrics[f"{prefix}/router_aux_loss"] = float(loss) / self._num_updates
        return metrics
