"""Checks of the first rows of each source: their columns, and labels for reward functions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from raypo.config import (
    AnyConfig,
    ConfigError,
    DataSection,
    DPOConfig,
    ExamplesConfig,
    OnlineConfig,
    PairsSection,
    PolicyExamplesConfig,
    PromptSource,
    RecipeConfig,
    ResponsesSection,
    RewardModelConfig,
    SFTConfig,
    functions_of,
    source_name,
)
from raypo.custom.loader import (
    function_name,
    load_function,
    required_columns,
    takes_ground_truth,
)
from raypo.data.prepared_rows import check_label
from raypo.data.prompts import peek
from raypo.data.rows import BadRows, is_data_set, read_rows
from raypo.rewards.labels import scorers_of
from raypo.rewards.scoring import has_ground_truth
from raypo.rewards.verifiers import LABEL_CHECKS

Run = TypeVar("Run", bound=RecipeConfig)

COLUMN_ROWS = 1000
"""Number of first rows of a source whose columns are compared with the arguments of a reward
function."""
LABEL_ROWS = 20_000
"""Number of first rows of a source whose labels are checked before the start. Loading checks the
remaining rows."""


def check_rows(config: AnyConfig) -> int | None:
    """Check the first rows of all sources.

    Returns:
        The number of training rows, or None if it is unknown.
    """
    data, evaluation = config.data, config.eval
    if isinstance(data, ResponsesSection) and data.messages_key is not None:
        if isinstance(config, SFTConfig) and config.needs_engine:  # engines sample responses
            check_first_rows(data, "eval.prompts", evaluation.prompts, messages_key=None)
        check_first_rows(data, "eval.prompts", evaluation.prompts)
        return check_first_rows(data, "data.prompts", data.prompts)
    columns = _response_columns(data)
    # Held-out rows are prompts for the policy, or examples with the columns of training rows.
    are_answered = not isinstance(config, SFTConfig | RewardModelConfig)
    check_first_rows(data, "eval.prompts", evaluation.prompts, {} if are_answered else columns)
    unlabelled: Any = {"label_key": None} if isinstance(config, DPOConfig) else {}
    check_first_rows(data, "eval.pairs", getattr(evaluation, "pairs", None), columns, **unlabelled)
    return check_first_rows(data, "data.prompts", data.prompts, columns, **unlabelled)


def _response_columns(data: DataSection) -> dict[str, str]:
    """Return the columns of the responses to train on, by config key."""
    if isinstance(data, PairsSection) and not getattr(data, "desirable_key", None):
        return {"data.chosen_key": data.chosen_key, "data.rejected_key": data.rejected_key}
    column = getattr(data, "response_key", None)
    return {"data.response_key": column} if column else {}


def check_first_rows(
    data: DataSection,
    key: str,
    sources: Sequence[PromptSource] | None,
    response_keys: Mapping[str, str] | None = None,
    **changes: Any,
) -> int | None:
    """Check the first rows of a config key's sources.

    Args:
        data: The data section.
        key: Config key of the sources.
        sources: The sources. None means that there are none.
        response_keys: Response columns that each row must have, by config key.
        changes: Values that replace keys of the data section.

    Returns:
        The number of all rows of the sources, or None if it is unknown.
    """
    section = data.model_copy(update={"prompts": sources or (), **changes})
    return peek(section, key=key, response_keys=response_keys)


def check_prompt_lengths(config: OnlineConfig) -> list[str]:
    """Return a note for each source with prompts that are too long in its first rows.

    Chat messages are counted without the chat template, so some more may be too long. Only files
    are read, and only if the policy is a folder with tokenizer.json.

    Raises:
        ConfigError: all first prompts of a source are too long.
    """
    file, most = Path(config.model.policy, "tokenizer.json"), config.data.max_prompt_tokens
    if not file.is_file():
        return []
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.no_truncation()
    notes = []
    for key, sources in {
        "data.prompts": config.data.prompts,
        "eval.prompts": config.eval.prompts or (),
    }.items():
        for source in sources:
            if is_data_set(source):
                continue
            rows = islice(read_rows(source, key=key, bad=BadRows("drop")), COLUMN_ROWS)
            texts = [_text_of(row.values.get(config.data.prompt_key)) for row in rows]
            encodings = tokenizer.encode_batch(texts, add_special_tokens=False)
            lengths = [len(encoding.ids) for encoding in encodings]
            num_long = sum(length > most for length in lengths)
            if lengths and num_long == len(lengths):
                raise ConfigError(
                    f"data.max_prompt_tokens ({most}): all of the first {num_long} prompts of "
                    f"{key} are longer, the shortest by {min(lengths) - most} tokens. Raise it to "
                    f"the length of those that you want to keep (the longest has {max(lengths)})."
                )
            if num_long:
                notes.append(
                    f"{num_long} of the first {len(lengths)} prompts of {key} have more than "
                    f"{most} tokens (data.max_prompt_tokens): data.too_long is "
                    f"{config.data.too_long}"
                )
    return notes


def _text_of(prompt: Any) -> str:
    """Return the text of a prompt, or the joined contents of its chat messages."""
    if isinstance(prompt, list):
        messages = (message for message in prompt if isinstance(message, dict))
        return "".join(str(message.get("content") or "") for message in messages)
    return prompt if isinstance(prompt, str) else ""


def check_labels(
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
    # Reading a data set would import `datasets`. With `drop`, loading finds the rows to leave out.
    if is_data_set(source) or data.on_error == "drop":
        return
    for row in islice(read_rows(source, key=key), LABEL_ROWS):
        if label_key in row.values:
            check_label(check, row, label_key)


def check_columns(config: OnlineConfig, function: Any, *, key: str = "reward.function") -> None:
    """Refuse a reward function with TRL's or verl's signature if `data.prompts` lacks its inputs.

    Only files are read, not data sets. A column may be missing in some rows. The function then gets
    None for these rows.

    Args:
        config: The whole run config.
        function: The function, or its import path.
        key: Name of the argument or key that the function comes from.
    """
    of_sources = functions_of(config.data.prompts)
    sources = [source for source in config.data.prompts if source_name(source) not in of_sources]
    name = function_name(function)
    loaded = load_function(function, key=key) if isinstance(function, str) else function
    required, is_graded = required_columns(loaded), takes_ground_truth(loaded)
    if not (required or is_graded) or not sources or any(map(is_data_set, sources)):
        return
    columns: dict[str, None] = {}
    has_truth = config.data.label_key is not None
    for source in sources:
        bad = BadRows(config.data.on_error)
        for row in islice(read_rows(source, key="data.prompts", bad=bad), COLUMN_ROWS):
            columns |= dict.fromkeys(row.values)
            has_truth = has_truth or has_ground_truth(row.values)
    if is_graded and not has_truth:
        raise ConfigError(
            f"data.label_key (None): {name} takes a ground_truth, but rows of "
            'data.prompts have no reward_model["ground_truth"] as rows of verl do. Set '
            "data.label_key to the column of the answers."
        )
    columns.pop("prompt", None)  # passed under the name `prompts`
    for column in required:
        if column not in columns:
            raise ConfigError(
                f"{key} ({name}): has the argument {column}, but data.prompts has no such "
                f"column. It has {', '.join(columns) or 'none besides the prompt'}. Add the "
                "column, rename the argument, or give it a default."
            )


def check_judge_columns(config: OnlineConfig) -> None:
    """Refuse a judge whose template names a label or a column that rows of `data.prompts` lack."""
    if config.reward.judge is None:
        return
    columns = config.reward.judge.columns
    if config.data.label_key is None and "{label}" in config.reward.judge.template:
        raise ConfigError(
            "data.label_key (None): reward.judge.template names {label}. Set data.label_key to the "
            "column of the answers."
        )
    for source in config.data.prompts:
        if not columns or is_data_set(source):
            continue
        bad = BadRows(config.data.on_error)
        for row in islice(read_rows(source, key="data.prompts", bad=bad), COLUMN_ROWS):
            if missing := [name for name in columns if name not in row.values]:
                raise ConfigError(
                    f"reward.judge.template: names {{{missing[0]}}}, but {row.where} has no such "
                    f"column. It has {', '.join(row.values)}. Add the column, or correct the "
                    "template."
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
