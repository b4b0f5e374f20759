"""Moving a trained model to the host and back, as far as its ZeRO stage lets us.

What DeepSpeed 0.19 can move by `offload_states` differs by its optimizer, so it is written down
here and tested, not assumed:

| stage | optimizer | by DeepSpeed | by raypo |
|---|---|---|---|
| 0, float32 | AdamW | - | optimizer states, weights |
| 0 and 1, bfloat16 | BF16_Optimizer | - | optimizer states, master weights, gradients, weights |
| 1 and 2 | DeepSpeedZeroOptimizer | all | - |
| 3 | its Stage3 | weights, gradients, gradient buckets | optimizer states, master weights |

At stage 3 DeepSpeed moves master weights and optimizer states of its own FusedAdam alone. What
raypo moves it moves by storage: DeepSpeed holds many views of one flat buffer, which stay valid.

What the config off-loads by itself (`offload_optimizer`, `offload_param`) is left where it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from raypo.models.host_memory import HostMemory
from raypo.models.loading import release_memory


@dataclass(frozen=True)
class OffloadPlan:
    """Who moves what: lists of DeepSpeed's `OffloadStateTypeEnum`."""

    training_state: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()
    optimizer_by_raypo: bool = False
    parameters_by_raypo: Literal["all", "frozen", "none"] = "none"

    @classmethod
    def of(
        cls,
        stage: int,
        *,
        by_deepspeed: bool,
        has_frozen: bool = False,
        has_offload_param: bool = False,
    ) -> OffloadPlan:
        """The table above.

        Args:
            stage: ZeRO's.
            by_deepspeed: The optimizer knows `offload_states`.
            has_frozen: Some weights are not trained, as below an adapter; they are no part of what
                DeepSpeed moves at stages 1 and 2, and are left alone at stage 3.
            has_offload_param: `zero_optimization.offload_param` is set: DeepSpeed then refuses to
                move anything itself.
        """
        if not by_deepspeed:
            return cls(optimizer_by_raypo=True, parameters_by_raypo="all")
        if has_offload_param:
            return cls(optimizer_by_raypo=True)
        if stage < 3:
            moved = "frozen" if has_frozen else "none"
            training_state = ("optim_states", "hp_params", "lp_grads")
            return cls(training_state, ("lp_params",), parameters_by_raypo=moved)
        parameters = () if has_frozen else ("lp_params",)
        return cls(("lp_grads", "contiguous_grad_buffer"), parameters, optimizer_by_raypo=True)


class Offload:
    """One model under DeepSpeed, moved to the host in two parts and back as a whole."""

    def __init__(self, engine: Any, *, optimizer: torch.optim.Optimizer, plan: OffloadPlan) -> None:
        """Nothing is moved yet.

        Args:
            engine: A DeepSpeedEngine.
            optimizer: The torch optimizer that it steps.
            plan: Of its ZeRO stage.
        """
        self._engine, self._optimizer, self._plan = engine, optimizer, plan
        self._host = HostMemory()
        self._by_deepspeed = False

    def training_state(self) -> None:
        """Optimizer states, master weights and gradients; safe to call again."""
        self._ask_deepspeed(self._plan.training_state)
        if self._plan.optimizer_by_raypo:
            self._host.take(self._optimizer_tensors())
        release_memory()

    def parameters(self) -> None:
        """The weights, after the training state; safe to call again."""
        self._ask_deepspeed(self._plan.parameters)
        if self._plan.parameters_by_raypo != "none":
            everything = self._plan.parameters_by_raypo == "all"
            parameters = self._engine.module.parameters()
            self._host.take(p for p in parameters if everything or not p.requires_grad)
        release_memory()

    def reload(self) -> None:
        """Everything back to where it was."""
        if self._by_deepspeed:
            self._engine.reload_states()
            self._by_deepspeed = False
        self._host.give_back()

    def _ask_deepspeed(self, states: tuple[str, ...]) -> None:
        from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum

        if states:
            include = [OffloadStateTypeEnum(state) for state in states]
            self._engine.offload_states(include, pin_memory=torch.cuda.is_available())
            self._by_deepspeed = True

    def _optimizer_tensors(self) -> Iterator[Tensor]:
        """States, what they are of where that is not the weights, and summed gradients."""
        for state in self._optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))
        weights = set(self._engine.module.parameters())
        masters = {*self._optimizer.state}.union(
            *(group["params"] for group in self._optimizer.param_groups)
        )
        yield from masters - weights
        yield from getattr(self._engine.optimizer, "fp32_groups_gradients_flat", ())
