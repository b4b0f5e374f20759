"""What the frozen models have in common: a name, threads, memory that they lend to others."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from raypo.cluster.out_of_memory import FROZEN_REMEDY, memory_advice
from raypo.metrics.process_memory import peak_memory
from raypo.models.loading import release_memory, short_name


def frozen_memory_advice(name: str) -> AbstractContextManager[None]:
    """`memory_advice` around what a frozen model does; `name` is its folder or hub id."""
    return memory_advice(f"the frozen model {short_name(name)}", FROZEN_REMEDY)


class FrozenModel:
    """A model that nobody trains, alone in its process."""

    def __init__(self, name: str, *, num_threads: int | None) -> None:
        """Settle the process.

        Args:
            name: Folder or hub id, for people.
            num_threads: Threads of this process's tensor operations; None: as they are.
        """
        self._name = short_name(name)
        if num_threads is not None:
            torch.set_num_threads(num_threads)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._name}, frozen, ready)"

    def peak_memory(self) -> dict[str, float]:
        """The most memory that this process has held, in GB."""
        return peak_memory()


class TorchModel(FrozenModel):
    """A network without gradients, on the GPU where there is one."""

    def __init__(
        self, name: str, network: Any, *, max_batch_tokens: int, num_threads: int | None
    ) -> None:
        """Put the network on its device.

        Args:
            name: Folder or hub id, for people.
            network: A Hugging Face model.
            max_batch_tokens: Most tokens of one forward pass.
            num_threads: Threads of this process's tensor operations; None: as they are.
        """
        super().__init__(name, num_threads=num_threads)
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._model = network.eval().to(self._device)
        self._max_batch_tokens = max_batch_tokens

    def sleep(self) -> None:
        """Give the GPU's memory to others."""
        self._model.to("cpu")
        release_memory()

    def wake_up(self) -> None:
        """Take it again."""
        self._model.to(self._device)
