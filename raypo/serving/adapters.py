"""LoRA adapters of an engine, each with its own version."""

from __future__ import annotations

import json
import tempfile
import zlib
from pathlib import Path
from typing import Any

from raypo.config import LoraSection
from raypo.serving.model_tensors import ModelTensors
from raypo.serving.vllm_processes import VllmProcesses
from raypo.weights.adapter import AdapterPush
from raypo.weights.manifest import WeightError, summary

SHARED_MEMORY = Path("/dev/shm")
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM accepts as `max_lora_rank`. Adapters of a smaller rank are padded with zeros."""
PREFIX = "base_model.model."


def lora_arguments(
    section: LoraSection, tensors: ModelTensors, *, max_adapters: int
) -> dict[str, Any]:
    """Return arguments of `vllm.LLM` for LoRA adapters.

    Args:
        section: Rank and target modules of the adapters.
        tensors: The model's tensors, which name its linear layers.
        max_adapters: Maximum number of adapters held at a time.
    """
    rank = next((rank for rank in RANKS if rank >= section.rank), section.rank)
    targets = section.target_modules
    return {
        # Without embedding and output head: vLLM would allocate LoRA weights for the vocabulary per
        # adapter, and could no longer find the weights of a tied head.
        "lora_target_modules": list(tensors.linear if isinstance(targets, str) else targets),
        "enable_lora": True,
        # One slot stays empty: in a mixed batch, vLLM's CPU build applies the last slot to requests
        # without an adapter.
        "max_loras": max_adapters + 1,
        "max_cpu_loras": max_adapters + 1,
        "max_lora_rank": rank,
    }


class Adapters:
    """Registry of the adapters in vLLM, by name. vLLM reads each from a temporary folder.

    vLLM identifies an adapter by number, name and path. Each of raypo's names keeps its number, so
    a new version replaces the old one. vLLM's name and path contain a load counter, so a request
    never reuses prefix cache entries of earlier weights. The version cannot replace this counter: a
    run that resumes from a checkpoint pushes other weights under a version that existed before.
    """

    def __init__(self, known: dict[str, tuple[int, ...]], *, most: int) -> None:
        """Create an empty registry.

        Args:
            known: Names and shapes of the engine's own weights.
            most: Maximum number of adapters held at a time.
        """
        self._known, self._most = known, most
        self._numbers: dict[str, int] = {}
        self._versions: dict[str, int] = {}
        self._requests: dict[str, Any] = {}
        """`LoRARequest` of each adapter."""
        self._num_loads = 0

    def version(self, name: str) -> int | None:
        """Return the version of an adapter, or None if the engine does not hold it."""
        return self._versions.get(name)

    def load(self, processes: VllmProcesses, push: AdapterPush) -> None:
        """Load an adapter, in place of an earlier version with the same name.

        Raises:
            WeightError: the push arrived corrupted, does not fit the engine's model, or no slot is
                free.
        """
        self._give_number(push.name)
        self._versions.pop(push.name, None)
        self._num_loads += 1
        shared_memory = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
        with tempfile.TemporaryDirectory(prefix="raypo-adapter-", dir=shared_memory) as folder:
            path = Path(folder) / f"{self._num_loads}"
            self._write(push, path)
            try:
                processes.ask("add_lora", self._request(push.name, path, load_inplace=True))
            except Exception as error:
                raise WeightError(f"{push!r} could not be loaded: {error}") from error
        self._requests[push.name] = self._request(push.name, path)
        self._versions[push.name] = push.version

    def request(self, name: str) -> Any:
        """Return the `LoRARequest` that vLLM takes with a prompt.

        Raises:
            ValueError: the engine does not hold the adapter.
        """
        if name not in self._versions:
            held = ", ".join(sorted(self._versions)) or "none"
            raise ValueError(
                f"adapter ({name}): this engine does not hold it. It holds {held}. Push it first."
            )
        return self._requests[name]

    def drop(self, processes: VllmProcesses, name: str) -> None:
        """Remove an adapter and free its slot. Does nothing if the name is unknown."""
        self._versions.pop(name, None)
        self._requests.pop(name, None)
        number = self._numbers.pop(name, None)
        if number is not None:
            processes.ask("remove_lora", number)

    def forget_all(self) -> list[str]:
        """Forget all versions, because new base weights made vLLM drop its adapters.

        Returns:
            Names of the adapters that were dropped.
        """
        forgotten = list(self._versions)
        self._versions.clear()
        return forgotten

    def _give_number(self, name: str) -> None:
        if name in self._numbers:
            return
        free = set(range(1, self._most + 1)) - set(self._numbers.values())
        if not free:
            raise WeightError(
                f"adapter ({name}): this engine already holds its maximum of {self._most}: "
                f"{', '.join(sorted(self._numbers))}. Drop one, or start it with room for more."
            )
        self._numbers[name] = min(free)

    def _request(self, name: str, path: Path, **options: Any) -> Any:
        from vllm.lora.request import LoRARequest

        label = f"{name}@{self._num_loads}"
        return LoRARequest(label, self._numbers[name], str(path), **options)

    def _write(self, push: AdapterPush, folder: Path) -> None:
        if zlib.crc32(push.data) != push.checksum:
            raise WeightError(
                f"{push!r}: the bytes that arrived do not have the checksum that was sent. Push "
                f"it again."
            )
        folder.mkdir()
        (folder / "adapter_config.json").write_text(json.dumps(dict(push.config)))
        file = folder / "adapter_model.safetensors"
        file.write_bytes(push.data)
        self._check(push, file)

    def _check(self, push: AdapterPush, file: Path) -> None:
        """Raise on unknown tensors or wrong shapes; vLLM would ignore unknown tensors."""
        from safetensors import safe_open

        lines = []
        with safe_open(file, "pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118  # no dict
                path, _, kind = key.removeprefix(PREFIX).removesuffix(".weight").rpartition(".")
                shape = tuple(tensors.get_slice(key).get_shape())
                weight = self._known.get(f"{path}.weight")
                if weight is None or kind not in ("lora_A", "lora_B"):
                    lines.append(f"{key} is unknown")
                elif shape not in ((push.config["r"], weight[1]), (weight[0], push.config["r"])):
                    lines.append(f"{key} has shape {shape}, its layer {weight}")
        if lines:
            raise WeightError(
                f"{push!r} does not fit the engine's model: {summary(lines)}. Start engine and "
                "learner with the same model."
            )
