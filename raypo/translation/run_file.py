"""Run files from another project's settings.

A value is copied if the tables of `raypo.config.migration` say that it has the same meaning. Batch
sizes, the KL and the estimator are computed (`from_trl`, `from_verl`, `from_openrlhf`). Arguments
without a counterpart become notes. A value that decides what is learned, and that is not known or
that raypo refuses, is written as TODO, which raypo refuses until the user sets the key.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import yaml

from raypo.config.base import TODO, ConfigError
from raypo.config.fields import flatten, known_keys, nested
from raypo.config.migration import rows_of
from raypo.config.recipe_config import RECIPES, AnyConfig
from raypo.translation.foreign_arguments import DEFAULT, ForeignArguments, Settings, defaults_of
from raypo.translation.foreign_settings import UNRESOLVED, Source
from raypo.translation.from_openrlhf import from_openrlhf
from raypo.translation.from_trl import from_trl
from raypo.translation.from_verl import from_verl

_LEARNED = ("ppo.", "rollout.", "data.", "dpo.", "learner.", "reward", "model.")
_NOT_LEARNED = ("rollout.engine.", "learner.zero_", "learner.activation_", "learner.max_tokens_")
_NOT_LEARNED += ("learner.num_", "learner.deepspeed", "model.attention")
_REQUIRED = {
    "name": "the run's folder is storage_path/name",
    "model.policy": "a folder or a hub id",
    "data.prompts": "files or a hub id",
}
_STAND_INS: dict[str, Any] = {
    **dict.fromkeys(("name", "model.policy", "data.prompts"), "x"),
    **{"reward.function": "x.py:x", "rollout.agent": "x.py:x", "num_steps": 10**9},
    **{"rollout.environment": "x.py:x"},
    **{"ppo.part_weights": {"x": 1.0}, "ppo.kl.estimator": "k3", "model.reward": "x"},
    **{"rollout.max_episode_tokens": 10**6, "ppo.kl.placement": "loss"},
}
"""Values in place of TODO while the other keys are checked. Other keys are left out."""
_COMPUTED: dict[str, Callable[[ForeignArguments], Settings]] = {
    "TRL": from_trl,
    "verl": from_verl,
    "OpenRLHF": from_openrlhf,
}
_FIRST = ("estimator", "adv", "loss", "kl", "clip", "reward", "batch", "len", "lr", "data")
"""Words in the arguments whose notes come first, most important ones first."""


class Translation(NamedTuple):
    """Settings of another project as keys of raypo, and what is left to the user."""

    project: str
    done: Settings
    notes: list[str]
    """Arguments that change learning and are not translated."""
    minor: list[str]
    """Arguments that concern memory, speed or files, and are not translated."""
    idle: list[str]
    """Arguments that need no key."""
    config: AnyConfig
    """The config, with other values in place of those that are TODO."""

    def todo(self) -> list[str]:
        """Return a line for each key that is TODO."""
        return [f"{key}: {why}" for key, (value, why) in self.done.items() if _is_todo(value)]

    def report(self) -> list[str]:
        """Return the lines for the user."""
        lines: list[str] = []
        for title, notes in (
            ("TODO below, to be set:", self.todo()),
            ("Changes what is learned, and is left to you:", self.notes),
        ):
            lines += [title, *(f"- {' '.join(line.split())}" for line in notes)] if notes else []
        for title, notes in (
            ("Concerns memory, speed or files, where raypo chooses by itself:", self.minor),
            ("Needs nothing here:", self.idle),
        ):
            lines += [f"{title} {', '.join(' '.join(e.split()) for e in notes)}."] if notes else []
        return lines


def translate(source: Source, *, given: Sequence[str] = (), rows: int | None = None) -> Translation:
    """Translate another project's settings into keys of raypo.

    Args:
        source: The settings.
        given: Keys that are set elsewhere, so that they need no TODO.
        rows: Number of rows of `data.prompts`, if it is known.

    Raises:
        ConfigError: a setting has no counterpart, and no run without it is the same.
    """
    keys = known_keys(RECIPES[source.recipe])
    get = ForeignArguments(source, rows)
    done = _COMPUTED[source.project](get)
    for name in get.left(done):
        _copy_or_note(get, done, name, keys)
    _copy_same(get, done, keys)
    required = dict(_REQUIRED)
    if source.recipe == "ppo" and not {"reward.url", "model.reward", "rollout.agent"} & done.keys():
        required["reward.function"] = "file.py:name, or set model.reward or reward.url"
    for key, why in required.items():
        if key not in given:
            done.setdefault(key, (TODO, why))
    for key in given:
        done.pop(key, None)
    config = _accepted(done, get, source.recipe)
    order = {word: rank for rank, word in enumerate(_FIRST)}
    get.notes.sort(
        key=lambda note: min((n for w, n in order.items() if w in note.split(":")[0]), default=99)
    )
    minor = [line for line in get.minor if not re.match(r"\S*(token|key) ", line)]
    return Translation(source.project, done, get.notes, minor, get.idle, config)


def _copy_same(get: ForeignArguments, done: Settings, keys: Sequence[str]) -> None:
    """Set the keys that take a value unchanged: to the value given, or to the other default.

    A default is set only if it decides what is learned.
    """
    for row in [row for row in rows_of(get.project) if row.is_same]:
        name = row.names[0]
        value = get.value(next((n for n in get.names(name) if n in get.arguments), name))
        if value is None or not get.passed.isdisjoint(get.names(name)):
            continue
        for key in row.keys_in(keys):
            is_path = key.startswith(("model.", "data.prompts", "eval.prompts"))
            is_idle = (key.startswith("eval.") and "eval.prompts" not in done) or (
                key == "learner.critic_lr" and done["ppo.advantage"][0] != "gae"
            )
            is_default = (_is_learned(key) or key.startswith("eval.")) and not is_path
            if get.has(name) or (is_default and not is_idle):
                is_known = UNRESOLVED not in str(value)
                done.setdefault(key, (value if is_known else TODO, get.origin(name)))


def _copy_or_note(get: ForeignArguments, done: Settings, name: str, keys: Sequence[str]) -> None:
    """Copy an argument that no function computed, or add a line on it."""
    row, value = get.row(name), get.arguments[name]
    ours = row.keys_in(keys) if row else ()
    if isinstance(value, str) and UNRESOLVED in value:
        value = TODO
    if row and row.is_same and ours:
        for key in ours:
            done.setdefault(
                key, (value, name if value != TODO else f"{name} {get.arguments[name]}")
            )
    elif (row and row.is_automatic) or get.is_default(name, value):
        get.idle.append(f"{name} ({value})")
    elif row and (row.is_minor or (ours and not any(map(_is_learned, ours)))):
        get.minor.append(f"{name} ({value})")
    else:
        why = f"{' and '.join(ours)}. {row.note}" if row else "No counterpart is known."
        get.notes.append(f"{name} ({value}): {why.removeprefix('. ').strip()}")


def run_file(made: Translation) -> str:
    """Return the text of a run file. Its comments have the origin of each key, and what is left."""
    done = made.done
    shown = [
        key
        for key, (value, origin) in done.items()
        if _is_todo(value) or not origin.endswith(DEFAULT)
    ]
    text = made.config.to_yaml(shown)
    values = flatten(yaml.safe_load(text))
    for key in [key for key in done if key in shown]:
        for below in [key_below for key_below in values if key_below.startswith(f"{key}.")]:
            del values[below]
        values[key] = done[key][0]
    head = [
        f"Translated from {made.project} by raypo init, with the defaults of its version "
        f"{defaults_of(made.project)['version']}; keys not shown have raypo's defaults.",
        *made.report(),
    ]
    body = yaml.safe_dump(nested(values), sort_keys=False, allow_unicode=True, width=10**9)
    return "\n".join([*(f"# {line}" for line in head), *_with_origins(body, done)]) + "\n"


def _is_learned(key: str) -> bool:
    return key.startswith(_LEARNED) and not key.startswith(_NOT_LEARNED)


def _is_todo(value: Any) -> bool:
    return isinstance(value, str) and value == TODO


def _accepted(done: Settings, get: ForeignArguments, recipe: str) -> AnyConfig:
    """Return a config of the values that raypo accepts.

    A refused value that decides what is learned becomes TODO, and another one a note. A default is
    dropped if it has no effect.
    """
    while True:
        try:
            return RECIPES[recipe].parse(nested(_checkable(done, recipe)))
        except ConfigError as error:
            lines = [line.removeprefix("config: ") for line in str(error).splitlines()]
            refused = {
                key: line
                for line in lines
                for key in done
                if re.match(rf"{re.escape(key)}\b(?!\.)", line) and not _is_todo(done[key][0])
            }
            if not refused:
                raise
            for key, line in refused.items():
                value, origin = done.pop(key)
                if "has no effect" in line:
                    if not origin.endswith(DEFAULT):
                        get.notes.append(f"{origin}: {line}")
                elif key in _REQUIRED or _is_learned(key):
                    done[key] = TODO, f"{origin}: {line}"
                else:
                    get.minor.append(f"{origin} ({value})")


def _checkable(done: Settings, recipe: str) -> dict[str, Any]:
    """Return the values with stand-ins for those that are TODO, which fit the others."""
    values = {key: value for key, (value, _) in done.items() if not _is_todo(value)}
    for key in _STAND_INS:
        is_needed = key in _REQUIRED or (key == "num_steps" and "num_epochs" not in values)
        if key in done or is_needed:
            values.setdefault(key, _STAND_INS[key])
    if recipe == "ppo":
        prompts, samples, updated = (
            "rollout.prompts_per_step",
            "rollout.samples_per_prompt",
            "ppo.minibatch_size",
        )
        if updated not in values:
            values[updated] = values.get(prompts, 1) * values.get(samples, 1)
        values.setdefault(prompts, values[updated])
        values.setdefault(samples, 4)
    return values


def _with_origins(text: str, done: Settings) -> list[str]:
    """Return the lines of a run file, each with the origin of its key as a comment."""
    path: list[str] = []
    lines = []
    for line in text.splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        path[depth:] = [line.strip().partition(":")[0]]
        origin = " ".join(done.get(".".join(path), (None, ""))[1].split())
        lines.append(f"{line} # {origin}" if origin else line)
    return lines
