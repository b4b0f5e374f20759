"""Static checks of a run's input, which take less than a second and import nothing heavy."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from raypo.config import (
    NUMBERS_DO_NOT_DEPEND_ON,
    AnyConfig,
    ConfigError,
    DataSection,
    DistillationConfig,
    DPOConfig,
    ExamplesConfig,
    OnlineConfig,
    PairsSection,
    PolicyExamplesConfig,
    PPOConfig,
    PromptSource,
    RecipeConfig,
    ResponsesSection,
    RewardModelConfig,
    SFTConfig,
    flatten,
    functions_of,
    parse_run_config,
    source_name,
)
from raypo.config.base import RECORDED_BASE
from raypo.custom.loader import check_class, check_function
from raypo.data.mixing import repetition_note
from raypo.data.prompts import check_label, peek
from raypo.data.rows import BadRows, is_data_set, read_rows
from raypo.extras import require
from raypo.inputs import changes, inputs_of, recorded_inputs
from raypo.models.model_files import config_of as model_config_of
from raypo.models.model_files import max_positions, refuse_quantized, stored_files
from raypo.plan.estimate import max_model_len
from raypo.plan.hardware import cpu_count
from raypo.plan.model_shape import ModelShape
from raypo.plan.placement import place, served_roles, worker_bundles
from raypo.rewards.labels import scorers_of
from raypo.rewards.verifiers import LABEL_CHECKS
from raypo.rollout.interface import AGENT, ENVIRONMENT, OPTIONAL
from raypo.serving.vllm_arguments import check_extra
from raypo.storage.checkpoints import checkpoint_state, config_of, find_checkpoint
from raypo.storage.folder import parent_and_name
from raypo.storage.run_files import RunFiles
from raypo.tracking.sinks import check_installed

Run = TypeVar("Run", bound=RecipeConfig)

LABEL_ROWS = 20_000
"""Rows of a source whose labels are checked before the start. Loading checks the others."""


def check_inputs(
    config: AnyConfig, *, has_reward_fn: bool = False, on_this_machine: bool = True
) -> list[str]:
    """Refuse missing or wrong files, and runs that are too large for this machine.

    Args:
        config: The whole run config.
        has_reward_fn: Whether a reward function was passed in Python, so that the config need not
            name one.
        on_this_machine: Whether the run would start here, so that its cores must suffice.

    Returns:
        Notes on settings that are allowed but rarely intended.

    Raises:
        ConfigError: the first problem, as key (value), rule and remedy.
    """
    check_installed(config.logging)
    for spec in config.callbacks:
        check_function(spec, key="callbacks")
    for key, path in _models(config):
        check_model(key, path, is_trained=key in _TRAINED)
    if isinstance(config, OnlineConfig | PolicyExamplesConfig):
        check_extra(config.rollout.engine)
        _check_shards(config)
    if isinstance(config, OnlineConfig) or getattr(config, "needs_engine", False):
        _check_positions(config)
    num_prompts = _check_rows(config)
    notes: list[str] = []
    if isinstance(config, OnlineConfig):
        _check_scoring(config, has_reward_fn=has_reward_fn)
        _check_labels(config, has_reward_fn=has_reward_fn)
        note = num_prompts and repetition_note(num_prompts, config.rollout.prompts_per_step)
        notes += [note] if note else []
    elif isinstance(config, PolicyExamplesConfig):
        _check_own_functions(config, common=None)
        _check_labels(config)
    if isinstance(config, PPOConfig):
        notes += _seldom_meant(config)
    if on_this_machine:
        _check_cpus(config)
    return notes


def check_models(config: AnyConfig) -> None:
    """Refuse models that would be loaded wrongly, before Ray starts.

    This imports transformers and reads headers, configs and tokenizers, but no weights. For hub ids
    it reads only configs and tokenizers.

    Raises:
        ConfigError: a folder lacks weights of its model or has unexpected ones; two models that
            read the same token ids have different tokens; a token has no row in the embedding; LoRA
            cannot train the requested layers.
    """
    from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

    from raypo.models import checkpoint, loading, lora

    model: Any = config.model
    is_reward_model = isinstance(config, RewardModelConfig)
    classifier, causal = AutoModelForSequenceClassification, AutoModelForCausalLM
    for key, path in _models(config):
        kind = {"model.critic": AutoModel, "model.reward": classifier}.get(key, causal)
        if key == "model.policy" and is_reward_model:
            kind = classifier
        if kind is classifier:
            loading.refuse_other_labels(key, path)
        checkpoint.check_weights(key, path, kind, new_head=kind is not causal and is_reward_model)
    kind = classifier if is_reward_model else causal
    loading.check_tokens(model.policy)
    for key, path in _models(config):
        if key == "model.reward":
            if isinstance(config, OnlineConfig) and loading.same_vocabulary(
                path, model.policy, key=key
            ):
                _check_positions_of(config, key, path)
        elif key != "model.policy":
            _check_same_tokens(key, path, model.policy)
    if model.lora is not None:
        lora.check_targets(model.policy, kind, model.lora)
        if getattr(config, "needs_critic", False) and model.critic is not None:
            lora.check_targets(model.critic, AutoModel, model.lora, key="model.critic")


def _check_same_tokens(key: str, path: str, policy: str) -> None:
    """Refuse a model that would read the policy's token ids as other tokens.

    For a critic or a reference model saved without a tokenizer only the vocabulary sizes are
    compared.
    """
    from raypo.models.loading import reads_tokens, same_vocabulary, vocabulary_size

    is_teacher = key.startswith("model.teacher")  # what it would say next counts as well
    try:
        compared = same_vocabulary if is_teacher else reads_tokens
        is_same = compared(path, policy, key=key)
    except ConfigError:
        if is_teacher:
            raise
        is_same = vocabulary_size(path) == vocabulary_size(policy)
    if is_same:
        return
    remedy = "or learn its texts by the recipe sft" if is_teacher else f"or remove {key}"
    raise ConfigError(
        f"{key} ({path}): its tokens are not those of model.policy ({policy}), whose token ids it "
        f"reads. Give a model with the same tokenizer, {remedy}."
    )


def check_evaluation(model: str, config: OnlineConfig | PolicyExamplesConfig) -> None:
    """Refuse input that `raypo eval` cannot read.

    Raises:
        ConfigError: the model, a prompt file or the reward function is missing or wrong, or prompts
            and responses may have more tokens than the model has positions for.
    """
    check_model("MODEL", model)
    _check_positions_of(config, "MODEL", model)
    check_extra(config.rollout.engine)
    _peek(config.data, "eval.prompts", config.eval.prompts)
    common = config.reward.function if isinstance(config, OnlineConfig) else None
    _check_own_functions(config, common=common)
    _check_labels(config, only_held_out=True)


def check_evaluated(model: str) -> None:
    """Refuse a model whose responses could not end in `raypo eval`, by its config and tokenizer.

    Its weights are left to vLLM, which loads more architectures than are trained, and says what a
    folder lacks.

    Raises:
        ConfigError: the tokenizer's first or last token, or a stop token, has no row in the
            embedding.
    """
    from raypo.models.loading import check_tokens

    check_tokens(model, key="MODEL")


def _models(config: AnyConfig) -> Iterator[tuple[str, str]]:
    """Yield config key and path of each model in the config."""
    model: Any = config.model
    for name in ("policy", "critic", "reference"):
        if (path := getattr(model, name, None)) is not None:
            yield f"model.{name}", path
    if isinstance(config, DistillationConfig):
        by_source = not isinstance(config.model.teacher, str)
        for name, path in config.teacher_of.items():
            yield f"model.teacher.{name}" if by_source else "model.teacher", path
    for entry in getattr(model, "reward", None) or ():
        yield "model.reward", entry.path


def _check_scoring(config: OnlineConfig, *, has_reward_fn: bool) -> None:
    """Refuse a config without a reward function, and user functions or classes that are missing."""
    _check_own_functions(config, common=config.reward.function or has_reward_fn)
    if not has_reward_fn:
        _check_judged(config)
    serving = {"reward.url": config.reward.url, "rollout.agent": config.rollout.agent}
    for key in filter(serving.get, serving):
        require("serve", f"{key} ({serving[key]})")
    for key, spec in config.own_functions.items():
        check_function(spec, key=key)
    for key, methods in (("environment", ENVIRONMENT), ("agent", AGENT)):
        if (spec := getattr(config.rollout, key)) is not None:
            arguments = getattr(config.rollout, f"{key}_args")
            check_class(spec, methods, arguments, optional=OPTIONAL, key=f"rollout.{key}")


def _seldom_meant(config: PPOConfig) -> list[str]:
    """Return notes on unused models (which a sweep may turn on) and on stale samples."""
    model, ppo, rollout = config.model, config.ppo, config.rollout
    notes: list[str] = []
    if rollout.staleness > 0 and not ppo.allows_for_staleness:
        is_async = rollout.mode == "async"
        said = f"max_staleness ({rollout.staleness})" if is_async else f"mode ({rollout.mode})"
        notes.append(
            f"rollout.{said}: old samples are learned from as if they were new; "
            f"ppo.correction.kind tis weighs them (docs/asynchronous.md says what either was "
            f"measured to cost)"
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


def _check_judged(config: OnlineConfig) -> None:
    """Refuse responses that no reward function scores.

    Distillation needs no reward function for training, but one for held-out prompts.
    """
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


def _check_shards(config: OnlineConfig | PolicyExamplesConfig) -> None:
    """Refuse local models that vLLM cannot shard; vLLM itself checks models from the hub."""
    for role in served_roles(config, num_workers=1, use_gpu=False):
        size, shape = role.num_devices, _local_shape(role.model)
        if size > 1 and shape and (rest := shape.does_not_divide(size)):
            fits = max(n for n in range(1, size) if shape.does_not_divide(n) is None)
            name = "policy" if role.kind == "engine" else role.kind
            raise ConfigError(
                f"{role.devices_key} ({size}): must divide the {rest} of model.{name} "
                f"({role.model}). Set it to {fits}."
            )


def _local_shape(path: str) -> ModelShape | None:
    if not (Path(path) / "config.json").exists():
        return None
    try:
        return ModelShape.read(path)
    except ConfigError:  # not a transformer that raypo knows; vLLM may know it
        return None


def _check_rows(config: AnyConfig) -> int | None:
    """Check the first rows of all sources. Return the number of training rows, if known."""
    data, evaluation = config.data, config.eval
    if isinstance(data, ResponsesSection) and data.messages_key is not None:
        if isinstance(config, SFTConfig) and config.needs_engine:  # engines answer these prompts
            _peek(data, "eval.prompts", evaluation.prompts, messages_key=None)
        _peek(data, "eval.prompts", evaluation.prompts)
        return _peek(data, "data.prompts", data.prompts)
    columns = _response_columns(data)
    # Held-out rows are prompts to answer, or examples that need the columns of training rows.
    are_answered = not isinstance(config, SFTConfig | RewardModelConfig)
    _peek(data, "eval.prompts", evaluation.prompts, {} if are_answered else columns)
    unlabelled: Any = {"label_key": None} if isinstance(config, DPOConfig) else {}
    _peek(data, "eval.pairs", getattr(evaluation, "pairs", None), columns, **unlabelled)
    return _peek(data, "data.prompts", data.prompts, columns, **unlabelled)


def _response_columns(data: DataSection) -> dict[str, str]:
    """Map config keys to the columns of training texts other than the prompt."""
    if isinstance(data, PairsSection) and not getattr(data, "desirable_key", None):
        return {"data.chosen_key": data.chosen_key, "data.rejected_key": data.rejected_key}
    column = getattr(data, "response_key", None)
    return {"data.response_key": column} if column else {}


def _peek(
    data: DataSection,
    key: str,
    sources: Sequence[PromptSource] | None,
    response_keys: Mapping[str, str] | None = None,
    **changes: Any,
) -> int | None:
    section = data.model_copy(update={"prompts": sources or (), **changes})
    return peek(section, key=key, response_keys=response_keys)


def _check_own_functions(
    config: OnlineConfig | PolicyExamplesConfig, *, common: str | bool | None
) -> None:
    """Check the functions of single sources and of evaluation, and refuse a source without one.

    Args:
        config: The whole run config.
        common: Reward function of all sources without their own; falsy if there is none.
    """
    trained, held_out = functions_of(config.data.prompts), functions_of(config.eval.prompts)
    for key, functions in (("data.prompts", trained), ("eval.prompts", held_out)):
        for spec in functions.values():
            check_function(spec, key=f"{key}.function")
    if config.eval.function is not None:
        check_function(config.eval.function, key="eval.function")
    if trained and not common:
        _require_functions("data.prompts", config.data.prompts, trained, "reward.function")
    if config.eval.function:
        return
    # Held-out episodes have their own scores, unless eval names functions.
    plays = isinstance(config, OnlineConfig) and config.rollout.is_episodic
    having = held_out if plays else trained | held_out
    if having and (plays or not common):
        _require_functions("eval.prompts", config.eval.prompts or (), having, "eval.function")


def _check_labels(
    config: OnlineConfig | PolicyExamplesConfig,
    *,
    has_reward_fn: bool = False,
    only_held_out: bool = False,
) -> None:
    """Refuse labels that a built-in reward function cannot read, as `load_prompts` does later.

    Args:
        config: The whole run config.
        has_reward_fn: Whether a function was passed in Python; `reward.function` is unused then.
        only_held_out: Whether to skip `data.prompts`.
    """
    of_key = {"eval.prompts": config.eval.prompts or ()}
    if not only_held_out:
        of_key = {"data.prompts": config.data.prompts} | of_key
    for key, sources in of_key.items():
        scorer = scorers_of(config, key, has_reward_fn=has_reward_fn)
        for source in sources:
            _check_labels_of(source, key, config.data, scorer(source))


def _check_labels_of(
    source: PromptSource, key: str, data: DataSection, function: str | None
) -> None:
    label_key, check = data.label_key, LABEL_CHECKS.get(function or "")
    if check is None:
        return
    if label_key is None:
        raise ConfigError(
            f"data.label_key (None): {function} compares the responses to {key} with labels. Set "
            "data.label_key to the column of the answers."
        )
    # Reading a data set needs the library `datasets`; which rows to drop is found at loading.
    if is_data_set(source) or data.on_error == "drop":
        return
    for row in islice(read_rows(source, key=key), LABEL_ROWS):
        if label_key in row.values:
            check_label(check, row, label_key)


def _require_functions(
    key: str, sources: Sequence[PromptSource], having: Mapping[str, str], common: str
) -> None:
    """Refuse a source without a reward function if others have their own."""
    for source in sources:
        if source_name(source) not in having:
            raise ConfigError(
                f"{common} (None): sources have functions of their own, and {source_name(source)} "
                f"of {key} has none. Give it one, or set {common}, which judges all sources that "
                f"have none."
            )


def with_steps_of_epochs(config: Run) -> Run:
    """Return the config with `num_steps` computed from `num_epochs`, if that is set.

    Raises:
        ConfigError: both are set and differ, all steps are warm-up, or a file cannot be read.
    """
    if not isinstance(config, ExamplesConfig) or config.num_epochs is None:
        return config
    bad = BadRows(config.data.on_error)
    sources = config.data.prompts
    rows = sum(1 for each in sources for _ in read_rows(each, key="data.prompts", bad=bad))
    if isinstance(config, DPOConfig) and config.dpo.loss == "kto" and not config.data.desirable_key:
        rows *= 2  # KTO splits a pair into a desirable and an undesirable example
    steps = math.ceil(config.num_epochs * rows / config.learner.batch_size)
    usual = type(config).model_fields["num_steps"].default
    if config.num_steps not in (steps, usual):
        raise ConfigError(
            f"num_steps ({config.num_steps}): num_epochs ({config.num_epochs:g}) of {rows} rows at "
            f"learner.batch_size {config.learner.batch_size} are {steps} steps. Remove one of "
            f"the two."
        )
    for problem in config.learner.endless_warmup(steps, "num_epochs"):
        raise ConfigError(problem)
    return config.model_copy(update={"num_steps": steps})


def check_run_folder(
    config: RecipeConfig,
    files: RunFiles,
    *,
    start_over: str = "--fresh",
    given: Mapping[str, Callable[..., Any]] | None = None,
) -> None:
    """Refuse to continue in a folder of another config, or with changed inputs.

    Args:
        config: The whole run config.
        files: The run's folder.
        start_over: Option or argument that starts over, for messages.
        given: Config key -> function passed in Python instead of a file.

    Raises:
        ConfigError: a key differs or a file has changed; the message lists all of them.
    """
    files.check_unused()
    recorded, done = files.config(), files.last_step()
    if recorded is not None and RECORDED_BASE in recorded:
        raise ConfigError(
            f"name ({config.name}): {files.location} holds a sweep, no run. Choose another name or "
            f"storage_path."
        )
    if recorded is None or not done:  # without a step there is nothing to protect
        if config.from_checkpoint is not None:
            _check_beginning(config, config.from_checkpoint)
        return
    earlier = parse_run_config(recorded, origin=f"{files.location}/config.yaml")
    config = decided_as(config, earlier.model_dump())
    may_change = (*NUMBERS_DO_NOT_DEPEND_ON, "num_epochs")  # num_steps is compared instead
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
    check_recorded_inputs(config, files, given=given, start_over=start_over)


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
        given: Config key -> function passed in Python instead of a file.
        start_over: Option or argument that starts over, for messages.

    Raises:
        ConfigError: a file has changed; the message lists all of them.
    """
    if config.checkpoint.changed_inputs == "accept" or not (known := recorded_inputs(files)):
        return
    if found := changes(known, inputs_of(config, given)):
        lines = "\n  ".join(found)
        raise ConfigError(
            f"checkpoint.changed_inputs (refuse): {files.location} was begun with other inputs:\n"
            f"  {lines}\nPut them back to go on, set checkpoint.changed_inputs to accept to go on "
            f"with what is there now, choose another name, or start over with {start_over}."
        )


def decided_as(config: RecipeConfig, earlier: Mapping[str, Any]) -> RecipeConfig:
    """Return the config with its `auto` values resolved as in an earlier run.

    If this cluster's devices resolve `model.dtype` differently, the trainer's own check refuses the
    config. Micro-batches and sleep were numbers in runs recorded before they could be `auto`.
    """
    dtype = earlier.get("model", {}).get("dtype", "auto")
    if dtype != "auto":
        config = config.with_dtype(use_gpu=dtype == "bfloat16")
    now, before = flatten(config.model_dump()), flatten(earlier)
    for key in ("learner.max_tokens_per_microbatch", "rollout.engine.sleep"):
        if now.get(key) == "auto" and before.get(key) is not None:
            config = _with_value(config, key, before[key])
    return config


def _with_value(config: Any, key: str, value: Any) -> Any:
    """Return a copy of a frozen config or section with another value at a dotted key."""
    name, _, rest = key.partition(".")
    if rest:
        value = _with_value(getattr(config, name), rest, value)
    return config.model_copy(update={name: value})


def _check_beginning(config: RecipeConfig, place: str) -> None:
    """Refuse a checkpoint that the run could not load, or that leaves no step to train."""
    checkpoint = find_checkpoint(place)
    state, earlier = checkpoint_state(checkpoint), config_of(checkpoint)
    if config.num_steps <= state["step"]:
        raise ConfigError(
            f"num_steps ({config.num_steps}): from_checkpoint ({place}) is of step "
            f"{state['step']}, and steps count on. Set num_steps above {state['step']}."
        )
    run = RunFiles.at(parent_and_name(checkpoint)[0])
    # The state holds an adapter for this base model, or weights under this model's names.
    now = {} if config.checkpoint.changed_inputs == "accept" else inputs_of(config)
    if found := changes(recorded_inputs(run), now, keys=("model.policy",)):
        lines = "\n  ".join(found)
        raise ConfigError(
            f"from_checkpoint ({place}): its run was begun with another model:\n  {lines}\nPut it "
            f"back, or set checkpoint.changed_inputs to accept to begin with what is there now."
        )
    config = decided_as(config, earlier)
    if earlier:  # parse it, to fill in defaults of keys that are newer than the checkpoint
        earlier = parse_run_config(earlier, origin=f"{place}/config.yaml").model_dump(mode="json")
    theirs, mine = flatten(earlier), flatten(config.model_dump(mode="json"))
    for key in _OF_A_CHECKPOINT:
        names = {n for n in theirs.keys() | mine.keys() if f"{n}.".startswith(f"{key}.")}
        for name in sorted(names - {_HOW_ADAPTERS_TRAVEL}):
            if earlier and theirs.get(name) != mine.get(name):
                raise ConfigError(
                    f"{name} ({mine.get(name)}): from_checkpoint ({place}) holds the state of a "
                    f"run with {theirs.get(name)}. Set {name} to that; for only its weights, "
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
"""Key in one of these sections that does not affect the state."""


def is_finished(files: RunFiles, config: RecipeConfig) -> bool:
    """Return True if the folder's run reached its last step, or ended by the same `stop` rules."""
    summary = files.summary()
    if summary is None or summary["status"] != "finished":
        return False
    if summary["steps"] >= config.num_steps:
        return True
    rules = (files.config() or {}).get("stop")
    return "stopped" in summary and rules == config.stop.model_dump(mode="json")


_TRAINED = ("model.policy", "model.critic")
"""Config keys of trained models."""


def _check_positions(config: Any) -> None:
    """Refuse prompts and responses that are longer than a model's positions, as vLLM would."""
    for key, path in _models(config):
        if key != "model.reward":  # a reward model may use its own tokenizer
            _check_positions_of(config, key, path)


def _check_positions_of(config: Any, key: str, path: str) -> None:
    folder, longest = Path(path).expanduser(), max_model_len(config)
    if not (folder / "config.json").is_file():
        return
    positions = max_positions(model_config_of(folder, key))
    if positions is not None and longest > positions:
        response = config.rollout.length_key
        raise ConfigError(
            f"data.max_prompt_tokens + {response} ({longest}): {key} ({path}) has positions for "
            f"{positions} tokens. Lower the two by {longest - positions} together."
        )


def check_model(key: str, path: str, *, is_trained: bool = False) -> None:
    """Refuse a model that is neither a hub id nor a complete folder.

    Args:
        key: Config key of the model, for messages.
        path: Folder or hub id.
        is_trained: Whether the model is trained, so that it must not be quantized.

    Raises:
        ConfigError: the model is refused.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        values = model_config_of(folder, key)
        if is_trained:
            refuse_quantized(values, path, key)
        stored_files(folder, key)
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
    """Refuse a run with too many workers for a local Ray; a cluster is checked after connecting."""
    ray = sys.modules.get("ray")  # checks for a connection without importing Ray
    is_connected = ray is not None and ray.is_initialized()
    if config.cluster.address or os.environ.get("RAY_ADDRESS") or is_connected:
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
