"""What a learner leaves for others: Hugging Face folders and peft adapters."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from raypo.collectives import Workers
from raypo.config import LoraSection
from raypo.learner.trained_model import TrainedModel
from raypo.models import lora
from raypo.models.critic import save_value_head


def save_folder(
    model: TrainedModel, network: Any, folder: Path, *, tokenizer: Any, workers: Workers
) -> None:
    """The network, an adapter merged, as a Hugging Face folder; rank 0 writes, all call it."""
    weights = kept(model.named_weights(network), workers)
    if workers.rank == 0:
        network.save_pretrained(folder, state_dict=weights)
        tokenizer.save_pretrained(folder)


def save_critic(model: TrainedModel, folder: Path, *, tokenizer: Any, workers: Workers) -> None:
    """Backbone and value head as a folder that `model.critic` takes; rank 0 writes, all call it."""
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
    """The network's adapter as a peft folder; rank 0 writes, all call it."""
    weights = kept(model.gathered(lora.adapter_weights(network)), workers)
    if workers.rank == 0:
        lora.save_adapter(folder, lora.adapter_config(network, section, base=base), weights)


def kept(named_weights: Iterator[tuple[str, Tensor]], workers: Workers) -> dict[str, Tensor]:
    """All tensors on the CPU, on rank 0; the others only take part in the gathering."""
    kept: dict[str, Tensor] = {}
    for name, tensor in named_weights:
        if workers.rank == 0:
            kept[name] = tensor.cpu().clone()
    return kept
