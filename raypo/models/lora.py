"""LoRA adapters: adding, switching off, merging into the base weights, and saving for peft.

r rank, W [out, in], A [r, in], B [out, r]; a trained layer computes W x + scale * B A x.
Paper: Hu et al. 2021, arXiv:2106.09685, eq. 3.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from raypo.config import ConfigError, LoraSection, SampledModelSection, TrainedModelSection
from raypo.models.checkpoint import network_class, read_config, stored_tensors
from raypo.models.heads import HEADS
from raypo.models.linear import OneDnnLinear, with_float32_logits
from raypo.models.loading import load_causal_lm
from raypo.models.model_folder import follow_umask
from raypo.models.vision import freeze, parts_outside_decoder

NAME = "default"
"""Name under which peft keeps a model's only adapter."""
PREFIX = "base_model.model."
"""Prefix of module names in peft's files."""


@dataclass(frozen=True)
class Weight:
    """Tensor of the model's files, with the adapter that changes it, if any."""

    name: str
    """Name in the model without an adapter."""
    parts: tuple[Tensor, ...]
    """W or a buffer without an adapter; W, A and B with one. Under ZeRO-3, parameters are complete
    only while gathered."""
    scale: float = 1.0
    transposed: bool = False
    """True if W is stored as [in, out], as in GPT-2."""

    def merged(self) -> Tensor:
        """Return W + scale * B A, rounded once; W itself if it has no adapter."""
        weight, *adapter = (part.detach() for part in self.parts)
        if not adapter:
            return weight
        a, b = (part.to(torch.float32) for part in adapter)
        delta = self.scale * (b @ a)
        return (weight.float() + (delta.T if self.transposed else delta)).to(weight.dtype)


def load_policy(section: SampledModelSection | TrainedModelSection) -> Any:
    """Load the causal language model to train, with a new adapter if the config has one."""
    model = load_causal_lm(section.policy, dtype=section.dtype, attention=section.attention)
    if isinstance(section, SampledModelSection) and section.head_dtype == "float32":
        model = with_float32_logits(model)
    freeze(model, section.freeze)
    return add_adapter(model, section.lora)


def check_targets(path: str, kind: Any, section: LoraSection, *, key: str = "model.policy") -> None:
    """Check on the meta device that an adapter fits a model.

    Args:
        path: Folder or hub id; only its config is read.
        kind: One of transformers' Auto classes.
        section: Rank and target modules.
        key: The config key that names the model, for messages.

    Raises:
        ConfigError: see `add_adapter`.
    """
    config = read_config(path, key=key)
    with torch.device("meta"):
        model = network_class(kind, config, path, key=key)(config)
        add_adapter(model, section)


def add_adapter(model: Any, section: LoraSection | None) -> Any:
    """Freeze a model's weights and add an adapter to its linear layers.

    A is drawn from torch's random state, and B starts at zero. A classification head is new, so it
    is trained in full. Parts that text does not pass through, such as a vision tower, get no
    adapter.

    Args:
        model: A Hugging Face model.
        section: Rank and target modules. None leaves the model unchanged.

    Returns:
        The model itself.

    Raises:
        ConfigError: `target_modules` matches no layer, a layer that is not linear, or a tied head;
            or the model has fused experts, which cannot have adapters.
    """
    if section is None:
        return model
    from peft import inject_adapter_in_model  # here, because the import takes 3 s

    fused = _fused_experts(model)
    if fused and section.target_modules == "all-linear":
        _refuse_experts(model, section, fused[0])
    try:
        inject_adapter_in_model(_peft_config(model, section), model, adapter_name=NAME)
    except ValueError as error:
        raise ConfigError(
            f"model.lora.target_modules ({_told(section)}): {_reason(error)} Name linear layers of "
            f"{type(model).__name__}, or set it to all-linear."
        ) from None
    _refuse_layers(model, section)
    blocks = tuple(f"{name.rpartition('.')[0]}." for name in fused)
    if fused and any(name.startswith(blocks) for name in _layers(model)):
        warnings.warn(
            f"model.lora.target_modules ({_told(section)}): the shared experts get adapters, but "
            f"the others ({fused[0]}) get none.",
            stacklevel=2,
        )
    for name in _heads(model):
        getattr(model, name).requires_grad_(True)
    return model


@contextmanager
def adapter_off(model: nn.Module) -> Iterator[None]:
    """Switch a model's adapter off, so that it computes with the base weights."""
    layers = _layers(model).values()
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def merged_weights(model: nn.Module) -> Iterator[Weight]:
    """Yield everything that the model's files hold, under its name in the base model."""
    layers = _layers(model)
    for name, tensor in stored_tensors(model):
        path, _, leaf = name.rpartition(".")
        owner = path.removesuffix(".base_layer")
        if f"{owner}.base_layer" == path and owner in layers:
            layer = layers[owner]
            if leaf == "weight":
                yield _with_adapter(f"{owner}.weight", tensor, layer)
            else:
                yield Weight(f"{owner}.{leaf}", (tensor,))
        elif not _is_of_adapter(name):
            yield Weight(name, (tensor,))


def base_weights(model: nn.Module) -> Iterator[Weight]:
    """Yield the weights of `merged_weights` without the adapter."""
    for weight in merged_weights(model):
        yield Weight(weight.name, weight.parts[:1])


def adapter_weights(model: nn.Module) -> Iterator[Weight]:
    """Yield the trained weights under their names in peft's files."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            yield Weight(PREFIX + name.replace(f".{NAME}.", "."), (parameter,))


def adapter_config(model: Any, section: LoraSection, *, base: str) -> dict[str, Any]:
    """Return the content of peft's adapter_config.json.

    Args:
        model: The model with the adapter.
        section: Rank and target modules.
        base: Folder or hub id of the model that the adapter belongs to.
    """
    values = _peft_config(model, section).to_dict()
    if section.target_modules == "all-linear":  # a keyword that not every reader supports
        values["target_modules"] = {name.rpartition(".")[2] for name in _layers(model)}
    values |= {
        "target_modules": sorted(values["target_modules"]),
        "modules_to_save": _heads(model) or None,
        "base_model_name_or_path": base,
        "inference_mode": True,
    }
    return values


def save_adapter(folder: Path, config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
    """Save an adapter as a folder that peft and vLLM can load."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(
        {name: tensor.contiguous() for name, tensor in weights.items()},
        folder / "adapter_model.safetensors",
        metadata={"format": "pt"},
    )
    follow_umask(folder, "adapter_config.json")


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
        exclude_modules=_not_of_texts(model),
        task_type=TaskType.SEQ_CLS if _heads(model) else task,
    )


def _heads(model: Any) -> list[str]:
    return [name for name in HEADS if isinstance(getattr(model, name, None), nn.Module)]


def _layers(model: nn.Module) -> dict[str, Any]:
    """Return peft's layers, by the name of the layer that each one replaces."""
    return {name: module for name, module in model.named_modules() if hasattr(module, "base_layer")}


def _with_adapter(name: str, weight: Tensor, layer: Any) -> Weight:
    parts = (weight, layer.lora_A[NAME].weight, layer.lora_B[NAME].weight)
    return Weight(name, parts, float(layer.scaling[NAME]), bool(layer.fan_in_fan_out))


def _is_of_adapter(name: str) -> bool:
    return ".lora_A." in name or ".lora_B." in name


def _not_of_texts(model: Any) -> str | None:
    """Return a regular expression for a multimodal model's modules outside the language model."""
    others = parts_outside_decoder(model)
    return rf"(.*\.)?({'|'.join(map(re.escape, others))})\..*" if others else None


def _fused_experts(model: nn.Module) -> list[str]:
    """Return the names of modules that keep the weights of several experts in one tensor."""
    return [
        name
        for name, module in model.named_modules()
        if "expert" in f"{name} {type(module).__name__}".lower()
        and any(parameter.ndim == 3 for parameter in module.parameters(recurse=False))
    ]


def _refuse_experts(model: nn.Module, section: LoraSection, fused: str) -> None:
    """Raise on fused experts instead of leaving them out silently.

    transformers stores all experts of a layer in one tensor [experts, out, in], which is no linear
    layer. peft can train such a tensor, but neither merging here nor vLLM supports it.
    """
    names = [
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if type(module) in (nn.Linear, OneDnnLinear) and "att" in name
    ]
    raise ConfigError(
        f"model.lora.target_modules ({_told(section)}): the experts of {type(model).__name__} "
        f"({fused}) are in one tensor, but adapters need linear layers. Name those of the "
        f"attention, [{', '.join(dict.fromkeys(names))}], or train without model.lora."
    )


def _refuse_layers(model: nn.Module, section: LoraSection) -> None:
    """Raise ConfigError if an adapter is on a layer that it cannot be merged into.

    Such a layer either shares its weight with the embedding, to which the adapter does not apply,
    or is not a plain linear layer. A subclass of a linear layer, such as a router of experts, does
    more than multiply by its weight.
    """
    from transformers.pytorch_utils import Conv1D

    uses: dict[int, int] = {}
    for _, parameter in model.named_parameters(remove_duplicate=False):
        uses[id(parameter)] = uses.get(id(parameter), 0) + 1
    for name, layer in _layers(model).items():
        base = layer.base_layer
        if type(base) not in (nn.Linear, OneDnnLinear, Conv1D):
            raise ConfigError(
                f"model.lora.target_modules ({_told(section)}): {name} is a "
                f"{type(base).__name__}, but adapters need plain linear layers. Leave it out."
            )
        if uses[id(base.weight)] > 1:
            raise ConfigError(
                f"model.lora.target_modules ({_told(section)}): {name} shares its weight with "
                f"the embedding, so its adapter could not be merged. Leave it out."
            )


def _reason(error: ValueError) -> str:
    """Return peft's reason without the printed module and the list of supported classes."""
    told = " ".join(str(error).split()).partition(" Currently, only")[0]
    return re.sub(r"^Target module (\w+)\(.*\) is not supported", r"\1 is no linear layer", told)


def _told(section: LoraSection) -> str:
    targets = section.target_modules
    return targets if isinstance(targets, str) else ", ".join(targets)
