"""Offloading of a trained model to the host and back, at any ZeRO stage.

DeepSpeed 0.19 has `offload_states`, which does not suffice. BF16_Optimizer lacks it. At stage 3 it
moves only moments of DeepSpeed's FusedAdam. At stages 1 and 2 it pins new host memory each time. So
raypo moves the storages themselves into pinned memory that is reused. DeepSpeed holds many views of
a few flat buffers, and all these views stay valid.

State that the config offloads (`offload_optimizer`, `offload_param`) is already on the host.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from raypo.learner.deepspeed_internals import (
    flat_masters,
    gradient_sums,
    is_accumulating,
    reduction_buckets,
)
from raypo.models.host_memory import HostMemory
from raypo.models.loading import release_memory
from raypo.models.shares import is_sharded, own_shard


class Offload:
    """Offloader of one DeepSpeed model.

    `training_state` and `parameters` each move a part of the model to the host. `reload` moves both
    parts back.
    """

    def __init__(self, engine: Any, optimizer: torch.optim.Optimizer) -> None:
        """Create an offloader.

        Args:
            engine: A DeepSpeedEngine.
            optimizer: The torch optimizer that it steps.
        """
        self._engine, self._optimizer = engine, optimizer
        self._host = HostMemory()

    def training_state(self) -> None:
        """Offload moments, master weights, accumulated gradients and buckets. Idempotent."""
        self._engine.empty_partition_cache()  # frees weights that ZeRO-3 still keeps gathered
        weights = {weight.untyped_storage()._cdata for weight in self._weights()}
        state = [t for t in self._training_state() if t.untyped_storage()._cdata not in weights]
        self._host.take(state)
        if is_accumulating(self._engine):
            self._host.take(gradient_sums(self._engine))
        else:
            # Between two steps the sums are not needed: BF16_Optimizer has zeroed them, and stage 3
            # overwrites them at the first microbatch.
            self._host.drop(gradient_sums(self._engine), zeros=True)
        self._host.drop(reduction_buckets(self._engine))
        release_memory()

    def parameters(self) -> None:
        """Offload the weights. Call it after `training_state`. Idempotent."""
        self._engine.empty_partition_cache()
        self._host.take(self._weights())
        release_memory()

    def reload(self) -> None:
        """Move everything back to the device."""
        self._host.give_back()

    def _weights(self) -> Iterator[Tensor]:
        """Yield the module's buffers and parameters, and this worker's ZeRO-3 shards of them."""
        yield from self._engine.module.buffers()
        for parameter in self._engine.module.parameters():
            yield parameter.data
            if is_sharded(parameter):
                yield own_shard(parameter)

    def _training_state(self) -> Iterator[Tensor]:
        for state in self._optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))
        for group in self._optimizer.param_groups:
            yield from group["params"]
        yield from flat_masters(self._engine)
