"""The LoRA adapters that an engine holds beside its own weights, each with a version of its own."""

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
"""vLLM holds adapters of one of these ranks; a smaller one is padded with zeros."""
PREFIX = "base_model.model."


def lora_arguments(
    section: LoraSection, tensors: ModelTensors, *, max_adapters: int
) -> dict[str, Any]:
    """Arguments of `vllm.LLM` for adapters as a section describes them.

    Embedding and output head are left alone: vLLM would hold a share of the vocabulary for each
    adapter, and of a tied head it would no longer find the weights. One slot stays empty: on CPU
    vLLM gives a request without an adapter, in a batch with others, what is in the last one.
    """
    rank = next((rank for rank in RANKS if rank >= section.rank), section.rank)
    targets = section.target_modules
    return {
        "lora_target_modules": list(tensors.linear if isinstance(targets, str) else targets),
        "enable_lora": True,
        "max_loras": max_adapters + 1,
        "max_cpu_loras": max_adapters + 1,
        "max_lora_rank": rank,
    }


class Adapters:
    """Names and versions of the adapters; vLLM reads each from a folder that is removed at once.

    vLLM knows adapters by number, name and path. The number of a name stays, so that a new
    version takes the place of the old one; name and path hold the count of loads, so that no key
    or value in the prefix cache is ever used for other weights: a run that goes on from a
    checkpoint pushes other weights under a version that was there before.
    """

    def __init__(self, known: dict[str, tuple[int, ...]], *, most: int) -> None:
        """No adapter yet.

        Args:
            known: Names and shapes of the engine's own weights.
            most: How many fit at a time.
        """
        self._known, self._most = known, most
        self._numbers: dict[str, int] = {}
        self._versions: dict[str, int] = {}
        self._requests: dict[str, Any] = {}
        """What vLLM wants to see beside a prompt."""
        self._num_loads = 0

    def version(self, name: str) -> int | None:
        """The version of a name; None where the engine holds none."""
        return self._versions.get(name)

    def load(self, processes: VllmProcesses, push: AdapterPush) -> None:
        """Put a push in the place of the name's earlier version.

        Raises:
            WeightError: it did not arrive whole, is not of the engine's model, or there is no room.
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
        """What vLLM wants to see beside a prompt.

        Raises:
            ValueError: the engine does not hold the adapter.
        """
        if name not in self._versions:
            held = ", ".join(sorted(self._versions)) or "none"
            raise ValueError(
                f"adapter ({name}): this engine does not hold it, but {held}. Push it first."
            )
        return self._requests[name]

    def drop(self, processes: VllmProcesses, name: str) -> None:
        """Make room: forget a name; nothing happens where it is unknown."""
        self._versions.pop(name, None)
        self._requests.pop(name, None)
        number = self._numbers.pop(name, None)
        if number is not None:
            processes.ask("remove_lora", number)

    def forget_all(self) -> list[str]:
        """New base weights came, and vLLM let go of all adapters; which ones."""
        forgotten = list(self._versions)
        self._versions.clear()
        return forgotten

    def _give_number(self, name: str) -> None:
        if name in self._numbers:
            return
        free = set(range(1, self._most + 1)) - set(self._numbers.values())
        if not free:
            raise WeightError(
                f"adapter ({name}): this engine holds {self._most} already: "
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
        """vLLM passes over what it does not know; here that is an error."""
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
                f"{push!r} is not of the engine's model: {summary(lines)}. Start engine and "
                f"learner with the same model."
            )
