"""Export of trained models as Hugging Face folders and peft adapters."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from raypo.collectives import Workers
from raypo.config import LoraSection
from raypo.learner.trained_model import TrainedModel
from raypo.models import lora
from raypo.models.checkpoint import stored_tensors
from raypo.models.critic import save_value_head
from raypo.models.model_folder import follow_umask
from raypo.models.shares import whole_bytes
from raypo.pending_work import moved

WHOLE = "model.safetensors"
SHARD_BYTES = 5 * 10**9
"""Size of a weight file in bytes, to which the rest of a layer is added."""
LAYER = re.compile(r".*?\.\d+\.")
"""Name of the layer that a tensor belongs to."""
_VALUE_HEAD = "value_head."
"""Prefix of a critic's value head among the weights of its export."""


NamedWeights = Iterator[tuple[str, Tensor]]


@dataclass(frozen=True)
class Export:
    """A trained model as a folder: its weights, and the function that writes them."""

    weights: Callable[[], NamedWeights]
    """Function that yields names and full tensors. All workers that train the model iterate to the
    end together."""
    write: Callable[[Path, NamedWeights], None]
    """Function that writes these weights, or copies of them, to a folder. Only rank 0 of these
    workers calls it. It waits for no other worker and may run in any thread."""
    num_bytes: int
    """Size of the weights."""

    def save(self, folder: Path, workers: Workers) -> None:
        """Write the folder; all workers that train the model call it together."""
        if workers.rank == 0:
            self.write(folder, self.weights())
            return
        for _ in self.weights():  # takes part in gathering the shards
            pass


def model_export(model: TrainedModel, network: Any, tokenizer: Any) -> Export:
    """Return the export of a network as a Hugging Face folder, with its adapter merged.

    Args:
        model: The trained model.
        network: The Hugging Face model inside it.
        tokenizer: Tokenizer to save beside the model.
    """
    return Export(
        lambda: model.named_weights(network),
        lambda folder, weights: _write_folder(network, folder, weights, tokenizer),
        sum(whole_bytes(tensor) for _, tensor in stored_tensors(network)),
    )


def _write_folder(network: Any, folder: Path, weights: NamedWeights, tokenizer: Any) -> None:
    """Write each file as soon as it is full, so that `SHARD_BYTES` and a layer are held at most."""
    # transformers would save only on rank 0 of the default group, which may be in another team.
    # `bool` returns the argument that transformers passes, `is_main_process`, which is True.
    saved = network.raypo_folder.for_saving(network)
    saved.should_save_on_this_rank = bool
    parts: list[Path] = []
    on_host = ((name, tensor.to("cpu", copy=True)) for name, tensor in weights)
    for group in _shards(on_host):
        saved.save_pretrained(folder, state_dict=dict(group), max_shard_size=sys.maxsize)
        parts.append((folder / WHOLE).rename(folder / f"part-{len(parts)}"))
        moved()
        group.clear()  # before the next one is gathered
    _name_parts(folder, parts)
    follow_umask(folder)
    network.raypo_folder.write_others(folder)
    tokenizer.save_pretrained(folder)


def _shards(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """Split tensors into files of at least `SHARD_BYTES`, between layers.

    transformers may make one tensor of a file from several of a layer.
    """
    shard: dict[str, Tensor] = {}
    num_bytes, before = 0, ""
    for name, tensor in tensors:
        layer = LAYER.match(name)
        own = layer[0] if layer else name
        if num_bytes >= SHARD_BYTES and own != before:
            yield shard
            shard, num_bytes = {}, 0
        shard[name] = tensor
        num_bytes, before = num_bytes + tensor.nbytes, own
    yield shard


def _name_parts(folder: Path, parts: list[Path]) -> None:
    """Rename the files: a single file gets a plain name, several get numbers and an index."""
    if len(parts) == 1:
        parts[0].rename(folder / WHOLE)
        return
    file_of: dict[str, str] = {}
    for number, part in enumerate(parts, start=1):
        path = part.rename(folder / f"model-{number:05d}-of-{len(parts):05d}.safetensors")
        with safe_open(path, framework="pt") as file:
            file_of |= dict.fromkeys(file.keys(), path.name)
    size = sum((folder / name).stat().st_size for name in set(file_of.values()))
    index = {"metadata": {"total_size": size}, "weight_map": file_of}
    (folder / f"{WHOLE}.index.json").write_text(json.dumps(index, indent=2, sort_keys=True))


def critic_export(model: TrainedModel, tokenizer: Any) -> Export:
    """Return the export of backbone and value head as a folder for `model.critic`."""
    network = model.module.backbone

    def weights() -> NamedWeights:
        yield from model.named_weights(network)
        for name, tensor in model.named_weights(model.module.value_head):
            yield _VALUE_HEAD + name, tensor

    def write(folder: Path, weights: NamedWeights) -> None:
        head: dict[str, Tensor] = {}

        def of_network() -> NamedWeights:
            for name, tensor in weights:
                if name.startswith(_VALUE_HEAD):
                    head[name.removeprefix(_VALUE_HEAD)] = tensor.cpu().clone()
                else:
                    yield name, tensor

        _write_folder(network, folder, of_network(), tokenizer)
        save_value_head(folder, head)

    num_bytes = sum(whole_bytes(tensor) for _, tensor in stored_tensors(model.module))
    return Export(weights, write, num_bytes)


def adapter_export(model: TrainedModel, network: Any, *, section: LoraSection, base: str) -> Export:
    """Return the export of a network's adapter as a peft folder."""
    return Export(
        lambda: model.gathered(lora.adapter_weights(network)),
        lambda folder, weights: lora.save_adapter(
            folder,
            lora.adapter_config(network, section, base=base),
            {name: tensor.cpu().clone() for name, tensor in weights},
        ),
        sum(whole_bytes(weight) for weight in network.parameters() if weight.requires_grad),
    )


def on_rank_0(named_weights: Iterator[tuple[str, Tensor]], workers: Workers) -> dict[str, Tensor]:
    """Return all tensors on the CPU of rank 0. Other ranks only take part in gathering shards."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in named_weights:
        if workers.rank == 0:
            tensors[name] = tensor.cpu().clone()
    return tensors
