"""Checks of a model folder's files that import neither torch nor transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from raypo.config import ConfigError

SINGLE = ("model.safetensors", "pytorch_model.bin")
"""Names of the weight files that transformers and vLLM read. The first one that exists is used,
either as a single file or as shards with an index NAME.index.json."""

ROUTED = (
    *("flex_olmo", "gpt_oss", "mixtral", "olmoe", "qwen2_moe", "qwen3_5_moe_text"),
    *("qwen3_moe", "qwen3_next"),
)
"""Model types whose routers are known (`raypo.models.routers`): linear, with a softmax, and without
a bias that balances the experts."""


REPLAYED = ("mixtral", "olmoe", "qwen2_moe", "qwen3_moe")
"""Model types of `ROUTED` whose experts an engine can record and the learner can replay
(`raypo.models.router_replay`). In the KV cache of most others, some tokens have no place of their
own, because their layers have sliding windows or linear attention. No test records the experts of
FlexOlmo."""

ATTENTION_LAYERS = {"full_attention", "sliding_attention"}
"""Types of layers (`layer_types`) that read packed rows (`raypo.models.packed_attention`)."""

VISION = ("idefics3", "llava", "qwen2_5_vl", "qwen3_vl", "smolvlm")
"""Model types whose images the learner reads: log-probs and gradients of packed rows equal those of
transformers (`tests/unit/models/test_vision.py`)."""
VISION_OF_ENGINES = ("qwen2_5_vl",)
"""Model types of `VISION` whose images vLLM's engines were seen to read as the learner does
(`tests/integration/test_images.py`)."""


def looks_like_hub_id(path: str) -> bool:
    """Return True if a name could be one on the Hugging Face hub, and not a path."""
    return path.count("/") <= 1 and not path.startswith((".", "/", "~"))


def cached_folder(path: str) -> str | None:
    """Return the cache folder of a downloaded hub id.

    The result is None if `path` is a folder, or no hub id that is cached.
    """
    from huggingface_hub import try_to_load_from_cache

    if Path(path).expanduser().is_dir():
        return None
    try:
        config = try_to_load_from_cache(path, "config.json")
    except ValueError:  # it is no hub id
        return None
    return str(Path(config).parent) if isinstance(config, str) else None


def config_of(folder: Path, key: str) -> dict[str, Any]:
    """Return the content of a folder's config.json.

    Raises:
        ConfigError: the file is missing or is no JSON object, or the folder contains an adapter.
    """
    has_adapter = (folder / "adapter_config.json").is_file()
    if not (folder / "config.json").is_file():
        what, remedy = (
            "so it is not a Hugging Face model",
            "Give a folder written by save_pretrained",
        )
        if has_adapter:
            what = "only a LoRA adapter"
            remedy = (
                "Merge the adapter into its base model (merge_and_unload of peft, save_pretrained) "
                "and give that folder"
            )
        raise ConfigError(
            f"{key} ({folder}): the folder has no config.json, {what}. {remedy}, or a hub id."
        )
    if has_adapter:
        raise ConfigError(
            f"{key} ({folder}): the folder has an adapter_config.json beside its config.json, "
            "and transformers would load that adapter onto another base model. Merge the "
            "adapter (merge_and_unload of peft) and save the model to a separate folder; if it "
            "is merged already, remove adapter_config.json."
        )
    try:
        values = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{key} ({folder}): its config.json cannot be read: {error}. Correct the file."
        ) from None
    if not isinstance(values, dict):
        raise ConfigError(
            f"{key} ({folder}): its config.json is not a JSON object. Correct the file."
        )
    return values


def refuse_quantized(values: dict[str, Any], path: str, key: str) -> None:
    """Raise if the weights are quantised, because they cannot be trained.

    Args:
        values: The content of config.json.
        path: The model's folder, for messages.
        key: The config key that names the model, for messages.

    Raises:
        ConfigError: config.json has a quantization_config.
    """
    quantization = values.get("quantization_config") or values.get("compression_config")
    if not quantization:
        return
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    raise ConfigError(
        f"{key} ({path}): its weights are quantised ({method or 'quantization_config'}), but "
        "gradients need weights in float32 or bfloat16. Give the model before it was quantised, "
        "or load it with dequantize and save that."
    )


def max_positions(values: dict[str, Any]) -> int | None:
    """Return the longest sequence that a config.json allows, in tokens. None means no limit.

    A scaling factor of rotary positions multiplies the limit, unless the limit already includes the
    factor. vLLM computes the limit in the same way (`_get_and_verify_max_len`).

    Args:
        values: The content of config.json.
    """
    values = values.get("text_config") or values
    limits = [values.get(name) for name in ("max_position_embeddings", "n_positions")]
    limit = next((value for value in limits if isinstance(value, int) and value > 0), None)
    if limit is None or values.get("alibi"):
        return None
    return int(max(limit, *(_stretched(limit, rope, values) for rope in _ropes(values))))


def rotation_limit(values: dict[str, Any]) -> int | None:
    """Return the longest pass in which rotations do not depend on the longest row.

    transformers rotates all rows of a pass by other factors if one of them is longer: by the long
    factors of LongRoPE, or by factors for that length (dynamic NTK).

    Args:
        values: The content of config.json.

    Returns:
        The length in tokens. None means that rotations do not depend on lengths.
    """
    values = values.get("text_config") or values
    for rope in _ropes(values):
        is_long = _rope_type(rope) in ("longrope", "su")
        if is_long and rope.get("short_factor") != rope.get("long_factor"):
            name = "original_max_position_embeddings"
            return rope.get(name) or values.get(name) or values.get("max_position_embeddings")
        if _rope_type(rope) == "dynamic":
            return values.get("max_position_embeddings")
    return None


def _rope_type(rope: dict[str, Any]) -> Any:
    return rope.get("rope_type") or rope.get("type")


def _ropes(values: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rotary scalings of a config.json: one for all layers, or one per type of layer."""
    scaling = values.get("rope_scaling") or values.get("rope_parameters")
    if not isinstance(scaling, dict):
        return [{}]
    return [value for value in scaling.values() if isinstance(value, dict)] or [scaling]


def _stretched(limit: int, rope: dict[str, Any], values: dict[str, Any]) -> float:
    """Return the limit after rotary scaling, in tokens."""
    factor, kind = rope.get("factor"), _rope_type(rope)
    if not isinstance(factor, int | float):
        return limit
    if kind == "yarn":
        return (rope.get("original_max_position_embeddings") or limit) * factor
    # The limit of gemma3 already includes the factor.
    is_inside = str(values.get("model_type")).startswith("gemma3")
    return limit * factor if kind in ("linear", "dynamic") and not is_inside else limit


def weight_files(folder: Path, key: str) -> list[Path]:
    """Return the weight files of a folder.

    Raises:
        ConfigError: there are no weight files, a file that the index names is missing, or a file
            cannot be read.
    """
    files = stored_files(folder, key)
    if not files:
        others = sorted(path.name for path in folder.iterdir())[:8]
        raise ConfigError(
            f"{key} ({folder}): the folder has no weights: no {' or '.join(SINGLE)}, and no "
            f"index of shards. It has {', '.join(others)}. Give a folder written by "
            "save_pretrained."
        )
    return files


def stored_files(folder: Path, key: str) -> list[Path]:
    """Return the weight files of a folder, after checking their headers. May be empty.

    Raises:
        ConfigError: a file that the index names is missing, or a file is truncated or a Git LFS
            pointer.
    """
    for name in SINGLE:
        if (folder / name).is_file():
            files = [folder / name]
        elif (index := folder / f"{name}.index.json").is_file():
            files = _shards(index, key)
        else:
            continue
        for path in files:
            _check_whole(path, key)
        return files
    return []


def tensor_bytes(path: Path, *, in_float32: bool) -> int:
    """Return the least bytes that a file's weights take after training.

    Args:
        path: A file of `stored_files`.
        in_float32: Whether they are trained in float32. Otherwise they may become bfloat16, so
            that an element takes 2 bytes at most.
    """
    size = path.stat().st_size
    if in_float32:
        return size
    if path.suffix != ".safetensors":
        return size // 2
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    total = 0
    for name, tensor in header.items():
        if name != "__metadata__":
            begin, end = tensor["data_offsets"]
            total += (end - begin) // {"F64": 4, "F32": 2}.get(tensor["dtype"], 1)
    return total


def _shards(index: Path, key: str) -> list[Path]:
    folder = index.parent
    try:
        weights: dict[str, str] = json.loads(index.read_text())["weight_map"]
        names = sorted(set(weights.values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"{key} ({folder}): its {index.name} cannot be read: {error!r}. Copy the folder again."
        ) from None
    absent = [name for name in names if not (folder / name).is_file()]
    if absent:
        raise ConfigError(
            f"{key} ({folder}): its {index.name} names {', '.join(absent)}, but {len(absent)} of "
            f"its {len(names)} files are missing. Copy the folder again, or save the model again."
        )
    return [folder / name for name in names]


def _check_whole(path: Path, key: str) -> None:
    """Raise if a file is truncated or is a Git LFS pointer."""
    with path.open("rb") as file:
        is_pointer = file.read(24) == b"version https://git-lfs."
    problem = "is a pointer of Git LFS, not the weights themselves" if is_pointer else None
    if problem is None and path.suffix == ".safetensors":
        try:
            with safe_open(path, framework="numpy"):  # compares the header with the file's length
                pass
        except SafetensorError as error:
            problem = f"cannot be read ({error})"
    if problem:
        raise ConfigError(f"{key} ({path.parent}): {path.name} {problem}. Copy the file again.")
