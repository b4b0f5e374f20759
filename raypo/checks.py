"""Static checks of a run's input: under a second, before anything heavy is imported."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from raypo.config import (
    NUMBERS_DO_NOT_DEPEND_ON,
    ConfigError,
    PPOConfig,
    RecipeConfig,
    RewardModelConfig,
    SFTConfig,
    parse_run_config,
)
from raypo.data.prompts import peek, repetition_note
from raypo.plan.model_shape import ModelShape
from raypo.plan.placement import place, worker_bundles
from raypo.rewards.loader import check_function
from raypo.serving.vllm_arguments import check_extra
from raypo.storage.run_files import RunFiles
from raypo.tracking.sinks import check_installed


def check_inputs(
    config: RecipeConfig, *, has_reward_fn: bool = False, on_this_machine: bool = True
) -> list[str]:
    """Refuse files that are missing or wrong, and what this machine can never hold.

    Args:
        has_reward_fn: A function was passed in Python, so the config need not name one.
        on_this_machine: The run would start here, so its cores must do.

    Returns:
        What is allowed and seldom meant, in words.

    Raises:
        ConfigError: the first thing that is wrong, as key (value), rule and remedy.
    """
    check_installed(config.logging)
    notes: list[str] = []
    if isinstance(config, PPOConfig | SFTConfig):
        check_extra(config.rollout.engine)
    if isinstance(config, PPOConfig):
        notes = _check_ppo(config, has_reward_fn=has_reward_fn)
    elif isinstance(config, SFTConfig):
        check_model("model.policy", config.model.policy)
        _check_data(config, {"data.response_key": config.data.response_key})
        if config.eval.function is not None:
            check_function(config.eval.function, key="eval.function")
    elif isinstance(config, RewardModelConfig):
        check_model("model.policy", config.model.policy)
        keys = {"chosen_key": config.data.chosen_key, "rejected_key": config.data.rejected_key}
        _check_data(config, {f"data.{name}": column for name, column in keys.items()})
    if on_this_machine:
        _check_cpus(config)
    return notes


def check_evaluation(model: str, config: PPOConfig | SFTConfig) -> None:
    """Refuse what `raypo eval` cannot read.

    Raises:
        ConfigError: the model, a prompt file or the judge is not there.
    """
    check_model("MODEL", model)
    check_extra(config.rollout.engine)
    data = config.data
    if config.eval.prompts:
        peek(config.eval.prompts, data.prompt_key, data.label_key, key="eval.prompts")
    if config.eval.function is not None:
        check_function(config.eval.function, key="eval.function")


def _check_ppo(config: PPOConfig, *, has_reward_fn: bool) -> list[str]:
    for key in ("policy", "critic", "reference"):
        path = getattr(config.model, key)
        if path is not None:
            check_model(f"model.{key}", path)
    for entry in config.model.reward or ():
        check_model("model.reward", entry.path)
    _check_shards(config)
    num_prompts = _check_data(config)
    if not has_reward_fn:
        if not _has_judge(config):
            raise ConfigError(
                "reward.function (None): nothing judges the responses. Set it to file.py:name or "
                "package.module:name, set model.reward or reward.url, or pass reward_fn to "
                "PPOTrainer."
            )
        if config.reward.function is not None:
            check_function(config.reward.function)
    if config.eval.function is not None:
        check_function(config.eval.function, key="eval.function")
    note = num_prompts and repetition_note(num_prompts, config.rollout.prompts_per_step)
    return [note] if note else []


def _check_shards(config: PPOConfig) -> None:
    """Models that vLLM cannot cut; those of a hub id are left to vLLM."""
    model = config.model
    paths = {
        "engine": [("model.policy", model.policy)],
        "reference": [("model.reference", config.reference)],
        "reward": [("model.reward", entry.path) for entry in model.reward or ()],
    }
    for key, (role, size) in config.devices_of_replicas().items():
        for name, path in paths[role] if size > 1 else ():
            shape = _local_shape(path)
            if shape and (rest := shape.does_not_divide(size)):
                fits = max(n for n in range(1, size) if shape.does_not_divide(n) is None)
                raise ConfigError(
                    f"{key} ({size}): must divide the {rest} of {name} ({path}). Set it to {fits}."
                )


def _local_shape(path: str | None) -> ModelShape | None:
    if path is None or not (Path(path) / "config.json").exists():
        return None
    try:
        return ModelShape.read(path)
    except ConfigError:  # no transformer that raypo knows; vLLM may
        return None


def _has_judge(config: PPOConfig) -> bool:
    return bool(config.reward.function or config.model.reward or config.reward.url)


def _check_data(config: Any, response_keys: dict[str, str] | None = None) -> int | None:
    """The number of rows in `data.prompts`, where it is known."""
    data = config.data
    keys = data.prompt_key, data.label_key
    num_rows = peek(data.prompts, *keys, response_keys=response_keys)
    if config.eval.prompts:
        peek(config.eval.prompts, *keys, key="eval.prompts", response_keys=response_keys)
    return num_rows


def check_run_folder(config: RecipeConfig, files: RunFiles, *, start_over: str = "--fresh") -> None:
    """Refuse to go on in a folder that belongs to another config.

    Args:
        start_over: The option or argument that starts over, in the caller's language.

    Raises:
        ConfigError: with every key that differs.
    """
    recorded = files.config()
    if recorded is None or not files.metrics():  # it never made a step: nothing to protect
        return
    earlier = parse_run_config(recorded, origin=f"{files.location}/config.yaml")
    changes = earlier.differences(config, ignore=NUMBERS_DO_NOT_DEPEND_ON)
    if changes:
        lines = "\n  ".join(changes)
        raise ConfigError(
            f"name ({config.name}): {files.location} holds a run of another config:\n  {lines}\n"
            f"Change these keys back to go on, choose another name, or start over with "
            f"{start_over}."
        )


def is_finished(files: RunFiles) -> bool:
    """Whether the folder holds a run that was done to its last step."""
    summary = files.summary()
    return summary is not None and summary["status"] == "finished"


def check_model(key: str, path: str) -> None:
    """Refuse a model that is neither a folder with a config.json nor a hub id.

    Raises:
        ConfigError: with the key, the path and what to give.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ConfigError(
                f"{key} ({path}): the folder has no config.json, so it is no Hugging Face model. "
                f"Give a folder written by save_pretrained, or a hub id."
            )
        return
    looks_like_hub_id = path.count("/") <= 1 and not path.startswith((".", "/", "~"))
    offline = os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0")
    if not looks_like_hub_id or offline:
        why = "and HF_HUB_OFFLINE is set" if offline else "and it is no hub id"
        raise ConfigError(
            f"{key} ({path}): there is no such folder, {why}. Give a folder written by "
            f"save_pretrained, or a hub id like organisation/model."
        )


def _check_cpus(config: Any) -> None:
    """Too few cores for a local Ray; a cluster is asked once it is connected."""
    if config.cluster.address or os.environ.get("RAY_ADDRESS") or _ray_is_running():
        return
    learner, cores = config.learner, os.cpu_count() or 1
    workers = worker_bundles(config, use_gpu=False)
    if len(place(workers, [{"CPU": cores}], "PACK")) < len(workers):
        asked = learner.num_workers * learner.cpus_per_worker
        raise ConfigError(
            f"learner.cpus_per_worker ({learner.cpus_per_worker}): {learner.num_workers} learner "
            f"workers ask for {asked} CPU cores, this machine has {cores}. Lower "
            f"learner.num_workers or learner.cpus_per_worker, or set cluster.address."
        )


def _ray_is_running() -> bool:
    """Whether this process is connected to Ray already; asks without importing it."""
    ray = sys.modules.get("ray")
    return ray is not None and ray.is_initialized()
