"""Run files from another project's settings.

A value is copied if the tables of `raypo.config.migration` say that it has the same meaning. Batch
sizes, the KL and the estimator are computed (`from_trl`, `from_verl`, `from_openrlhf`). Arguments
without a counterpart become notes. A value that decides what is learned is written as TODO if it is
unknown or refused; raypo refuses TODO, so that the user must set the key.
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
"""Values in place of TODO while the other keys are checked. A TODO without one is left out."""
_COMPUTED: dict[str, Callable[[ForeignArguments], Settings]] = {
    "TRL": from_trl,
    "verl": from_verl,
    "OpenRLHF": from_openrlhf,
}
_FIRST = ("estimator", "adv", "loss", "kl", "clip", "reward", "batch", "len", "lr", "data")
"""Words in argument names, in the order in which the notes about these arguments are listed."""


class Translation(NamedTuple):
    """Settings of another project as keys of raypo, and notes on what the user must still set."""

    project: str
    settings: Settings
    notes: list[str]
    """Lines about arguments that change what is learned and are not translated."""
    minor: list[str]
    """Arguments that concern memory, speed or files and are not translated, with their values."""
    keyless: list[str]
    """Arguments that need no key, with their values."""
    config: AnyConfig
    """The config, with stand-in values for the keys that are TODO."""

    def todo(self) -> list[str]:
        """Return a line with the key and its origin for each key that is TODO."""
        return [
            f"{key}: {origin}" for key, (value, origin) in self.settings.items() if _is_todo(value)
        ]

    def report(self) -> list[str]:
        """Return the report for the user, as lines."""
        lines: list[str] = []
        for title, notes in (
            ("TODO below, to be set:", self.todo()),
            ("Changes what is learned, and is left to you:", self.notes),
        ):
            lines += [title, *(f"- {' '.join(line.split())}" for line in notes)] if notes else []
        for title, notes in (
            ("Concerns memory, speed or files, where raypo chooses by itself:", self.minor),
            ("Needs nothing here:", self.keyless),
        ):
            lines += [f"{title} {', '.join(' '.join(e.split()) for e in notes)}."] if notes else []
        return lines


def translate(
    source: Source, *, keys_set_elsewhere: Sequence[str] = (), rows: int | None = None
) -> Translation:
    """Translate another project's settings into keys of raypo.

    Args:
        source: The settings.
        keys_set_elsewhere: Keys that need no value and no TODO here.
        rows: Number of rows of `data.prompts`. None means that it is unknown.

    Raises:
        ConfigError: a setting without counterpart decides what is learned.
    """
    keys = known_keys(RECIPES[source.recipe])
    foreign = ForeignArguments(source, rows)
    settings = _COMPUTED[source.project](foreign)
    for name in foreign.unmentioned(settings):
        _copy_or_note(foreign, settings, name, keys)
    _copy_same(foreign, settings, keys)
    required = dict(_REQUIRED)
    if (
        source.recipe == "ppo"
        and not {"reward.url", "model.reward", "rollout.agent"} & settings.keys()
    ):
        required["reward.function"] = "file.py:name, or set model.reward or reward.url"
    for key, hint in required.items():
        if key not in keys_set_elsewhere:
            settings.setdefault(key, (TODO, hint))
    for key in keys_set_elsewhere:
        settings.pop(key, None)
    config = _accepted_config(settings, foreign, source.recipe)
    order = {word: index for index, word in enumerate(_FIRST)}
    foreign.notes.sort(
        key=lambda note: min(
            (index for w, index in order.items() if w in note.split(":")[0]), default=99
        )
    )
    minor = [line for line in foreign.minor if not re.match(r"\S*(token|key) ", line)]
    return Translation(source.project, settings, foreign.notes, minor, foreign.keyless, config)


def _copy_same(foreign: ForeignArguments, settings: Settings, keys: Sequence[str]) -> None:
    """Copy the arguments that have the same meaning in raypo.

    A default of the other project is copied only if it decides what is learned.
    """
    for row in [row for row in rows_of(foreign.project) if row.is_same]:
        name = row.names[0]
        value = foreign.value(
            next((n for n in foreign.names(name) if n in foreign.arguments), name)
        )
        if value is None or not foreign.ignored.isdisjoint(foreign.names(name)):
            continue
        for key in row.keys_in(keys):
            is_path = key.startswith(("model.", "data.prompts", "eval.prompts"))
            has_no_effect = (key.startswith("eval.") and "eval.prompts" not in settings) or (
                key == "learner.critic_lr" and settings["ppo.advantage"][0] != "gae"
            )
            is_copied_by_default = (_is_learned(key) or key.startswith("eval.")) and not is_path
            if foreign.has(name) or (is_copied_by_default and not has_no_effect):
                is_known = UNRESOLVED not in str(value)
                settings.setdefault(key, (value if is_known else TODO, foreign.origin(name)))


def _copy_or_note(
    foreign: ForeignArguments, settings: Settings, name: str, keys: Sequence[str]
) -> None:
    """Copy an argument that no `from_*` function used, or add a line about it."""
    row, value = foreign.counterpart(name), foreign.arguments[name]
    keys_of_row = row.keys_in(keys) if row else ()
    if isinstance(value, str) and UNRESOLVED in value:
        value = TODO
    if row and row.is_same and keys_of_row:
        for key in keys_of_row:
            settings.setdefault(
                key, (value, name if value != TODO else f"{name} {foreign.arguments[name]}")
            )
    elif (row and row.is_automatic) or foreign.is_default(name, value):
        foreign.keyless.append(f"{name} ({value})")
    elif row and (row.is_minor or (keys_of_row and not any(map(_is_learned, keys_of_row)))):
        foreign.minor.append(f"{name} ({value})")
    else:
        text = f"{' and '.join(keys_of_row)}. {row.note}" if row else "No counterpart is known."
        foreign.notes.append(f"{name} ({value}): {text.removeprefix('. ').strip()}")


def run_file(translation: Translation) -> str:
    """Return the text of a run file, with the origin of each key and the report as comments."""
    settings = translation.settings
    shown_keys = [
        key
        for key, (value, origin) in settings.items()
        if _is_todo(value) or not origin.endswith(DEFAULT)
    ]
    text = translation.config.to_yaml(shown_keys)
    values = flatten(yaml.safe_load(text))
    for key in [key for key in settings if key in shown_keys]:
        for subkey in [name for name in values if name.startswith(f"{key}.")]:
            del values[subkey]
        values[key] = settings[key][0]
    header = [
        f"Translated from {translation.project} by raypo init, with the defaults of its version "
        f"{defaults_of(translation.project)['version']}; keys not shown have raypo's defaults.",
        *translation.report(),
    ]
    body = yaml.safe_dump(nested(values), sort_keys=False, allow_unicode=True, width=10**9)
    return "\n".join([*(f"# {line}" for line in header), *_with_origins(body, settings)]) + "\n"


def _is_learned(key: str) -> bool:
    return key.startswith(_LEARNED) and not key.startswith(_NOT_LEARNED)


def _is_todo(value: Any) -> bool:
    return isinstance(value, str) and value == TODO


def _accepted_config(settings: Settings, foreign: ForeignArguments, recipe: str) -> AnyConfig:
    """Return a config of the values that raypo accepts.

    A refused value becomes TODO if it decides what is learned, else a note. A default without
    effect is dropped.
    """
    while True:
        try:
            return RECIPES[recipe].parse(nested(_with_stand_ins(settings, recipe)))
        except ConfigError as error:
            lines = [line.removeprefix("config: ") for line in str(error).splitlines()]
            refused = {
                key: line
                for line in lines
                for key in settings
                if re.match(rf"{re.escape(key)}\b(?!\.)", line) and not _is_todo(settings[key][0])
            }
            if not refused:
                raise
            for key, line in refused.items():
                value, origin = settings.pop(key)
                if "has no effect" in line:
                    if not origin.endswith(DEFAULT):
                        foreign.notes.append(f"{origin}: {line}")
                elif key in _REQUIRED or _is_learned(key):
                    settings[key] = TODO, f"{origin}: {line}"
                else:
                    foreign.minor.append(f"{origin} ({value})")


def _with_stand_ins(settings: Settings, recipe: str) -> dict[str, Any]:
    """Return the values, with stand-ins for TODO that are consistent with the other values."""
    values = {key: value for key, (value, _) in settings.items() if not _is_todo(value)}
    for key in _STAND_INS:
        is_needed = key in _REQUIRED or (key == "num_steps" and "num_epochs" not in values)
        if key in settings or is_needed:
            values.setdefault(key, _STAND_INS[key])
    if recipe == "ppo":
        prompts_key, samples_key, minibatch_size = (
            "rollout.prompts_per_step",
            "rollout.samples_per_prompt",
            "ppo.minibatch_size",
        )
        if minibatch_size not in values:
            values[minibatch_size] = values.get(prompts_key, 1) * values.get(samples_key, 1)
        values.setdefault(prompts_key, values[minibatch_size])
        values.setdefault(samples_key, 4)
    return values


def _with_origins(text: str, settings: Settings) -> list[str]:
    """Return the lines of a run file, each with the origin of its key as a comment."""
    path: list[str] = []
    lines = []
    for line in text.splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        path[depth:] = [line.strip().partition(":")[0]]
        origin = " ".join(settings.get(".".join(path), (None, ""))[1].split())
        lines.append(f"{line} # {origin}" if origin else line)
    return lines
