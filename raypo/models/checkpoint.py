"""Check that a model's files contain every weight of the network.

If a weight is missing, transformers initialises it at random and only logs a message, so a run
could train from it unnoticed. Here a missing weight is an error, for every model of a run.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    PretrainedConfig,
)
from transformers.utils import logging

from raypo.config import ConfigError
from raypo.models.heads import HEADS
from raypo.models.model_files import weight_files
from raypo.models.shares import without_shards

VALUE_HEADS = ("v_head", "value_head", "rm_head", "reward_head", "regression_head")
"""Heads of other libraries' reward models and critics, which transformers does not load."""
WRAPPERS = (
    "module.",
    "_orig_mod.",
    "_fsdp_wrapped_module.",
    "base_model.model.",
    "pretrained_model.",
)
"""Prefixes of weight names in a model that was saved from within a wrapper."""
OLD_BUFFERS = re.compile(
    r"(^|\.)(\w*(attn|attention)\.(bias|masked_bias)|causal_mask|inv_freq|(cos|sin)_cached"
    r"|embed_positions|embed_positions\.weights|position_ids|token_type_ids)$"
)
"""Names of constants that networks compute, and that transformers before 4.32 saved with the
weights: causal masks (the `bias` of the attention module, not of a layer in it), rotary and
sinusoidal tables, position and token-type ids. The files of GPT-2, GPT-Neo, GPT-J and CodeGen on
the hub contain such constants."""
SHOWN = 3
"""Maximum number of weight names in an error message."""


def read_config(path: str, *, key: str = "model", **values: Any) -> PretrainedConfig:
    """Return the transformers config of a folder or hub id; `values` override its attributes.

    Raises:
        ConfigError: transformers does not know the architecture, or cannot read the file.
    """
    try:
        # Without trust_remote_code=False, transformers asks on the terminal for permission to run a
        # folder's own code.
        return AutoConfig.from_pretrained(path, trust_remote_code=False, **values)
    except Exception as error:  # config classes raise many types when they validate their values
        raise ConfigError(
            f"{key} ({path}): transformers cannot read its config.json: {first_line(error)} Give "
            f"a model of an architecture that the installed transformers knows."
        ) from error


def network_class(kind: Any, config: PretrainedConfig, path: str, *, key: str = "model") -> Any:
    """Return the class that one of transformers' Auto classes builds from a config.

    Raises:
        ConfigError: the architecture has no such class.
    """
    try:
        with without_shards(), torch.device("meta"):
            return type(kind.from_config(config, dtype=torch.float32))
    except ValueError as error:
        if "Unrecognized configuration class" not in str(error):
            raise
        what = _KINDS[kind]
        raise ConfigError(
            f"{key} ({path}): transformers has no {what} for the architecture {config.model_type}. "
            f"Give a model that {kind.__name__} loads."
        ) from None


def stored_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that a model's files hold, under their names in the model.

    These are the parameters and the persistent buffers, such as the bias of a router. A tensor with
    several names, such as a tied output head, comes once, under the name that files have. Whatever
    is pushed, saved or compared is this set.
    """
    tied = getattr(model, "all_tied_weights_keys", {})
    unsaved = getattr(model, "_keys_to_ignore_on_save", None) or ()
    tensors = model.state_dict(keep_vars=True)
    names: dict[int, str] = {}
    for name in sorted(tensors, key=lambda name: name in tied):
        names.setdefault(id(tensors[name]), name)
    for name, tensor in tensors.items():
        if names[id(tensor)] == name and name not in unsaved:
            yield name, tensor


def check_weights(key: str, path: str, kind: Any, *, new_head: bool = False) -> None:
    """Check the names and shapes of a folder's weights on the meta device.

    No values are read. A hub id is skipped: its weights are checked when they are loaded.

    Args:
        key: The config key that names the model, for messages.
        path: Folder or hub id.
        kind: One of transformers' Auto classes.
        new_head: Allow a missing classification head.

    Raises:
        ConfigError: a weight is missing or unexpected, or has another shape.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():
        return
    files = weight_files(folder, key)
    classifies = kind is AutoModelForSequenceClassification
    config = read_config(path, key=key, **({"num_labels": 1} if classifies else {}))
    if getattr(config, "quantization_config", None) is not None:
        return  # the quantiser creates layers; weights are checked when they are loaded
    network = network_class(kind, config, path, key=key)
    with _silent():
        try:
            model, info = network.from_pretrained(
                None,
                config=config,
                state_dict=_meta_tensors(files),
                device_map="meta",
                output_loading_info=True,
                ignore_mismatched_sizes=True,
            )
        except (RuntimeError, NotImplementedError):
            return  # a conversion needs the values; weights are checked when they are loaded
    check_loaded(model, info, path=path, key=key, new_head=new_head)
    parts = sorted({name.split(".")[0] for name in _without_place(info)})
    if parts and kind is AutoModelForCausalLM:
        warnings.warn(
            f"{key} ({path}): {type(model).__name__} has no {', '.join(parts)}; weights of that "
            f"name are neither loaded nor saved.",
            stacklevel=2,
        )


def check_loaded(
    model: Any, info: Mapping[str, Any], *, path: str, key: str = "model", new_head: bool = False
) -> None:
    """Raise if any weight of a network does not come from its files.

    Args:
        model: A Hugging Face model.
        info: The loading info of `from_pretrained`.
        path: Folder or hub id, for messages.
        key: The config key that names it, for messages.
        new_head: Allow a missing classification head.

    Raises:
        ConfigError: a weight is missing or unexpected, or has another shape.
    """
    base = f"{model.base_model_prefix}."
    is_backbone = model.base_model is model
    is_classifier = any(hasattr(model, name) for name in HEADS)
    missing = sorted(info["missing_keys"])
    if new_head and is_classifier:
        missing = [name for name in missing if name.startswith(base) and "pooler" not in name]
    own = {name for name, _ in model.named_children()}
    own |= {name for name, _ in model.base_model.named_children()}
    unexpected = _without_place(info)
    inside = [name for name in unexpected if name.removeprefix(base).split(".")[0] in own]
    if is_backbone:  # the head of LLaVA's language model has its name in files
        inside = [name for name in inside if name != "language_model.lm_head.weight"]
    heads = [name for name in unexpected if name.split(".")[0] in VALUE_HEADS]
    if not (is_backbone or is_classifier):
        heads += [name for name in unexpected if name.split(".")[0] in HEADS]
    shapes = sorted(info["mismatched_keys"])
    untied = _untied(model)
    if untied:
        raise ConfigError(
            f"{key} ({path}): its config.json says tie_word_embeddings, and its files have "
            f"{untied[0]} with other values than the embedding. Engines would use the embedding. "
            "Set tie_word_embeddings to false in config.json."
        )
    if not (missing or inside or heads or shapes):
        return
    problems = []
    if missing:
        problems.append(f"its files lack {_some(missing)}, which would start at random")
    if foreign := (unexpected if missing else sorted({*inside, *heads})):
        problems.append(f"they have {_some(foreign)}, which the model does not have")
    if shapes:
        name, actual, wanted = shapes[0]
        problems.append(f"{name} has the shape {list(actual)} in its files, not {list(wanted)}")
    raise ConfigError(
        f"{key} ({path}), read as {type(model).__name__}: {'; '.join(problems)}. "
        f"{_remedy(type(model).__name__, missing, foreign, heads, is_classifier)}"
    )


def _without_place(info: Mapping[str, Any]) -> list[str]:
    """Return the names of weights in the files that the network lacks, without `OLD_BUFFERS`."""
    return sorted(name for name in info["unexpected_keys"] if not OLD_BUFFERS.search(name))


def _untied(model: Any) -> list[str]:
    """Return the names of weights that the config ties, but whose values differ in the files.

    transformers leaves such weights untied.
    """
    tied = model.get_expanded_tied_weights_keys(all_submodels=True)
    return sorted(set(tied) - set(model.all_tied_weights_keys))


def _remedy(
    network: str, missing: list[str], foreign: list[str], heads: list[str], is_classifier: bool
) -> str:
    if prefix := next(
        (wrapper for wrapper in WRAPPERS if any(n.startswith(wrapper) for n in foreign)), None
    ):
        return (
            f'Save the model itself and not its wrapper, or take "{prefix}" off the names in the '
            f"files."
        )
    if heads and is_classifier:
        return (
            "Rename the head's weight [1, hidden size] to score.weight in the files, and remove "
            "any bias: it shifts all scores equally."
        )
    if heads:
        return (
            "This is a reward model or a critic. Give a causal language model, or take "
            f"{heads[0].split('.')[0]} out of the files. A critic's value head belongs in "
            "value_head.safetensors, as weight [1, hidden size] and bias [1]."
        )
    if is_classifier and missing and all(name.split(".")[0] in HEADS for name in missing):
        return (
            "A reward model is a sequence classifier with its trained score head. Train one "
            "with the recipe reward_model, or give its folder."
        )
    biases = [name for name in foreign if name.split(".")[0] in HEADS and name.endswith(".bias")]
    if is_classifier and biases and biases == foreign and not missing:
        return f"Remove {_some(biases)} from the files: it shifts all scores equally."
    if any("lora_" in name for name in foreign):
        return "Merge the adapter into the model (merge_and_unload of peft) and save that."
    if missing == ["lm_head.weight"]:
        return "Save the model with its head, or set tie_word_embeddings in its config.json."
    return f"Give a folder that save_pretrained of {network} wrote, with its config.json."


def _meta_tensors(files: list[Path]) -> dict[str, Tensor]:
    """Return meta tensors with the shapes of the files' weights."""
    tensors: dict[str, Tensor] = {}
    for path in files:
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118
                    shape = file.get_slice(name).get_shape()
                    tensors[name] = torch.empty(shape, device="meta")
        else:
            tensors |= torch.load(path, map_location="meta", weights_only=True, mmap=True)
    return tensors


@contextmanager
def _silent() -> Iterator[None]:
    """Silence transformers' progress bars and load report, which an error message replaces."""
    level, had_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if had_bars:
            logging.enable_progress_bar()


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:SHOWN])
    return shown if len(names) <= SHOWN else f"{shown} and {len(names) - SHOWN} more"


def first_line(error: Exception) -> str:
    """Return the first line of an error's text, as a sentence."""
    line = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return line.strip().rstrip(".") + "."


_KINDS = {
    AutoModel: "model",
    AutoModelForCausalLM: "causal language model",
    AutoModelForImageTextToText: "model of images and text",
    AutoModelForSequenceClassification: "sequence classifier (reward model)",
}
