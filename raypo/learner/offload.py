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

from raypo.models.host_memory import HostMemory
from raypo.models.loading import release_memory


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
        weights = {each.untyped_storage()._cdata for each in self._weights()}
        state = [t for t in self._training_state() if t.untyped_storage()._cdata not in weights]
        self._host.take(state)
        if self._is_accumulating:
            self._host.take(self._gradients())
        else:
            # Between two steps the sums are not needed: BF16_Optimizer has zeroed them, and stage 3
            # overwrites them at the first microbatch.
            self._host.drop(self._gradients(), zeros=True)
        self._host.drop(self._buckets())
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
            if hasattr(parameter, "ds_tensor"):
                yield parameter.ds_tensor

    def _training_state(self) -> Iterator[Tensor]:
        for state in self._optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))
        for group in self._optimizer.param_groups:
            yield from group["params"]
        yield from vars(self._engine.optimizer).get("fp32_partitioned_groups_flat", ())  # stage 3

    @property
    def _is_accumulating(self) -> bool:
        """True if gradients of the next step have been accumulated."""
        return self._engine._unmanaged_backward_count > 0

    def _gradients(self) -> Iterator[Tensor]:
        """Yield the float32 sums of gradients, which stay allocated between two steps."""
        zero = vars(self._engine.optimizer)
        yield from zero.get("fp32_groups_gradients_flat", ())  # BF16_Optimizer
        if (sums := zero.get("grad_partitions_flat_buffer")) is not None:  # stage 3
            yield sums

    def _buckets(self) -> Iterator[Tensor]:
        """Yield the buffers in which gradients are summed over the workers.

        Only stage 3 keeps them allocated between steps.
        """
        for bucket in getattr(self._engine.optimizer, "ipg_buckets", {}).values():
            if isinstance(bucket.buffer, Tensor):
                yield bucket.buffer
