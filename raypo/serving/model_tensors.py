"""Names and shapes of a model's tensors, from its config."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import revert_weight_conversion
from transformers.pytorch_utils import Conv1D

from raypo.models.checkpoint import stored_tensors
from raypo.models.loading import language_class
from raypo.weights.manifest import Manifest, WeightError, summary


@dataclass(frozen=True)
class ModelTensors:
    """Names and shapes in the Hugging Face `state_dict` of a causal language model."""

    required: dict[str, tuple[int, ...]]
    optional: dict[str, tuple[int, ...]]
    """Tensors that a push may leave out: second names of tied tensors."""
    linear: tuple[str, ...] = ()
    """Last name components of the linear layers, such as q_proj. The output head is left out."""
    conversions: Any = None
    """Argument of `as_in_files`. None if files have the same tensors, or several in one."""

    @classmethod
    def of(cls, model: str) -> ModelTensors:
        """Return the tensors of a model, given by folder or hub id, without loading its weights."""
        with torch.device("meta"):
            skeleton = language_class(model).from_config(AutoConfig.from_pretrained(model))
        required = {name: tuple(tensor.shape) for name, tensor in stored_tensors(skeleton)}
        everything = {name: tuple(t.shape) for name, t in skeleton.state_dict().items()}
        head = skeleton.get_output_embeddings()
        linear = {
            name.rpartition(".")[2]
            for name, module in skeleton.named_modules()
            if isinstance(module, torch.nn.Linear | Conv1D) and module is not head
        }
        optional = {n: s for n, s in everything.items() if n not in required}
        conversions = [
            conversion
            for conversion in get_model_conversion_mapping(skeleton, add_legacy=False)
            if type(conversion).__name__ != "PrefixChange"  # only of models loaded from files
        ]
        stand_in = SimpleNamespace(_weight_conversions=conversions, config=skeleton.config)
        names = [name for name, _ in as_in_files(stand_in, stored_tensors(skeleton))]
        converts = conversions and len(set(names)) == len(names)  # each tensor by itself
        return cls(required, optional, tuple(sorted(linear)), stand_in if converts else None)

    def check(self, manifest: Manifest) -> None:
        """Raise if a push does not fit this model.

        Raises:
            WeightError: a tensor is missing, unknown or of another shape.
        """
        known = self.required | self.optional
        sent = {tensor.name: tensor.shape for tensor in manifest.tensors}
        lines = [f"{name} is missing" for name in self.required if name not in sent]
        lines += [f"{name} is unknown" for name in sent if name not in known]
        lines += [
            f"{name} has shape {shape} instead of {known[name]}"
            for name, shape in sent.items()
            if shape != known.get(name, shape)
        ]
        if lines:
            raise WeightError(
                f"the weights of version {manifest.version} are not those of the engine's model: "
                f"{summary(lines)}. Start engine and learner with the same model."
            )


def as_in_files(
    conversions: Any, tensors: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors as `save_pretrained` writes them: single experts, and names of the hub.

    transformers fuses experts and renames tensors when it loads a model. Some models of vLLM (0.32)
    load only the tensors of files, such as Mixtral and DeepSeek-V3.

    Args:
        conversions: `ModelTensors.conversions`.
        tensors: Names and tensors of a transformers model.
    """
    for name, tensor in tensors:
        if conversions is None:
            yield name, tensor
        else:
            yield from revert_weight_conversion(conversions, {name: tensor}).items()
