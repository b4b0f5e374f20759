"""Static checks of a run's input: under a second, before anything heavy is imported."""

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
"""Rows of each source whose labels are checked before the start; others are as they are loaded."""


def check_inputs(
    config: AnyConfig, *, has_reward_fn: bool = False, on_this_machine: bool = True
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

    Reads headers, configs and tokenizers, no weights; it imports transformers. Of hub ids only
    configs and tokenizers are looked at.

    Raises:
        ConfigError: a folder lacks weights of its model, or has others; the tokens of two models
            that read the same ids differ; a token has no row in the embedding; LoRA cannot train
            the layers that it is to.
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

    A critic or a reference may have been saved without a tokenizer; then only the sizes of the
    vocabularies are compared.
    """
    from raypo.models.loading import same_vocabulary, vocabulary_size

    is_teacher = key.startswith("model.teacher")
    try:
        is_same = same_vocabulary(path, policy, key=key)
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
    """Refuse what `raypo eval` cannot read.

    Raises:
        ConfigError: the model, a prompt file or the judge is not there.
    """
    check_model("MODEL", model)
    check_extra(config.rollout.engine)
    _peek(config.data, "eval.prompts", config.eval.prompts)
    common = config.reward.function if isinstance(config, OnlineConfig) else None
    _check_own_functions(config, common=common)
    _check_labels(config, only_held_out=True)


def _models(config: AnyConfig) -> Iterator[tuple[str, str]]:
    """Config key and path of each model that is named."""
    model: Any = config.model
    for name in ("policy", "critic", "reference"):
        if (path := getattr(model, name, None)) is not None:
            yield f"model.{name}", path
    if isinstance(config, DistillationConfig):
        for name, path in config.teacher_of.items():
            yield f"model.teacher.{name}", path
    for entry in getattr(model, "reward", None) or ():
        yield "model.reward", entry.path


def _check_scoring(config: OnlineConfig, *, has_reward_fn: bool) -> None:
    """What scores responses is there, and so are other functions of the user's."""
    _check_own_functions(config, common=config.reward.function or has_reward_fn)
    if not has_reward_fn:
        _check_judged(config)
    for key, spec in config.own_functions.items():
        check_function(spec, key=key)
    for key, methods in (("environment", ENVIRONMENT), ("agent", AGENT)):
        if (spec := getattr(config.rollout, key)) is not None:
            arguments = getattr(config.rollout, f"{key}_args")
            check_class(spec, methods, arguments, optional=OPTIONAL, key=f"rollout.{key}")


def _seldom_meant(config: PPOConfig) -> list[str]:
    """Models that are named and never asked, which a sweep may turn on; old samples as if new."""
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


def _check_shards(config: OnlineConfig | PolicyExamplesConfig) -> None:
    """Models that vLLM cannot cut; those of a hub id are left to vLLM."""
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
    except ConfigError:  # no transformer that raypo knows; vLLM may
        return None


def _check_rows(config: AnyConfig) -> int | None:
    """Look at the first rows of all sources; the number of those in `data.prompts`, if known."""
    data, evaluation = config.data, config.eval
    if isinstance(data, ResponsesSection) and data.messages_key is not None:
        if isinstance(config, SFTConfig) and config.needs_engine:  # it answers prompts
            _peek(data, "eval.prompts", evaluation.prompts, messages_key=None)
        _peek(data, "eval.prompts", evaluation.prompts)
        return _peek(data, "data.prompts", data.prompts)
    columns = _response_columns(data)
    are_answered = not isinstance(config, SFTConfig | RewardModelConfig)  # or learned from
    _peek(data, "eval.prompts", evaluation.prompts, {} if are_answered else columns)
    unlabelled: Any = {"label_key": None} if isinstance(config, DPOConfig) else {}
    _peek(data, "eval.pairs", getattr(evaluation, "pairs", None), columns, **unlabelled)
    return _peek(data, "data.prompts", data.prompts, columns, **unlabelled)


def _response_columns(data: DataSection) -> dict[str, str]:
    """Config key -> column of what is learned in each row besides its prompt."""
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
    """Functions of single sources, and of evaluation: they are there, and no source lacks one.

    Args:
        common: Whether there is a function for all sources that have none.
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
    # Held-out episodes have their own scores, or are judged by what eval names.
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
    """Refuse labels that a ready-made reward function cannot read, as `load_prompts` does later.

    Args:
        has_reward_fn: A function was passed in Python, so `reward.function` scores nothing.
        only_held_out: Leave `data.prompts` out.
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
    if is_data_set(source) or data.on_error == "drop":  # needs a library to be read; see loading
        return
    for row in islice(read_rows(source, key=key), LABEL_ROWS):
        if label_key in row.values:
            check_label(check, row, label_key)


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


def with_steps_of_epochs(config: Run) -> Run:
    """The config with the `num_steps` that its `num_epochs` makes; without them as it is.

    Raises:
        ConfigError: both are set and say different things, the steps are all warm-up, or a file
            cannot be read.
    """
    if not isinstance(config, ExamplesConfig) or config.num_epochs is None:
        return config
    bad = BadRows(config.data.on_error)
    sources = config.data.prompts
    rows = sum(1 for each in sources for _ in read_rows(each, key="data.prompts", bad=bad))
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
    """Refuse to go on in a folder that belongs to another config, or with changed inputs.

    Args:
        start_over: The option or argument that starts over, in the caller's language.
        given: Config key -> function that Python passed in place of a file.

    Raises:
        ConfigError: with every key that differs, or every file that has changed.
    """
    files.check_unused()
    recorded, done = files.config(), files.last_step()
    if recorded is not None and RECORDED_BASE in recorded:
        raise ConfigError(
            f"name ({config.name}): {files.location} holds a sweep, no run. Choose another name or "
            f"storage_path."
        )
    if recorded is None or not done:  # it never made a step: nothing to protect
        if config.from_checkpoint is not None:
            _check_beginning(config, config.from_checkpoint)
        return
    earlier = parse_run_config(recorded, origin=f"{files.location}/config.yaml")
    config = _decided_as(config, earlier.model_dump())
    may_change = (*NUMBERS_DO_NOT_DEPEND_ON, "num_epochs")  # it has become num_steps
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
    """Refuse inputs that have changed since a run or sweep began, unless its config accepts them.

    Raises:
        ConfigError: with every file that has changed.
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
    run = RunFiles.at(parent_and_name(checkpoint)[0])
    # The state holds the changes of an adapter, or weights for the names of this very model.
    now = {} if config.checkpoint.changed_inputs == "accept" else inputs_of(config)
    if found := changes(recorded_inputs(run), now, keys=("model.policy",)):
        lines = "\n  ".join(found)
        raise ConfigError(
            f"from_checkpoint ({place}): its run was begun with another model:\n  {lines}\nPut it "
            f"back, or set checkpoint.changed_inputs to accept to begin with what is there now."
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


_TRAINED = ("model.policy", "model.critic")
"""Keys of models that gradients change, or whose weights they replace in the engines."""


def _check_positions(config: Any) -> None:
    """Refuse prompts and responses that are longer than a model's positions, as vLLM would."""
    for key, path in _models(config):
        if key != "model.reward":  # which may encode the text anew
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
    """Refuse a model that is neither a hub id nor a folder whose files are whole.

    Raises:
        ConfigError: with the key, the path and what to give.
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
    """Too few cores for a local Ray; a cluster is asked once it is connected."""
    ray = sys.modules.get("ray")  # asked without importing it
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
