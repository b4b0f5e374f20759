"""All checks of a run's input before it starts, and of the input of `raypo eval`."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from raypo.checks.function_checks import (
    check_functions,
    check_scoring,
)
from raypo.checks.image_checks import check_images
from raypo.checks.model_checks import (
    check_model,
    check_positions,
    check_positions_of,
    check_rotations,
    check_shards,
    models_of,
)
from raypo.checks.row_checks import (
    check_columns,
    check_first_rows,
    check_judge_columns,
    check_labels,
    check_rows,
)
from raypo.cluster.hardware import cpu_count
from raypo.cluster.placement import place, worker_bundles
from raypo.config import (
    AnyConfig,
    ConfigError,
    OnlineConfig,
    PolicyExamplesConfig,
    PPOConfig,
)
from raypo.config.paths import is_uri
from raypo.custom.in_subprocess import call_in_subprocess
from raypo.custom.loader import load_function
from raypo.data.mixing import repetition_note
from raypo.extras import require
from raypo.inputs import functions_of_user
from raypo.models.model_files import stored_files, tensor_bytes
from raypo.rewards.scoring import RewardFunction, WeightedSum
from raypo.serving.vllm_arguments import (
    check_extra,
    check_head_dtype,
    check_router_replay,
    check_speculation,
)
from raypo.storage.folder import existing_parent
from raypo.tracking.sinks import check_installed


def check_inputs(
    config: AnyConfig, *, reward_fn: RewardFunction | None = None, on_this_machine: bool = True
) -> list[str]:
    """Refuse missing or wrong files, and runs that are too large for this machine.

    Args:
        config: The whole run config.
        reward_fn: Reward function that was passed in Python. The config then needs none.
        on_this_machine: True if the run would start on this machine, which must then have enough
            CPU cores.

    Returns:
        Notes on settings that are allowed but rarely intended.

    Raises:
        ConfigError: the first problem, as key (value), rule and remedy.
    """
    check_installed(config.logging)
    for key, path in models_of(config):
        check_model(key, path, is_trained=key in ("model.policy", "model.critic"))
    if isinstance(config, OnlineConfig | PolicyExamplesConfig):
        check_extra(config.rollout.engine)
        check_speculation(config.rollout.engine.speculation.kind)
        check_shards(config)
    if isinstance(config, OnlineConfig):
        check_head_dtype(config.model.head_dtype)
        check_router_replay(config.rollout.router_replay)
    if config.needs_engine:
        check_positions(config)
    check_rotations(config, on_hub=False)
    if config.data.image_key is not None:
        require("images", f"data.image_key ({config.data.image_key})")
        check_images(config)
    num_prompts = check_rows(config)
    notes: list[str] = []
    _check_user_code(config, reward_fn)
    if isinstance(config, OnlineConfig):
        check_labels(config, has_reward_fn=reward_fn is not None)
        check_judge_columns(config)
        note = num_prompts and repetition_note(num_prompts, config.rollout.prompts_per_step)
        notes += [note] if note else []
    elif isinstance(config, PolicyExamplesConfig):
        check_labels(config)
    if isinstance(config, PPOConfig):
        notes += _notes_on_ppo(config)
    notes += _notes_on_elastic(config)
    if on_this_machine:
        _check_cpus(config)
    return notes


def _check_user_code(config: AnyConfig, reward_fn: RewardFunction | None) -> None:
    """Check the functions and classes that the config names, and a function given in Python.

    One subprocess imports all files of the user. If the config names only raypo's own functions,
    this process imports them.
    """
    summands = reward_fn.functions if isinstance(reward_fn, WeightedSum) else [reward_fn]
    paths = [function for function in summands if isinstance(function, str)]
    specs = [
        spec
        for key, spec in functions_of_user(config)
        if key != "reward.function" or reward_fn is None
    ]
    if all(spec.startswith("raypo.") for spec in (*specs, *paths)):
        check_named_functions(config, paths, reward_fn is not None)
    else:
        call_in_subprocess(check_named_functions, config, paths, reward_fn is not None)
    for function in summands:
        if isinstance(config, OnlineConfig) and callable(function):
            check_columns(config, function, key="reward_funcs")


def check_named_functions(config: AnyConfig, paths: Sequence[str], has_reward_fn: bool) -> None:
    """Import and check the functions and classes that a config names.

    Args:
        config: The whole run config.
        paths: Import paths among the reward functions that were passed in Python.
        has_reward_fn: True if a reward function was passed in Python.
    """
    for spec in config.callbacks:
        load_function(spec, key="callbacks")
    if isinstance(config, OnlineConfig):
        check_scoring(config, has_reward_fn=has_reward_fn)
        for spec in paths:
            check_columns(config, spec, key="reward_funcs")
        if config.reward.function and not has_reward_fn:
            check_columns(config, config.reward.function)
    elif isinstance(config, PolicyExamplesConfig):
        check_functions(config, common=None)


def _notes_on_elastic(config: AnyConfig) -> list[str]:
    """Return a note if the loss of a worker would end an elastic run.

    Raises:
        ConfigError: the config is invalid for one of the possible numbers of workers.
    """
    learner = config.learner
    if learner.min_workers is None:
        return []
    for count in range(learner.min_workers, learner.num_workers):
        config.with_workers(count)
    if config.max_failures:
        return []
    return [
        f"learner.min_workers ({learner.min_workers}): the run can go on with fewer workers only "
        "if max_failures, which is 0, allows failures; set max_failures to a positive number, or "
        "to -1 for no limit"
    ]


def check_evaluation(model: str, config: OnlineConfig | PolicyExamplesConfig) -> None:
    """Refuse input that `raypo eval` cannot read.

    Raises:
        ConfigError: the model, a prompt file or the reward function is missing or wrong, or prompts
            and responses may have more tokens than the model has positions for.
    """
    check_model("MODEL", model)
    check_positions_of(config, "MODEL", model)
    check_extra(config.rollout.engine)
    check_first_rows(config.data, "eval.prompts", config.eval.prompts)
    common = config.reward.function if isinstance(config, OnlineConfig) else None
    check_functions(config, common=common)
    check_labels(config, only_held_out=True)


def _notes_on_ppo(config: PPOConfig) -> list[str]:
    """Return notes on unused models, and on stale samples that the loss does not account for.

    Unused models are not refused, because a sweep may turn them on.
    """
    model, ppo, rollout = config.model, config.ppo, config.rollout
    notes: list[str] = []
    if rollout.staleness > 0 and not ppo.allows_for_staleness:
        is_async = rollout.mode == "async"
        key = f"max_staleness ({rollout.staleness})" if is_async else f"mode ({rollout.mode})"
        notes.append(
            f"rollout.{key}: stale samples are trained on as if they were on-policy; "
            "ppo.correction.kind: tis reweights them (docs/asynchronous.md has measurements with "
            "and without it)"
        )
    if model.critic is not None and not config.needs_critic:
        notes.append(
            f"model.critic ({model.critic}): has no effect, because ppo.advantage {ppo.advantage} "
            "has no critic"
        )
    if model.reference is not None and not ppo.needs_reference:
        notes.append(
            f"model.reference ({model.reference}): has no effect, because ppo.kl.coef is "
            f"{ppo.kl.coef:g}"
        )
    return notes


def _check_cpus(config: Any) -> None:
    """Refuse a run with too many workers for this machine, on which a local Ray would start.

    An existing cluster is checked after connecting to it.
    """
    ray = sys.modules.get("ray")  # checks for a connection without importing Ray
    is_connected = ray is not None and ray.is_initialized()
    if config.cluster.address or os.environ.get("RAY_ADDRESS") or is_connected:
        return
    learner, cores = config.learner, cpu_count()
    workers = worker_bundles(config, use_gpu=False)[: learner.min_workers]
    if len(place(workers, [{"CPU": cores}], "PACK")) < len(workers):
        cores_needed = len(workers) * learner.cpus_per_worker
        raise ConfigError(
            f"learner.cpus_per_worker ({learner.cpus_per_worker}): {len(workers)} learner workers "
            f"need {cores_needed} CPU cores, but this machine has {cores}. Lower "
            "learner.num_workers or learner.cpus_per_worker, or set cluster.address."
        )


def check_disk(config: AnyConfig) -> None:
    """Refuse a disk that has no room for the trained policy, the least that a run writes.

    A finished run writes nothing, so this follows `is_finished`.

    Raises:
        ConfigError: the weights of `model.policy` are larger than the free space.
    """
    policy = Path(config.model.policy).expanduser()
    if is_uri(config.storage_path) or not policy.is_dir() or config.model.lora:
        return
    usage = shutil.disk_usage(existing_parent(Path(config.absolute_storage_path)))
    size = sum(
        tensor_bytes(file, in_float32=config.model.dtype == "float32")
        for file in stored_files(policy, "model.policy")
    )
    free = usage.free
    if size > free and usage.total:  # some network file systems report that they have 0 bytes
        raise ConfigError(
            f"storage_path ({config.storage_path}): {free / 1e9:.3g} GB are free there, but the "
            f"trained policy alone takes {size / 1e9:.3g} GB, and a checkpoint several times as "
            "much. Free some space, or give a folder with more."
        )
