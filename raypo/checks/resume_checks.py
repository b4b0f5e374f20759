"""Checks that a run's folder, or `from_checkpoint`, has the same config and the same inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from raypo.config import (
    NUMBERS_DO_NOT_DEPEND_ON,
    ConfigError,
    RecipeConfig,
    flatten,
    parse_run_config,
)
from raypo.config.auto_values import decided_as
from raypo.config.base import RECORDED_BASE
from raypo.config.sources import path_of
from raypo.inputs import GIVEN, Inputs, changes, inputs_of, recorded_inputs, values_at
from raypo.storage.checkpoints import (
    checkpoint_state,
    find_checkpoint,
    has_begun,
    run_of_checkpoint,
)
from raypo.storage.run_files import RunFiles, is_given


def check_run_folder(
    config: RecipeConfig,
    files: RunFiles,
    *,
    start_over: str = "--fresh",
    given: Mapping[str, Callable[..., Any]] | None = None,
) -> None:
    """Refuse to resume a run whose config was another, or whose inputs have changed.

    Args:
        config: The whole run config.
        files: The run's folder.
        start_over: Option or argument that starts the run over, to name in error messages.
        given: Functions passed in Python instead of as import paths, by config key.

    Raises:
        ConfigError: a key differs or a file has changed; the message lists all of them.
    """
    files.check_unused()
    recorded, done = files.config(), files.last_step()
    if recorded is not None and RECORDED_BASE in recorded:
        raise ConfigError(
            f"name ({config.name}): {files.location} holds a sweep, not a run. Choose another "
            "name or storage_path."
        )
    if recorded is None or not has_begun(files):  # there is nothing to protect
        if config.from_checkpoint is not None:
            _check_beginning(config, config.from_checkpoint)
        return
    earlier = parse_run_config(recorded, origin=f"{files.location}/config.yaml")
    config = decided_as(config, earlier.model_dump())
    # num_epochs was converted to num_steps, which is compared. Rows given in Python are compared by
    # digest.
    may_change = (*NUMBERS_DO_NOT_DEPEND_ON, "num_epochs", *_given_rows(config, files))
    if config.may_change_length:
        may_change = (*may_change, "num_steps")
        if config.num_steps < done:
            raise ConfigError(
                f"num_steps ({config.num_steps}): the run in {files.location} has already done "
                f"{done} steps. Set num_steps to {done} or more, choose another name, or start "
                f"over with {start_over}."
            )
    changes = earlier.differences(config, ignore=may_change)
    if any(change.startswith("num_steps:") for change in changes):
        changes.append(
            "(num_steps sets the learning rate of every step, because learner.lr_schedule is "
            f"{config.learner.lr_schedule})"  # pyright: ignore[reportAttributeAccessIssue]
        )
    if changes:
        lines = "\n  ".join(changes)
        raise ConfigError(
            f"name ({config.name}): {files.location} holds a run with another config:\n  {lines}\n"
            "Change these keys back to resume it, choose another name (with from_checkpoint: "
            f"{files.location} the new run starts from that run's last checkpoint), or start over "
            f"with {start_over}."
        )
    check_recorded_inputs(config, files, given=given, start_over=start_over)


def check_fresh_start(config: RecipeConfig, files: RunFiles) -> None:
    """Refuse to start a run over if its folder cannot be removed, or its beginning is wrong.

    Raises:
        ConfigError: the folder is not that of such a run, the config names files in it, or
            `from_checkpoint` cannot be loaded.
    """
    files.check_removable()
    check_outside(config, files)
    if config.from_checkpoint is not None:
        _check_beginning(config, config.from_checkpoint)


def check_outside(config: RecipeConfig, files: RunFiles, **others: str) -> None:
    """Refuse a config that names files in a folder which is about to be removed.

    Args:
        config: Config of a run, or base of a sweep.
        files: The folder. Rows and models given in Python remain in it.
        others: Further files, by key.

    Raises:
        ConfigError: such a file would be removed.
    """
    keys = ("from_checkpoint", *config.paths, *config.functions)
    absolute = config.with_absolute_paths()
    named = [(key, path_of(each)) for key in keys for each in values_at(absolute, key)]
    for key, path in [*named, *others.items()]:
        if files.would_remove(path):
            raise ConfigError(
                f"{key} ({path}): starting over removes {files.location}, and this with it. "
                "Copy it to another place and name the copy, or choose another name."
            )


def _given_rows(config: RecipeConfig, files: RunFiles) -> list[str]:
    """Return the config keys whose rows are given in Python both now and when the run began."""
    now = flatten(config.model_dump(mode="json"))
    return [
        key
        for key, sources in recorded_inputs(files).items()
        if GIVEN in sources and all(is_given(str(path)) for path in now.get(key) or [""])
    ]


def check_recorded_inputs(
    config: RecipeConfig,
    files: RunFiles,
    *,
    given: Mapping[str, Callable[..., Any]] | None = None,
    start_over: str = "--fresh",
) -> None:
    """Refuse inputs that have changed since a run or sweep began, unless the config accepts them.

    Args:
        config: The whole run config.
        files: Folder of the run or sweep.
        given: Functions passed in Python instead of as import paths, by config key.
        start_over: Option or argument that starts over, for messages.

    Raises:
        ConfigError: a file has changed; the message lists all of them.
    """
    if config.checkpoint.changed_inputs == "accept" or not (known := recorded_inputs(files)):
        return
    if found := changes(known, inputs_of(config, given)):
        lines = "\n  ".join(found)
        raise ConfigError(
            f"checkpoint.changed_inputs (refuse): {files.location} was started with other "
            f"inputs:\n  {lines}\nRestore these inputs to resume, set checkpoint.changed_inputs "
            "to accept to resume with the present ones, choose another name, or start over with "
            f"{start_over}."
        )


def finished_message(files: RunFiles, config: RecipeConfig, *, fresh: str) -> str:
    """Return what a finished run says when it is started again; `fresh` is what starts it over."""
    more = "a higher num_steps continues it, " if config.may_change_length else ""
    return (
        f"raypo: {config.name} is finished, files in {files.location}; {more}{fresh} starts over."
    )


def is_finished(files: RunFiles, config: RecipeConfig) -> bool:
    """Return True if the folder's run reached its last step, or ended by the same `stop` rules."""
    summary = files.summary()
    if summary is None or summary["status"] != "finished":
        return False
    if summary["steps"] >= config.num_steps:
        return True
    rules = (files.config() or {}).get("stop")
    return "stopped" in summary and rules == config.stop.model_dump(mode="json")


_OF_A_CHECKPOINT = (
    "recipe",
    "model.policy",
    "model.dtype",
    "model.lora",
    "learner.optimizer",
    "ppo.advantage",
)
"""Keys and sections on which the content of a checkpoint depends."""


_NOT_OF_A_CHECKPOINT = "model.lora.push"
"""Key in a section of `_OF_A_CHECKPOINT` on which a checkpoint does not depend."""


def _check_beginning(config: RecipeConfig, place: str) -> None:
    """Refuse a checkpoint that the run could not load, or that leaves no step to train."""
    checkpoint = find_checkpoint(place)
    run = run_of_checkpoint(checkpoint)
    state, earlier = checkpoint_state(checkpoint), run.config() or {}
    if config.num_steps <= state["step"]:
        raise ConfigError(
            f"num_steps ({config.num_steps}): from_checkpoint ({place}) is from step "
            f"{state['step']}, and step numbers continue from there. Set num_steps above "
            f"{state['step']}."
        )
    config = decided_as(config, earlier).with_absolute_paths()
    if earlier:  # parse it, to fill in defaults of keys that are newer than the checkpoint
        began = parse_run_config(earlier, origin=f"{place}/config.yaml").with_absolute_paths()
        earlier = began.model_dump(mode="json")
    theirs, mine = flatten(earlier), flatten(config.model_dump(mode="json"))
    for key in _OF_A_CHECKPOINT:
        names = {n for n in theirs.keys() | mine.keys() if f"{n}.".startswith(f"{key}.")}
        for name in sorted(names - {_NOT_OF_A_CHECKPOINT}):
            if earlier and theirs.get(name) != mine.get(name):
                raise ConfigError(
                    f"{name} ({mine.get(name)}): from_checkpoint ({place}) holds the state of a "
                    f"run with {theirs.get(name)}. Set {name} to that value; to load only the "
                    "weights, remove from_checkpoint and set model.policy to that run's policy/."
                )
    # The checkpoint's state fits only this base model. It holds an adapter for the model, or
    # weights under the names of the model's weights.
    now = {} if config.checkpoint.changed_inputs == "accept" else inputs_of(config)
    if found := changes(_of_policy(recorded_inputs(run)), _of_policy(now)):
        lines = "\n  ".join(found)
        raise ConfigError(
            f"from_checkpoint ({place}): its run was started with another model:\n  {lines}\n"
            "Restore that model, or set checkpoint.changed_inputs to accept to start with the "
            "present one."
        )


def _of_policy(inputs: Inputs) -> Inputs:
    """Return the files of the policy under one name: its path may be written in two ways."""
    files = next(iter(inputs.get("model.policy", {}).values()), {})
    return {"model.policy": {"": files}}
