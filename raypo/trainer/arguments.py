"""Conversion of a trainer's Hugging Face arguments into a run config.

`GRPOTrainer(model=..., train_dataset=..., reward_funcs=..., args={...})` builds the config that a
run file would hold: each argument sets one config key, and `args` sets any key by its dotted name.
A config object of TRL as `args` is translated as `raypo init` translates its JSON.
"""

from __future__ import annotations

import math
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from numbers import Real
from pathlib import Path
from typing import Any, Generic, TypeVar

import xxhash
from pydantic import BaseModel

from raypo.config import ConfigError, OnlineConfig, PPOConfig, RecipeConfig, is_import_path
from raypo.config.base import TODO, read_yaml
from raypo.config.fields import flatten, known_keys, nested
from raypo.config.paths import absolute_function, is_uri
from raypo.custom.loader import check_callable, function_name
from raypo.data.rows import read_rows
from raypo.rewards.scoring import RewardFunction, WeightedSum
from raypo.storage.folder import TEMPORARY
from raypo.storage.run_files import GIVEN_MODELS, RunFiles
from raypo.trainer.given_rows import Rows, check_rows
from raypo.translation.foreign_settings import RECIPES, trl_source
from raypo.translation.run_file import translate

AnyConfig = TypeVar("AnyConfig", bound=RecipeConfig)

GIVEN = "given in Python"
"""Placeholder in a config for rows and models that are not yet written to files."""
LORA_KEYS = {"r": "rank", "lora_alpha": "alpha", "target_modules": "target_modules"}
"""Key below `model.lora` for each field of peft's LoraConfig."""
_LORA_IGNORED = {"task_type", "inference_mode", "base_model_name_or_path", "peft_version"}
"""Fields of peft's LoraConfig that do not change the training."""
HASH_BLOCK_BYTES = 1 << 24
"""Number of bytes of a file that are hashed at a time."""


@dataclass(frozen=True)
class Arguments:
    """Arguments of a trainer, except its config. `RecipeTrainer.__init__` describes them."""

    model: Any = None
    args: object = None
    train_dataset: Any = None
    eval_dataset: Any = None
    reward_funcs: Any = None
    reward_weights: Sequence[float] | None = None
    processing_class: Any = None
    peft_config: Any = None
    ref_model: Any = None
    callbacks: Sequence[Any] | None = None
    datasets: Mapping[str, Rows] | None = None


@dataclass
class TrainerInput(Generic[AnyConfig]):
    """Config of a trainer, and the Python objects that a config cannot hold."""

    config: AnyConfig
    reward_fn: RewardFunction | None
    callbacks: tuple[Callable[..., Any], ...]
    rows: dict[str, Rows]
    """Rows to write into the run's folder, by config key."""
    models: dict[str, tuple[Any, Any]]
    """Model and tokenizer to save into the run's folder, by config key."""
    is_built: bool
    """True if the config was built from arguments, not given as a file or a config object."""
    report: tuple[str, ...] = ()
    """Lines about the use of each field of a TRL config."""


def read_arguments(
    config_class: type[AnyConfig], config: object, arguments: Arguments, *, preset: str | None
) -> TrainerInput[AnyConfig]:
    """Convert a trainer's arguments to a config and the Python objects that a config cannot hold.

    Args:
        config_class: Config class of the recipe.
        config: A config, a mapping of its keys, the path of a run file, or None.
        arguments: The other arguments, which set keys of the config.
        preset: Value of `ppo.preset` if `config` sets neither `ppo.preset` nor `ppo.advantage`.

    Raises:
        ConfigError: an argument is wrong, or has no effect.
    """
    config, arguments, report = _translate_trl(config_class, config, arguments)
    if config is not None and arguments.args is not None:
        raise ConfigError(
            f"args ({type(arguments.args).__name__}): the first argument is a config already. Give "
            f"one of the two; both take a config, a mapping or the path of a run file."
        )
    config = arguments.args if config is None else config
    values, origin = _nested_values(config, config_class)
    if preset and not {"preset", "advantage"} & (values.get("ppo") or {}).keys():
        put(values, "ppo.preset", preset)
    if arguments.processing_class is not None and not hasattr(
        arguments.processing_class, "save_pretrained"
    ):
        raise ConfigError(
            f"processing_class ({arguments.processing_class!r}): is not a tokenizer. Give the "
            "object that AutoTokenizer.from_pretrained returns, or leave it out: a run loads the "
            "tokenizer from the model's folder."
        )
    models = _set_models(values, config_class, arguments)
    if arguments.peft_config is not None:
        put(values, "model.lora", _lora_values(arguments.peft_config))
    rows = _set_rows(values, config_class, arguments)
    reward_fn = _set_rewards(values, config_class, arguments)
    callbacks = _set_callbacks(values, () if arguments.callbacks is None else arguments.callbacks)
    if arguments.model is not None:
        path = str(getattr(arguments.model, "name_or_path", arguments.model))
        recipe = config_class.model_fields["recipe"].default
        valid_name = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(path).name).strip("._-")
        values.setdefault("name", f"{valid_name or 'model'}-{recipe}")
    is_built = config is None or isinstance(config, Mapping)
    for name, key in (("model", "model.policy"), ("train_dataset", "data.prompts")):
        section, _, key_name = key.partition(".")
        if is_built and key_name not in (values.get(section) or {}):
            raise ConfigError(f"{name} (None): is required. Give {name}, or {key} in args.")
    parsed_config = config_class.parse(values, origin=origin)
    is_gdpo = isinstance(parsed_config, PPOConfig) and parsed_config.ppo.advantage == "gdpo"
    if is_gdpo and isinstance(reward_fn, WeightedSum) and set(reward_fn.weights) != {1.0}:
        raise ConfigError(
            f"reward_weights ({reward_fn.weights}): weight the score, but ppo.advantage: gdpo "
            "trains on the parts of the score. Leave them out, and set ppo.part_weights."
        )
    return TrainerInput(parsed_config, reward_fn, callbacks, rows, models, is_built, report)


def trl_class_name(value: object) -> str:
    """Return the name of an object's TRL config class, or an empty string."""
    if isinstance(value, BaseModel) or not hasattr(value, "to_dict"):
        return ""
    return next((kind.__name__ for kind in type(value).__mro__ if kind.__name__ in RECIPES), "")


def _translate_trl(
    config_class: type[RecipeConfig], config: object, arguments: Arguments
) -> tuple[object, Arguments, tuple[str, ...]]:
    """Translate a config object of TRL. Keys of `config` take precedence over its fields.

    Returns:
        The nested keys, the other arguments, and a report about the fields. Without a TRL config,
        config and arguments are unchanged.

    Raises:
        ConfigError: a field is refused, or it decides what is learned and has no known value.
    """
    if trl_class_name(config) and arguments.args is None:
        config, arguments = None, replace(arguments, args=config)
    if not trl_class_name(arguments.args):
        return config, arguments, ()
    args: Any = arguments.args
    name = f"args ({type(args).__name__})"
    if config is not None and not isinstance(config, Mapping):
        raise ConfigError(
            f"{name}: the first argument is a run file or a config, which has all settings. Give "
            "one of the two, or a mapping of single keys as the first argument."
        )
    fields = dict(args.to_dict())
    weights = fields.pop("reward_weights", None)
    if weights is not None and arguments.reward_weights is None:
        arguments = replace(arguments, reward_weights=weights)
    # Batch sizes in GRPOConfig and RLOOConfig already count all processes.
    if trl_class_name(args) not in ("GRPOConfig", "RLOOConfig"):
        fields["world_size"] = getattr(args, "world_size", 1)
    source = trl_source(fields, name, trl_class_name(args))
    overrides = {str(key): value for key, value in flatten(config or {}).items()}
    if source.recipe != config_class.model_fields["recipe"].default:
        raise ConfigError(
            f"{name}: belongs to another trainer, of recipe {source.recipe}. Give the config of "
            f"TRL for {config_class.model_fields['recipe'].default}."
        )
    argument_by_key = {
        "model.policy": (arguments.model,),
        "data.prompts": (arguments.train_dataset, arguments.datasets),
        "reward.function": (arguments.reward_funcs,),
    }
    set_keys = [
        key for key, values in argument_by_key.items() if any(v is not None for v in values)
    ]
    translation = translate(
        source, keys_set_elsewhere=[*set_keys, *overrides], rows=_count_rows(arguments)
    )
    # Optional keys: `name` defaults to a name made from the model's; a prompt above the default
    # max_prompt_tokens stops the run.
    optional = ("name", "data.max_prompt_tokens")
    unset = {key: hint for key, (value, hint) in translation.settings.items() if str(value) == TODO}
    if missing := [f"{key}: {hint}" for key, hint in unset.items() if key not in optional]:
        raise ConfigError(
            f"{name}: does not tell these keys, which decide what is learned: "
            f"{'; '.join(missing)}. Give them as the first argument of the trainer: "
            f"{{{missing[0].partition(':')[0]!r}: ...}}."
        )
    settings = {key: value for key, value in translation.settings.items() if key not in unset}
    values = nested({key: value for key, (value, _) in settings.items()})
    for key, value in overrides.items():
        put(values, key, value)
    return (
        values,
        replace(arguments, args=None),
        (f"{name}:", *translation._replace(settings=settings).report()),
    )


def _count_rows(arguments: Arguments) -> int | None:
    """Return the number of training rows, or None if it is unknown."""
    data = arguments.train_dataset
    if data is None:
        datasets = arguments.datasets or {}
        data = datasets.get("train", datasets.get("data.prompts"))
    if isinstance(data, str | Path):
        is_file = Path(data).is_file()
        return sum(1 for _ in read_rows(str(data), key="train_dataset")) if is_file else None
    is_lazy = hasattr(data, "materialize")  # len() would execute a ray.data.Dataset
    return len(data) if isinstance(data, Sized) and not is_lazy else None


def put(values: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key in nested values. A mapping is merged into an existing mapping."""
    if isinstance(value, BaseModel):  # a section, like PPOSection(num_epochs=2)
        value = value.model_dump(exclude_unset=True)
    top_key, _, subkey = key.partition(".")
    if subkey:
        section = values.get(top_key)
        values[top_key] = dict(section) if isinstance(section, Mapping) else {}
        put(values[top_key], subkey, value)
    elif isinstance(value, Mapping) and isinstance(values.get(top_key), Mapping):
        for name, entry in value.items():
            put(values, f"{top_key}.{name}", entry)
    else:
        values[top_key] = value


def _nested_values(config: object, config_class: type[RecipeConfig]) -> tuple[dict[str, Any], str]:
    """Return the nested values of a config in any form, and the prefix of error messages."""
    if isinstance(config, str | Path):
        is_file = Path(config).exists() or Path(config).suffix in (".yaml", ".yml")
        if not is_file or Path(config, "config.json").exists():
            problem = "this is a model's folder" if is_file else "there is no such run file"
            raise ConfigError(
                f"config ({config}): {problem}. Give the path of a run file, or pass the model as "
                f"model={str(config)!r}."
            )
        return read_yaml(Path(config), ()), str(config)
    if isinstance(config, config_class):
        dumped = config.model_dump()
        if "ppo" in dumped:  # without its defaults, which would hide the preset of GRPOTrainer
            dumped["ppo"] = getattr(config, "ppo").model_dump(exclude_unset=True)  # noqa: B009
        return dumped, "config"
    if config is None or isinstance(config, Mapping):
        values: dict[str, Any] = {}
        for key, value in (config or {}).items():
            put(values, str(key), value)
        return values, "args"
    name = type(config).__name__
    is_foreign = "trl" in type(config).__module__
    hint = f" Of TRL, raypo reads {', '.join(RECIPES)}." if is_foreign else ""
    raise ConfigError(
        f"config ({name}): must be a {config_class.__name__}, a mapping of its keys like "
        f'{{"num_steps": 100, "learner.policy_lr": 1e-6}}, or the path of a run file.{hint}'
    )


def _set_models(
    values: dict[str, Any], config_class: type[RecipeConfig], arguments: Arguments
) -> dict[str, tuple[Any, Any]]:
    """Set the config keys of the models. Return models given as objects, with their tokenizers."""
    recipe_keys, objects = known_keys(config_class), {}
    for name, key in (("model", "model.policy"), ("ref_model", "model.reference")):
        model = getattr(arguments, name)
        if model is not None and key not in recipe_keys:
            raise ConfigError(f"{name}: this recipe has no {key}. Leave it out.")
        if isinstance(model, str | Path):
            put(values, key, str(model))
        elif model is not None:
            _check_model(model, name, arguments.processing_class)
            objects[key] = (model, arguments.processing_class)
            put(values, key, GIVEN)
    if arguments.processing_class is not None and "model.policy" not in objects:
        _check_tokenizer(arguments.processing_class, values)
    return objects


def _check_model(model: Any, name: str, tokenizer: Any) -> None:
    """Refuse an object that cannot be saved as a Hugging Face folder."""
    label = f"{name} ({type(model).__name__})"
    if hasattr(model, "peft_config"):
        raise ConfigError(
            f"{label}: already has adapters, but a run trains its own. Give "
            "model.merge_and_unload(), or the base model and peft_config."
        )
    if not hasattr(model, "save_pretrained"):
        raise ConfigError(
            f"{label}: is not a transformers model. Give a folder, a hub id, or an object with "
            "save_pretrained."
        )
    if tokenizer is None:
        raise ConfigError(
            f"{label}: a model object is saved to the run's folder together with its tokenizer. "
            "Give processing_class, or give the model's folder or hub id as a text."
        )


def _check_tokenizer(tokenizer: Any, values: Mapping[str, Any]) -> None:
    """Refuse a tokenizer that differs from the one in `model.policy`, which the run loads."""
    policy = str((values.get("model") or {}).get("policy") or "")
    if not policy:
        return  # a missing policy is refused later
    tokenizer_path = str(getattr(tokenizer, "name_or_path", ""))
    if (
        tokenizer_path
        and tokenizer_path != policy
        and Path(tokenizer_path).absolute() != Path(policy).absolute()
    ):
        raise ConfigError(
            f"processing_class ({tokenizer_path}): a run loads the tokenizer from model.policy "
            f"({policy}). Save model and tokenizer to one folder, or give the model as an object."
        )
    from raypo.models.loading import load_tokenizer

    loaded = load_tokenizer(policy)
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)  # a processor contains its tokenizer
    names = ("chat_template", "bos_token", "eos_token")
    differing = [
        name for name in names if getattr(tokenizer, name, None) != getattr(loaded, name, None)
    ]
    # Scripts add a padding token, which raypo does not need.
    padding_tokens = {getattr(tokenizer, "pad_token", None), loaded.pad_token}
    tokens, loaded_tokens = (
        {
            name: token
            for name, token in getattr(source, "added_tokens_decoder", {}).items()
            if str(token) not in padding_tokens
        }
        for source in (tokenizer, loaded)
    )
    differing += ["added_tokens_decoder"] * (tokens != loaded_tokens)
    if differing:
        raise ConfigError(
            f"processing_class ({tokenizer_path}): its {differing[0]} differs from the tokenizer "
            f"in model.policy ({policy}), which a run loads. Save it there "
            "(tokenizer.save_pretrained), or give the model as an object."
        )


def _lora_values(peft_config: Any) -> dict[str, Any]:
    """Convert peft's LoraConfig to the keys below `model.lora`."""
    if isinstance(peft_config, Mapping):
        return dict(peft_config)
    from peft import LoraConfig

    if not isinstance(peft_config, LoraConfig):
        raise ConfigError(
            f"peft_config ({type(peft_config).__name__}): raypo trains only LoRA adapters. Give a "
            "LoraConfig, or a mapping like {'rank': 16, 'alpha': 32}."
        )
    defaults, values = LoraConfig().to_dict(), peft_config.to_dict()
    for name in values.keys() - LORA_KEYS.keys() - _LORA_IGNORED:
        if values[name] != defaults.get(name) and values[name] not in (None, [], {}):
            raise ConfigError(
                f"peft_config.{name} ({values[name]!r}): raypo supports r, lora_alpha and "
                "target_modules, without dropout. Leave it out."
            )
    if values["target_modules"] is None:
        raise ConfigError(
            "peft_config.target_modules (None): peft would choose the layers by the "
            "architecture. Set it to 'all-linear' or to names like ['q_proj', 'v_proj']."
        )
    modules = values["target_modules"]
    values["target_modules"] = modules if isinstance(modules, str) else sorted(modules)
    return {raypo_key: values[peft_key] for peft_key, raypo_key in LORA_KEYS.items()}


def _set_rows(
    values: dict[str, Any], config_class: type[RecipeConfig], arguments: Arguments
) -> dict[str, Rows]:
    """Set the config keys of the data. Return rows given as objects, by config key."""
    held_out = "eval.pairs" if "eval.pairs" in known_keys(config_class) else "eval.prompts"
    rows: dict[str, Rows] = {}
    for name, data in (arguments.datasets or {}).items():
        key = {"train": "data.prompts", "eval": held_out}.get(name, name)
        if key in rows:
            raise ConfigError(f"datasets ({key}): the rows of this key are given twice.")
        rows[key] = data
    for name, key in (("train_dataset", "data.prompts"), ("eval_dataset", held_out)):
        data = getattr(arguments, name)
        if data is not None and key in rows:
            raise ConfigError(f"{name}: datasets has {key} too. Give one of the two.")
        if isinstance(data, str | Path):
            put(values, key, str(data))
        elif data is not None:
            rows[key] = data
    check_rows(config_class, rows)
    for key in rows:
        put(values, key, GIVEN)
    return rows


def _set_callbacks(values: dict[str, Any], argument: Any) -> tuple[Callable[..., Any], ...]:
    """Set the key `callbacks` to the given import paths, and return the given functions."""
    callbacks = argument if isinstance(argument, list | tuple) else [argument]
    if import_paths := [callback for callback in callbacks if isinstance(callback, str)]:
        put(values, "callbacks", import_paths)
    functions = tuple(callback for callback in callbacks if not isinstance(callback, str))
    for function in functions:
        check_callable(function, name=function_name(function), key="callbacks")
    return functions


def _set_rewards(
    values: dict[str, Any], config_class: type[RecipeConfig], arguments: Arguments
) -> RewardFunction | None:
    """Set the config keys of the rewards. Return a reward function that a config cannot hold.

    Several functions become their weighted sum. A single import path is stored in the config.
    """
    funcs = arguments.reward_funcs
    all_funcs = list(funcs) if isinstance(funcs, list | tuple) else [funcs] * (funcs is not None)
    if all_funcs and not issubclass(config_class, OnlineConfig):
        raise ConfigError(
            f"reward_funcs ({function_name(all_funcs[0])}): this recipe trains on given rows, so "
            "no samples are scored. Leave it out; eval.function of an SFTConfig or DPOConfig "
            "scores answers to held-out prompts."
        )
    weights = (
        [1.0] * len(all_funcs) if arguments.reward_weights is None else [*arguments.reward_weights]
    )
    if len(weights) != len(all_funcs):
        raise ConfigError(
            f"reward_weights ({weights}): there are {len(all_funcs)} reward functions. Give a "
            "weight for each."
        )
    if not all(isinstance(weight, Real) and math.isfinite(weight) for weight in weights):
        raise ConfigError(
            f"reward_weights ({weights}): weights must be finite numbers. Correct them."
        )
    functions: list[Any] = []
    function_weights: list[float] = []
    models: list[dict[str, Any]] = []
    for function, weight in zip(all_funcs, weights, strict=True):
        if isinstance(function, str) and not is_import_path(function):
            models.append({"path": function, "weight": weight})
            continue
        functions.append(_check_reward_function(function))
        function_weights.append(weight)
    if models:
        put(values, "model.reward", models)
    if functions and (len(functions) > 1 or function_weights != [1.0]):
        return WeightedSum(functions, function_weights)
    if functions and isinstance(functions[0], str):
        put(values, "reward.function", functions[0])
        return None
    return functions[0] if functions else None


def _check_reward_function(function: Any) -> Any:
    """Check a reward function, and return it. An import path gets the absolute path of its file."""
    if isinstance(function, str):
        return absolute_function(function, Path.cwd())
    if hasattr(function, "save_pretrained"):
        raise ConfigError(
            f"reward_funcs ({type(function).__name__}): is a model, and not a function. Give the "
            "model's folder or hub id: the run deploys it."
        )
    check_callable(function, name=function_name(function), key="reward_funcs")
    return function


def with_models(config: AnyConfig, models: Mapping[str, tuple[Any, Any]]) -> AnyConfig:
    """Save models and tokenizers into the run's folder, and return the config that names them.

    A folder's name contains a hash of its content, so an attempt to resume the run with another
    model is refused.

    Raises:
        ConfigError: the run's folder is at a URI, from which models cannot be loaded.
    """
    values = config.model_dump()
    for key, (model, tokenizer) in models.items():
        from raypo.models.model_folder import ModelFolder, follow_umask  # imports torch

        if is_uri(config.storage_path):
            raise ConfigError(
                f"{key} ({type(model).__name__}): storage_path ({config.storage_path}) is a URI, "
                "but models are loaded from folders. Save the model, and give its folder."
            )
        folder = RunFiles(config.storage_path, config.name).folder / GIVEN_MODELS
        temporary = folder / f"{TEMPORARY}{os.getpid()}-{key}"
        generation_config = getattr(model, "generation_config", None)
        files = ModelFolder.of(model.name_or_path, model.config, generation_config, key=key)
        files.for_saving(model).save_pretrained(temporary)
        follow_umask(temporary)
        files.write_others(temporary)
        tokenizer.save_pretrained(temporary)
        digest = xxhash.xxh3_64()
        for file in sorted(path for path in temporary.rglob("*") if path.is_file()):
            digest.update(str(file.relative_to(temporary)).encode())
            with file.open("rb") as file_handle:
                while block := file_handle.read(HASH_BLOCK_BYTES):
                    digest.update(block)
        model_folder = folder / f"{key}-{digest.hexdigest()}"
        if model_folder.exists():
            shutil.rmtree(temporary)
        else:
            temporary.rename(model_folder)
        put(values, key, str(model_folder))
    return type(config).parse(values, origin="trainer") if models else config
