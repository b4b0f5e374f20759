"""Static checks of a run's input: under a second, before anything heavy is imported."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from raypo.config import (
    NUMBERS_DO_NOT_DEPEND_ON,
    ConfigError,
    DistillationConfig,
    DPOConfig,
    ExamplesConfig,
    OnlineConfig,
    PairsSection,
    PolicyExamplesConfig,
    PPOConfig,
    PromptSource,
    RecipeConfig,
    RewardModelConfig,
    SFTConfig,
    flatten,
    functions_of,
    parse_run_config,
    source_name,
)
from raypo.data.conversations import peek_conversations
from raypo.data.mixing import repetition_note
from raypo.data.prompts import peek
from raypo.data.rows import read_rows
from raypo.plan.hardware import cpu_count
from raypo.plan.model_shape import ModelShape
from raypo.plan.placement import place, worker_bundles
from raypo.rewards.loader import check_class, check_function
from raypo.rollout.interface import AGENT, ENVIRONMENT, OPTIONAL
from raypo.serving.vllm_arguments import check_extra
from raypo.storage.checkpoints import checkpoint_state, config_of, find_checkpoint
from raypo.storage.run_files import RunFiles
from raypo.tracking.sinks import check_installed

AnyConfig = TypeVar("AnyConfig", bound=RecipeConfig)


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
    for spec in config.callbacks:
        check_function(spec, key="callbacks")
    if isinstance(config, OnlineConfig | PolicyExamplesConfig):
        check_extra(config.rollout.engine)
    if isinstance(config, OnlineConfig):
        notes = _check_online(config, has_reward_fn=has_reward_fn)
    elif isinstance(config, SFTConfig):
        _check_sft(config)
    elif isinstance(config, RewardModelConfig):
        check_model("model.policy", config.model.policy)
        _check_data(config, _pair_columns(config.data))
    elif isinstance(config, DPOConfig):
        _check_dpo(config)
    if isinstance(config, PolicyExamplesConfig):
        if config.eval.function is not None:
            check_function(config.eval.function, key="eval.function")
        _check_own_functions(config, common=None)
    if on_this_machine:
        _check_cpus(config)
    return notes


def check_evaluation(model: str, config: OnlineConfig | PolicyExamplesConfig) -> None:
    """Refuse what `raypo eval` cannot read.

    Raises:
        ConfigError: the model, a prompt file or the judge is not there.
    """
    check_model("MODEL", model)
    check_extra(config.rollout.engine)
    _peek_held_out(config)
    if config.eval.function is not None:
        check_function(config.eval.function, key="eval.function")
    is_online = isinstance(config, OnlineConfig)
    _check_own_functions(config, common=config.reward.function if is_online else None)


def _check_online(config: OnlineConfig, *, has_reward_fn: bool) -> list[str]:
    named = config.model.model_dump(include={"policy", "critic", "reference"})
    if isinstance(config, DistillationConfig):
        named |= {f"teacher.{name}": path for name, path in config.teacher_of.items()}
    for key, path in named.items():
        if path is not None:
            check_model(f"model.{key}", path)
    for entry in config.model.reward or ():
        check_model("model.reward", entry.path)
    _check_shards(config)
    column = config.data.response_key if isinstance(config, DistillationConfig) else None
    num_prompts = _check_data(config)
    if column:  # of held-out prompts no response is read
        _peek(config.data, "data.prompts", config.data.prompts, {"data.response_key": column})
    _check_own_functions(config, common=config.reward.function or has_reward_fn)
    if not has_reward_fn:
        _check_judged(config)
    functions = config.own_functions | {"eval.function": config.eval.function}
    for key, spec in functions.items():
        if spec is not None:
            check_function(spec, key=key)
    _check_player(config)
    note = num_prompts and repetition_note(num_prompts, config.rollout.prompts_per_step)
    notes = [note] if note else []
    return notes + _seldom_meant(config) if isinstance(config, PPOConfig) else notes


def _seldom_meant(config: PPOConfig) -> list[str]:
    """Models that are named and never asked, which a sweep may turn on; old samples as if new."""
    model, ppo = config.model, config.ppo
    notes: list[str] = []
    if config.rollout.staleness > 1 and not ppo.allows_for_staleness:
        notes.append(
            f"rollout.max_staleness ({config.rollout.staleness}): old samples are learned from as "
            f"if they were new; ppo.correction.kind tis weighs them (docs/asynchronous.md says "
            f"what either was measured to cost)"
        )
    if model.critic is not None and not config.needs_critic:
        notes.append(
            f"model.critic ({model.critic}): has no effect, ppo.advantage {ppo.advantage} has no "
            f"critic"
        )
    if model.reference is not None and not ppo.needs_reference:
        notes.append(
            f"model.reference ({model.reference}): has no effect, ppo.kl.coef is {ppo.kl.coef:g}"
        )
    return notes


def _check_player(config: OnlineConfig) -> None:
    for key, methods in (("environment", ENVIRONMENT), ("agent", AGENT)):
        if (spec := getattr(config.rollout, key)) is not None:
            check_class(spec, methods, optional=OPTIONAL, key=f"rollout.{key}")


def _check_sft(config: SFTConfig) -> None:
    check_model("model.policy", config.model.policy)
    data, held_out = config.data, config.eval.prompts
    if data.messages_key is None:
        _check_data(config, {"data.response_key": data.response_key})
        return
    system = data.system_prompt
    peek_conversations(data.prompts, data.messages_key, key="data.prompts", system_prompt=system)
    if held_out:
        peek_conversations(held_out, data.messages_key, key="eval.prompts", system_prompt=system)
        if config.needs_engine:  # it answers prompts, not conversations
            _peek_held_out(config)


def _check_judged(config: OnlineConfig) -> None:
    """Nobody need judge what a teacher teaches, but held-out answers need a judge."""
    if config.reward.function is not None:
        check_function(config.reward.function)
    judges = config.reward.function or config.model.reward or config.reward.url
    if judges or functions_of(config.data.prompts) or config.rollout.is_episodic:
        return
    if not isinstance(config, DistillationConfig):
        raise ConfigError(
            "reward.function (None): nothing judges the responses. Set it to file.py:name or "
            "package.module:name, set model.reward or reward.url, or pass reward_fn to the "
            "trainer."
        )
    if config.eval.prompts and not (config.eval.function or functions_of(config.eval.prompts)):
        raise ConfigError(
            "eval.function (None): nobody judges the answers to eval.prompts. Set it to "
            "file.py:name or package.module:name, or remove eval.prompts."
        )


def _check_dpo(config: DPOConfig) -> None:
    check_model("model.policy", config.model.policy)
    if config.model.reference is not None:
        check_model("model.reference", config.model.reference)
    data = config.data
    columns = {"data.response_key": data.response_key} if data.desirable_key else None
    columns = columns or _pair_columns(data)
    for key, sources in (("data.prompts", data.prompts), ("eval.pairs", config.eval.pairs)):
        _peek(data, key, sources, columns)
    _peek_held_out(config)


def _pair_columns(data: PairsSection) -> dict[str, str]:
    """Config key -> column of the responses of a pair."""
    return {"data.chosen_key": data.chosen_key, "data.rejected_key": data.rejected_key}


def _check_shards(config: OnlineConfig) -> None:
    """Models that vLLM cannot cut; those of a hub id are left to vLLM."""
    model = config.model
    paths = {
        "engine": [("model.policy", model.policy)],
        "reference": [("model.reference", path) for path in config.references.values()],
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


def _check_data(config: Any, response_keys: dict[str, str] | None = None) -> int | None:
    """The number of rows in `data.prompts`, where it is known."""
    _peek_held_out(config, response_keys)
    data = config.data
    return _peek(data, "data.prompts", data.prompts, response_keys, label_key=data.label_key)


def _peek_held_out(config: Any, response_keys: dict[str, str] | None = None) -> None:
    data, held_out = config.data, config.eval.prompts
    _peek(data, "eval.prompts", held_out, response_keys, label_key=data.label_key)


def _peek(
    data: Any,
    key: str,
    sources: Sequence[PromptSource] | None,
    response_keys: dict[str, str] | None = None,
    *,
    label_key: str | None = None,
) -> int | None:
    return peek(
        sources or (),
        data.prompt_key,
        label_key,
        key=key,
        response_keys=response_keys,
        system_prompt=data.system_prompt,
    )


def _check_own_functions(
    config: OnlineConfig | PolicyExamplesConfig, *, common: str | bool | None
) -> None:
    """Functions of single sources: each is there, and no source is left without one.

    Args:
        common: Whether there is a function for all sources that have none.
    """
    trained, held_out = functions_of(config.data.prompts), functions_of(config.eval.prompts)
    for key, functions in (("data.prompts", trained), ("eval.prompts", held_out)):
        for spec in functions.values():
            check_function(spec, key=f"{key}.function")
    if trained and not common:
        _require_functions("data.prompts", config.data.prompts, trained, "reward.function")
    if config.eval.function:
        return
    # Held-out episodes have their own scores, or are judged by what eval names.
    plays = isinstance(config, OnlineConfig) and config.rollout.is_episodic
    having = held_out if plays else trained | held_out
    if having and (plays or not common):
        _require_functions("eval.prompts", config.eval.prompts or (), having, "eval.function")


def _require_functions(
    key: str, sources: Sequence[PromptSource], having: Mapping[str, str], common: str
) -> None:
    """Refuse a source that no function judges, where others have one of their own."""
    for source in sources:
        if source_name(source) not in having:
            raise ConfigError(
                f"{common} (None): sources have functions of their own, and {source_name(source)} "
                f"of {key} has none. Give it one, or set {common}, which judges all sources that "
                f"have none."
            )


def with_steps_of_epochs(config: AnyConfig) -> AnyConfig:
    """The config with the `num_steps` that its `num_epochs` makes; without them as it is.

    Raises:
        ConfigError: both are set and say different things, the steps are all warm-up, or a file
            cannot be read.
    """
    if not isinstance(config, ExamplesConfig) or config.num_epochs is None:
        return config
    rows = sum(1 for source in config.data.prompts for _ in read_rows(source, key="data.prompts"))
    if isinstance(config, DPOConfig) and config.dpo.loss == "kto" and not config.data.desirable_key:
        rows *= 2  # a pair is two verdicts
    steps = math.ceil(config.num_epochs * rows / config.learner.batch_size)
    usual = type(config).model_fields["num_steps"].default
    if config.num_steps not in (steps, usual):
        raise ConfigError(
            f"num_steps ({config.num_steps}): num_epochs ({config.num_epochs:g}) of {rows} rows at "
            f"learner.batch_size {config.learner.batch_size} are {steps} steps. Remove one of "
            f"the two."
        )
    try:
        config.learner.require_steps(steps, "num_epochs")
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return config.model_copy(update={"num_steps": steps})


def check_run_folder(config: RecipeConfig, files: RunFiles, *, start_over: str = "--fresh") -> None:
    """Refuse to go on in a folder that belongs to another config.

    Args:
        start_over: The option or argument that starts over, in the caller's language.

    Raises:
        ConfigError: with every key that differs.
    """
    recorded, done = files.config(), files.last_step()
    if recorded is None or not done:  # it never made a step: nothing to protect
        if config.from_checkpoint is not None:
            _check_beginning(config, config.from_checkpoint)
        return
    earlier = parse_run_config(recorded, origin=f"{files.location}/config.yaml")
    config = _decided_as(config, earlier.model_dump())
    may_change = NUMBERS_DO_NOT_DEPEND_ON
    if config.may_change_length:
        may_change = (*may_change, "num_steps")
        if config.num_steps < done:
            raise ConfigError(
                f"num_steps ({config.num_steps}): the run in {files.location} has done {done} "
                f"steps. Set num_steps to {done} or more, choose another name, or start over with "
                f"{start_over}."
            )
    changes = earlier.differences(config, ignore=may_change)
    if any(change.startswith("num_steps:") for change in changes):
        changes.append(
            f"(the learning rates of all steps follow from num_steps: learner.lr_schedule is "
            f"{config.learner.lr_schedule})"  # pyright: ignore[reportAttributeAccessIssue]
        )
    if changes:
        lines = "\n  ".join(changes)
        raise ConfigError(
            f"name ({config.name}): {files.location} holds a run of another config:\n  {lines}\n"
            f"Change these keys back to go on, choose another name (with from_checkpoint: "
            f"{files.location} it begins where that run is), or start over with {start_over}."
        )


def _decided_as(config: RecipeConfig, earlier: Mapping[str, Any]) -> RecipeConfig:
    """The config, an undecided `model.dtype` as a run of before had it.

    Where it is decided otherwise on this cluster's devices, the trainer checks once more.
    """
    dtype = earlier.get("model", {}).get("dtype", "auto")
    return config if dtype == "auto" else config.with_dtype(use_gpu=dtype == "bfloat16")


def _check_beginning(config: RecipeConfig, place: str) -> None:
    """Refuse a checkpoint that the run could not load, or from which no step would be left."""
    checkpoint = find_checkpoint(place)
    state, earlier = checkpoint_state(checkpoint), config_of(checkpoint)
    if config.num_steps <= state["step"]:
        raise ConfigError(
            f"num_steps ({config.num_steps}): from_checkpoint ({place}) is of step "
            f"{state['step']}, and steps count on. Set num_steps above {state['step']}."
        )
    config = _decided_as(config, earlier)
    if earlier:  # with the defaults of keys that are younger than it
        earlier = parse_run_config(earlier, origin=f"{place}/config.yaml").model_dump(mode="json")
    theirs, mine = flatten(earlier), flatten(config.model_dump(mode="json"))
    for key in _OF_A_CHECKPOINT:
        names = {n for n in theirs.keys() | mine.keys() if f"{n}.".startswith(f"{key}.")}
        for name in sorted(names - {_HOW_ADAPTERS_TRAVEL}):
            if earlier and theirs.get(name) != mine.get(name):
                raise ConfigError(
                    f"{name} ({mine.get(name)}): from_checkpoint ({place}) holds the state of a "
                    f"run with {theirs.get(name)}. Set {name} to that; for its weights alone, "
                    f"remove from_checkpoint and set model.policy to that run's policy/."
                )


_OF_A_CHECKPOINT = (
    "recipe",
    "model.policy",
    "model.dtype",
    "model.lora",
    "learner.num_workers",
    "learner.critic_workers",
    "learner.zero_stage",
    "ppo.advantage",
)
"""Keys and sections on which the content of a checkpoint depends."""
_HOW_ADAPTERS_TRAVEL = "model.lora.push"
"""In one of these sections, and no part of the state."""


def is_finished(files: RunFiles, config: RecipeConfig) -> bool:
    """Whether the folder holds a run that is done: to the last step, or by the rules of `stop`."""
    summary = files.summary()
    if summary is None or summary["status"] != "finished":
        return False
    if summary["steps"] >= config.num_steps:
        return True
    rules = (files.config() or {}).get("stop")
    return "stopped" in summary and rules == config.stop.model_dump(mode="json")


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
    learner, cores = config.learner, cpu_count()
    workers = worker_bundles(config, use_gpu=False)
    if len(place(workers, [{"CPU": cores}], "PACK")) < len(workers):
        asked = len(workers) * learner.cpus_per_worker
        raise ConfigError(
            f"learner.cpus_per_worker ({learner.cpus_per_worker}): {len(workers)} learner "
            f"workers ask for {asked} CPU cores, this machine has {cores}. Lower "
            f"learner.num_workers or learner.cpus_per_worker, or set cluster.address."
        )


def _ray_is_running() -> bool:
    """Whether this process is connected to Ray already; asks without importing it."""
    ray = sys.modules.get("ray")
    return ray is not None and ray.is_initialized()
