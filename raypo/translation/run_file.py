"""Run files from another project's arguments.

A value is copied if the tables of `raypo.config.migration` say that it has the same meaning. Batch
sizes, the KL and the estimator are computed (`from_trl`, `from_verl`, `from_openrlhf`). Every other
value becomes a note, and so does a value that raypo refuses. A required key without a value is
written as TODO, which raypo refuses until the user sets the key.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from typing import Any

from raypo.config.base import ConfigError, RunFile, known_keys, nested, parsed
from raypo.config.migration import rows_of
from raypo.config.recipe_config import RECIPES
from raypo.translation.foreign_arguments import (
    DEFAULT,
    TODO,
    Arguments,
    Settings,
    Unread,
    steps_of,
)
from raypo.translation.from_openrlhf import from_openrlhf
from raypo.translation.from_trl import from_trl
from raypo.translation.from_verl import from_verl

_LEARNED = ("ppo.", "rollout.", "data.max_prompt_", "dpo.", "learner.", "eval.temperature")
"""Prefixes of keys that change what is learned. If such a key is not given, the other project's
default is written into the run file."""
_NOT_LEARNED = ("rollout.engine.", "learner.zero_", "learner.activation_", "learner.max_tokens_")
_TYPED = ("num_steps", "learner.lr_warmup_steps", "rollout.prompts_per_step", "ppo.kl.estimator")
"""Keys that do not take just any string, and so are written as TODO only after the check."""
_EPOCHS = {"TRL": "num_train_epochs", "verl": "trainer.total_epochs"}
_EPOCHS |= {"OpenRLHF": "train.num_episodes"}
_COMPUTED: dict[str, Callable[[Arguments, str], tuple[Settings, list[str]]]] = {
    "TRL": from_trl,
    "verl": from_verl,
    "OpenRLHF": from_openrlhf,
}


def translate(project: str, given: Mapping[str, Any], recipe: str = "ppo") -> str:
    """Return the text of a run file.

    Its comments give the origin of each key, and list what was not translated.

    Args:
        project: TRL, verl or OpenRLHF.
        given: Values of that project's arguments, by name. An `ast.AST` is an expression of unknown
            value.
        recipe: The recipe that the arguments are for.
    """
    known = known_keys(RECIPES[recipe])
    rows = [*rows_of(project), *(rows_of("peft") if project == "TRL" else ())]
    by_name = {name: row for row in rows for name in row.names}
    values = Arguments(given, by_name)
    done, notes = _COMPUTED[project](values, recipe)
    epochs = values(_EPOCHS[project])
    for name in [name for name in given if name not in values.used]:
        row, value = by_name.get(name), given[name]
        if isinstance(value, Unread):
            notes.append(f"{name}: {value.why}")
            continue
        keys = row.keys_in(known) if row else ()
        shown = ast.unparse(value) if isinstance(value, ast.AST) else value
        if row and row.is_same and keys and not isinstance(value, ast.AST):
            done |= {key: (value, name) for key in keys}
        elif row and (row.is_automatic or (not row.keys and row.default == str(shown).lower())):
            values.idle.append(f"{name} ({shown})")
        else:
            why = f"{' and '.join(keys)}. {row.note}" if row else "No counterpart is known."
            notes.append(f"{name} ({shown}): {why.removeprefix('. ').strip()}")
    done = {key: each for key, each in done.items() if each[0] == each[0]}  # drop NaN
    for row in [row for row in rows if row.is_same and row.default]:
        for key in () if given.keys() & row.names else row.keys_in(known):
            is_idle = key.startswith("eval.") and "eval.prompts" not in done
            if key.startswith(_LEARNED) and not key.startswith(_NOT_LEARNED) and not is_idle:
                done.setdefault(key, (parsed(row.default), f"{row.names[0]}{DEFAULT}"))
    if recipe == "ppo":
        done.setdefault("num_steps", steps_of(epochs, _EPOCHS[project], done))
    config = _accepted(done, notes, recipe)
    required = [f"{key}: {why}" for key, (value, why) in done.items() if value == TODO]
    head = [f"Translated from {project} by raypo init; keys not shown have raypo's defaults."]
    left = [" ".join(each.split()) for each in notes]  # a value may have several lines
    for title, each in (("REQUIRED, TODO below:", required), ("Left to you:", left)):
        head += [title, *(f"- {line}" for line in each)] if each else []
    head += [f"Needs nothing here: {', '.join(values.idle)}."] if values.idle else []
    text = config.to_yaml(shown=[key for key in done if _is_explicit(done[key], given)])
    return "\n".join([*(f"# {line}" for line in head), *_with_origins(text, done)]) + "\n"


def _set_todo(done: Settings, recipe: str) -> None:
    """Set each required key that has no value to TODO in `done`."""
    for key, why in (
        ("name", "the run's folder is storage_path/name"),
        ("model.policy", "a folder or a hub id"),
        ("data.prompts", "files or a hub id"),
    ):
        done.setdefault(key, (TODO, why))
    if recipe == "ppo" and not {"reward.function", "reward.url", "model.reward"} & done.keys():
        done["reward.function"] = TODO, "file.py:name, or set model.reward or reward.url"
    if recipe == "ppo":
        done.setdefault("num_steps", (TODO, "a number of rollout batches"))


def _is_explicit(setting: tuple[Any, str], given: Mapping[str, Any]) -> bool:
    """Return whether a value comes from an argument, so that it is written even as a default."""
    value, origin = setting
    words = re.findall(r"[\w.]+", origin)
    named = any(name.endswith(f".{word}") for name in given for word in words)
    return value == TODO or (
        not origin.endswith(DEFAULT) and (named or not given.keys().isdisjoint(words))
    )


def _accepted(done: Settings, notes: list[str], recipe: str) -> RunFile:
    """Return a config of the values that raypo accepts.

    A refused value is removed from `done` and becomes a note, unless it is a default.
    """
    while True:
        _set_todo(done, recipe)
        try:
            # Values of the right type in place of TODO. The number of prompts fits the minibatch.
            stand_ins = {
                "ppo.kl.estimator": "k3",
                "rollout.prompts_per_step": done.get("ppo.minibatch_size", (32, ""))[0],
            }
            values = {
                key: stand_ins[key] if value == TODO and key in stand_ins else value
                for key, (value, _) in done.items()
                if value != TODO or key not in _TYPED or key in stand_ins
            }
            return RECIPES[recipe].parse(nested(values))
        except ConfigError as error:
            lines = [line.removeprefix("config: ") for line in str(error).splitlines()]
            refused = {key: line for line in lines for key in done if re.match(rf"{key}\b", line)}
            if not refused:
                raise
            for key, line in refused.items():
                if not (origin := done.pop(key)[1]).endswith(DEFAULT):
                    notes.append(f"{origin}: {line}")


def _with_origins(text: str, done: Settings) -> list[str]:
    """Return the lines of a run file, each with the origin of its key as a comment."""
    path, lines = [], []
    for line in text.splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        path[depth:] = [line.strip().partition(":")[0]]
        value, origin = done.get(".".join(path), (None, ""))
        if value == TODO and ".".join(path) in _TYPED:
            line = f"{line.partition(':')[0]}: {TODO}"
        lines.append(f"{line} # {origin}" if origin and not line.endswith(":") else line)
    return lines
