"""Export of trained models as Hugging Face folders and peft adapters."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from raypo.collectives import Workers
from raypo.config import LoraSection
from raypo.learner.trained_model import TrainedModel
from raypo.models import lora
from raypo.models.critic import save_value_head
from raypo.models.model_folder import follow_umask

WHOLE = "model.safetensors"
SHARD_BYTES = 5 * 10**9
"""Size of a weight file in bytes, to which the rest of a layer is added."""
LAYER = re.compile(r".*?\.\d+\.")
"""Name of the layer that a tensor belongs to."""


def save_folder(
    model: TrainedModel, network: Any, folder: Path, *, tokenizer: Any, workers: Workers
) -> None:
    """Save a network as a Hugging Face folder, with its adapter merged into the saved weights.

    All workers call it, and rank 0 writes. Rank 0 writes each file as soon as it is full, so it
    holds about `SHARD_BYTES` and a layer at a time instead of the whole model.

    Args:
        model: The trained model.
        network: The Hugging Face model inside it.
        folder: Folder to write.
        tokenizer: Tokenizer to save beside the model.
        workers: The workers that train the model.
    """
    weights = model.named_weights(network)
    if workers.rank > 0:
        for _ in weights:  # takes part in gathering the shards
            pass
        return
    # transformers would save only on rank 0 of the default group, which may be in another team.
    # `bool` returns the argument that transformers passes, `is_main_process`, which is True.
    network.should_save_on_this_rank = bool
    parts: list[Path] = []
    on_host = ((name, tensor.to("cpu", copy=True)) for name, tensor in weights)
    with network.raypo_folder.of_network(network):
        for group in _shards(on_host):
            network.save_pretrained(folder, state_dict=dict(group), max_shard_size=sys.maxsize)
            parts.append((folder / WHOLE).rename(folder / f"part-{len(parts)}"))
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
    places: dict[str, str] = {}
    for number, part in enumerate(parts, start=1):
        path = part.rename(folder / f"model-{number:05d}-of-{len(parts):05d}.safetensors")
        with safe_open(path, framework="pt") as file:
            places |= dict.fromkeys(file.keys(), path.name)
    size = sum((folder / name).stat().st_size for name in set(places.values()))
    index = {"metadata": {"total_size": size}, "weight_map": places}
    (folder / f"{WHOLE}.index.json").write_text(json.dumps(index, indent=2, sort_keys=True))


def save_critic(model: TrainedModel, folder: Path, *, tokenizer: Any, workers: Workers) -> None:
    """Save backbone and value head as a folder for `model.critic`.

    All workers call it, and rank 0 writes.
    """
    save_folder(model, model.module.backbone, folder, tokenizer=tokenizer, workers=workers)
    head = kept(model.named_weights(model.module.value_head), workers)
    if workers.rank == 0:
        save_value_head(folder, head)


def save_adapter(
    model: TrainedModel,
    network: Any,
    folder: Path,
    *,
    section: LoraSection,
    base: str,
    workers: Workers,
) -> None:
    """Save the network's adapter as a peft folder; rank 0 writes, all workers call it."""
    weights = kept(model.gathered(lora.adapter_weights(network)), workers)
    if workers.rank == 0:
        lora.save_adapter(folder, lora.adapter_config(network, section, base=base), weights)


def kept(named_weights: Iterator[tuple[str, Tensor]], workers: Workers) -> dict[str, Tensor]:
    """Return all tensors on the CPU of rank 0. Other ranks only take part in gathering shards."""
    kept: dict[str, Tensor] = {}
    for name, tensor in named_weights:
        if workers.rank == 0:
            kept[name] = tensor.cpu().clone()
    return kept
