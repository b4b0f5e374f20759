"""LoRA adapter in the form that is pushed to engines: the contents of peft's two files."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from safetensors.torch import save
from torch import Tensor


@dataclass(frozen=True)
class AdapterPush:
    """One version of a LoRA adapter, as plain data."""

    name: str
    """Name of the run or trial that trains the adapter."""
    version: int
    config: Mapping[str, Any]
    """Content of adapter_config.json."""
    data: bytes
    """Content of adapter_model.safetensors."""
    checksum: int
    """CRC-32 of `data`."""

    @classmethod
    def of(
        cls, name: str, version: int, config: Mapping[str, Any], tensors: Mapping[str, Tensor]
    ) -> AdapterPush:
        """Serialize an adapter.

        Args:
            name: Name of the run or trial.
            version: Version of the adapter.
            config: Content of adapter_config.json.
            tensors: The adapter's tensors, by peft's names.
        """
        data = save({key: tensor.cpu().contiguous() for key, tensor in tensors.items()})
        return cls(name, version, config, data, zlib.crc32(data))

    def __repr__(self) -> str:
        return f"AdapterPush({self.name} v{self.version}, {len(self.data) / 1e6:.1f} MB)"
