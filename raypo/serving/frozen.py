"""What the frozen models have in common: a network that gives its GPU memory to others."""

from __future__ import annotations

from typing import Any

import torch

from raypo.metrics.process_memory import peak_memory
from raypo.models.loading import release_memory, short_name


class FrozenModel:
    """A network without gradients, on the GPU where there is one."""

    def __init__(self, name: str, network: Any, *, max_batch_tokens: int) -> None:
        """Put the network on its device.

        Args:
            name: Folder or hub id, for people.
            network: A Hugging Face model.
            max_batch_tokens: Most tokens, padding included, of one forward pass.
        """
        self._name = short_name(name)
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._model = network.eval().to(self._device)
        self._max_batch_tokens = max_batch_tokens

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._name}, frozen, ready)"

    def peak_memory(self) -> dict[str, float]:
        """The most memory that this process has held, in GB."""
        return peak_memory()

    def sleep(self) -> None:
        """Give the GPU's memory to others."""
        self._model.to("cpu")
        release_memory()

    def wake_up(self) -> None:
        """Take it again."""
        self._model.to(self._device)
