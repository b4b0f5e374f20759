"""Low-rank adapters: put in, turned off, merged under the model's own names, written for peft.

r rank, W [out, in], A [r, in], B [out, r]; a trained layer computes W x + scale * B A x.
Paper: Hu et al. 2021, arXiv:2106.09685, eq. 3.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from raypo.config import ConfigError, LoraSection, ModelSection, TrainedModelSection
from raypo.models.heads import HEADS
from raypo.models.loading import load_causal_lm

NAME = "default"
"""peft's name of the only adapter of a model."""
PREFIX = "base_model.model."
"""What stands before a module's name in peft's files."""


@dataclass(frozen=True)
class Weight:
    """A weight of the model, and the adapter that changes it."""

    name: str
    """As the model without an adapter has it."""
    parts: tuple[nn.Parameter, ...]
    """W, or W, A and B; they are whole while ZeRO-3 gathers them."""
    scale: float = 1.0
    transposed: bool = False
    """GPT-2 keeps W as [in, out]."""

    def merged(self) -> Tensor:
        """W + scale * B A, rounded once; W itself where no adapter changes it."""
        weight, *adapter = (part.detach() for part in self.parts)
        if not adapter:
            return weight
        a, b = (part.to(torch.float32) for part in adapter)
        delta = self.scale * (b @ a)
        return (weight.float() + (delta.T if self.transposed else delta)).to(weight.dtype)


def load_policy(section: ModelSection | TrainedModelSection) -> Any:
    """The causal language model that a config trains, with its adapter where it has one."""
    model = load_causal_lm(section.policy, dtype=section.dtype, attention=section.attention)
    return add_adapter(model, section.lora)


def add_adapter(model: Any, section: LoraSection | None) -> Any:
    """The model itself, its weights frozen and an adapter in its linear layers; B starts at zero.

    A classification head is new, so it is trained whole. A comes from torch's random state.
    Without a section nothing changes.

    Raises:
        ConfigError: `target_modules` names no layer, one that is not linear, or a tied head.
    """
    if section is None:
        return model
    from peft import inject_adapter_in_model  # 3 s, for those who use it

    try:
        inject_adapter_in_model(_peft_config(model, section), model, adapter_name=NAME)
    except ValueError as error:
        raise ConfigError(
            f"model.lora.target_modules ({_told(section)}): {error} Name linear layers of "
            f"{type(model).__name__}, or set it to all-linear."
        ) from None
    _refuse_shared(model, section)
    for name in _heads(model):
        getattr(model, name).requires_grad_(True)
    return model


@contextmanager
def adapter_off(model: nn.Module) -> Iterator[None]:
    """The model as it was before its adapter learned anything; without gradients."""
    layers = _layers(model).values()
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def merged_weights(model: nn.Module) -> Iterator[Weight]:
    """Every weight under the name that the model has without an adapter; tied ones come twice."""
    layers = _layers(model)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        path, _, leaf = name.rpartition(".")
        owner = path.removesuffix(".base_layer")
        if f"{owner}.base_layer" == path and owner in layers:
            layer = layers[owner]
            if leaf == "weight":
                yield _with_adapter(f"{owner}.weight", parameter, layer)
            else:
                yield Weight(f"{owner}.{leaf}", (parameter,))
        elif not _is_of_adapter(name):
            yield Weight(name, (parameter,))


def base_weights(model: nn.Module) -> Iterator[Weight]:
    """The weights of `merged_weights` without what the adapter adds."""
    for weight in merged_weights(model):
        yield Weight(weight.name, weight.parts[:1])


def adapter_weights(model: nn.Module) -> Iterator[Weight]:
    """What is trained, under the names of peft's files."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            yield Weight(PREFIX + name.replace(f".{NAME}.", "."), (parameter,))


def adapter_config(model: Any, section: LoraSection, *, base: str) -> dict[str, Any]:
    """The content of peft's adapter_config.json.

    Args:
        base: Path or hub id of the model that the adapter belongs to.
    """
    values = _peft_config(model, section).to_dict()
    if section.target_modules == "all-linear":  # not every reader knows the word
        values["target_modules"] = {name.rpartition(".")[2] for name in _layers(model)}
    values |= {
        "target_modules": sorted(values["target_modules"]),
        "modules_to_save": _heads(model) or None,
        "base_model_name_or_path": base,
        "inference_mode": True,
    }
    return values


def save_adapter(folder: Path, config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
    """A folder that peft and vLLM load."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(
        {name: tensor.contiguous() for name, tensor in weights.items()},
        folder / "adapter_model.safetensors",
        metadata={"format": "pt"},
    )


def _peft_config(model: Any, section: LoraSection) -> Any:
    from peft import LoraConfig, TaskType
    from transformers.pytorch_utils import Conv1D

    targets, alpha = section.target_modules, section.alpha
    has_language_head = model.get_output_embeddings() is not None
    task = TaskType.CAUSAL_LM if has_language_head else TaskType.FEATURE_EXTRACTION
    return LoraConfig(
        r=section.rank,
        lora_alpha=int(alpha) if alpha.is_integer() else alpha,  # type: ignore[arg-type]
        lora_dropout=0.0,
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
        target_modules=targets if isinstance(targets, str) else list(targets),
        task_type=TaskType.SEQ_CLS if _heads(model) else task,
    )


def _heads(model: Any) -> list[str]:
    return [name for name in HEADS if isinstance(getattr(model, name, None), nn.Module)]


def _layers(model: nn.Module) -> dict[str, Any]:
    """peft's layers by the name of the layer that each is in the place of."""
    return {name: module for name, module in model.named_modules() if hasattr(module, "base_layer")}


def _with_adapter(name: str, weight: nn.Parameter, layer: Any) -> Weight:
    parts = (weight, layer.lora_A[NAME].weight, layer.lora_B[NAME].weight)
    return Weight(name, parts, float(layer.scaling[NAME]), bool(layer.fan_in_fan_out))


def _is_of_adapter(name: str) -> bool:
    return ".lora_A." in name or ".lora_B." in name


def _refuse_shared(model: nn.Module, section: LoraSection) -> None:
    """A merged weight must be its layer's alone: an embedding tied to it would not follow."""
    uses: dict[int, int] = {}
    for _, parameter in model.named_parameters(remove_duplicate=False):
        uses[id(parameter)] = uses.get(id(parameter), 0) + 1
    for name, layer in _layers(model).items():
        base = layer.base_layer
        if NAME not in layer.lora_A:
            raise ConfigError(
                f"model.lora.target_modules ({_told(section)}): {name} is a "
                f"{type(base).__name__}, and adapters go into linear layers. Leave it out."
            )
        if uses[id(base.weight)] > 1:
            raise ConfigError(
                f"model.lora.target_modules ({_told(section)}): {name} shares its weight with "
                f"the embedding, so its adapter could not be merged. Leave it out."
            )


def _told(section: LoraSection) -> str:
    targets = section.target_modules
    return targets if isinstance(targets, str) else ", ".join(targets)
