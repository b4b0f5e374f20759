"""Meaning, allowed values and default of each config key, read from the config classes.

The meanings are the docstrings of the fields, for `raypo config` and docs/configuration.md.
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import textwrap
import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel, BeforeValidator
from pydantic.fields import FieldInfo

from raypo.config.base import ConfigError
from raypo.config.fields import known_keys, section_of, yaml_text
from raypo.config.only_if import declarations
from raypo.config.presets import PRESETS
from raypo.config.refusals import remedy_for_unknown
from raypo.config.sweep_config import Constraint

FIRST_KEYS = (
    "name",
    "model.policy",
    "data.prompts",
    "data.label_key",
    "data.max_prompt_tokens",
    "reward.function",
    "model.reward",
    "num_steps",
    "rollout.prompts_per_step",
    "rollout.samples_per_prompt",
    "rollout.max_new_tokens",
    "ppo.preset",
    "ppo.minibatch_size",
    "ppo.kl.coef",
    "learner.policy_lr",
    "learner.num_workers",
    "model.lora",
    "eval.prompts",
    "placement.mode",
    "rollout.mode",
)
"""Most important keys of a PPO run. `raypo config` without a key prints them."""


class Key(NamedTuple):
    """A config key that takes a value, rather than a section."""

    name: str
    """Dotted key."""
    values: str
    """Allowed values, in words."""
    default: str | None
    """Default, written as in a run file. None means that the key is required."""
    meaning: str


def keys_of(root: type[BaseModel], section: type[BaseModel], path: str = "") -> Iterator[Key]:
    """Yield the keys of a section of a run file, without the keys of its subsections."""
    texts, conditions = docstrings(section), declarations(root)
    for name, field in section.model_fields.items():
        if is_value(field):
            full_key = f"{path}.{name}" if path else name
            default = None if field.is_required() else default_text(field)
            values = values_text(field.annotation, field.metadata)
            rules = " and ".join(rule.text for rule in conditions.get(full_key, ()))
            condition = f"Used only if {rules}." if rules else ""
            meaning = " ".join(filter(None, (texts.get(name), condition)))
            yield Key(full_key, values, default, meaning)


def find_section(root: type[BaseModel], key: str) -> type[BaseModel] | None:
    """Return the class of the section at a dotted key. None means that there is no such section."""
    section: type[BaseModel] | None = root
    for name in key.split(".") if key else ():
        field = section.model_fields.get(name) if section else None
        section = section_of(field.annotation) if field else None
    return section


def explain(key: str, root: type[BaseModel]) -> list[Key]:
    """Return a key, and the keys below it if it is a section. An empty key means the whole file.

    Raises:
        ConfigError: there is no such key.
    """
    parent = key.rpartition(".")[0]
    keys: list[Key] = []
    if (owner := find_section(root, parent)) is not None:
        keys = [entry for entry in keys_of(root, owner, parent) if entry.name == key]
    if (section := find_section(root, key)) is not None:
        keys += keys_of(root, section, key)
    if not keys and section is None:
        remedy = remedy_for_unknown(key, known_keys(root))
        if remedy == "Remove it.":  # advice for a run file, not for a user who asks for a key
            command = f"raypo config {parent}" if owner and parent else "raypo config"
            remedy = f"`{command}` prints the keys and sections that there are."
        raise ConfigError(f"KEY ({key}): there is no such key. {remedy}")
    return keys


def sections_below(root: type[BaseModel], key: str) -> list[str]:
    """Return the dotted sections directly below a section."""
    section = find_section(root, key)
    fields = section.model_fields.items() if section else ()
    return [
        f"{key}.{name}" if key else name
        for name, field in fields
        if section_of(field.annotation) is not None
    ]


def preset_text(name: str) -> str:
    """Return the keys below `ppo` that a preset sets, as in a run file: `clip_high: 0.28, ...`."""

    def text(values: dict[str, Any]) -> str:
        return ", ".join(
            f"{key}: {{{text(value)}}}" if isinstance(value, dict) else f"{key}: {yaml_text(value)}"
            for key, value in values.items()
        )

    return text(PRESETS[name])


def default_of(root: type[BaseModel], key: str) -> str | None:
    """Return a key's default, written as in a run file.

    None means that the key is required, is null by default, or is a section.
    """
    parent, _, name = key.rpartition(".")
    section = find_section(root, parent)
    assert section is not None
    field = section.model_fields[name]
    is_shown = is_value(field) and not field.is_required() and field.default is not None
    return default_text(field) if is_shown else None


def default_text(field: FieldInfo) -> str:
    """Return a field's default, written as in a run file."""
    return yaml_text(field.get_default(call_default_factory=True))


def is_value(field: FieldInfo) -> bool:
    """Return whether a key takes a value. A section takes one only if it can also be null."""
    is_section = inspect.isclass(field.annotation) and issubclass(field.annotation, BaseModel)
    return not is_section


@functools.cache
def docstrings(section: type[BaseModel]) -> dict[str, str]:
    """Return the docstring of each field of a class and its base classes, by field name."""
    texts: dict[str, str] = {}
    for base in reversed(section.__mro__):
        if not issubclass(base, BaseModel) or base is BaseModel:
            continue
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(tree, ast.ClassDef)
        for pair in itertools.pairwise(tree.body):
            match pair:
                case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                    texts[name] = " ".join(text.split())
    return texts


def section_text(section: type[BaseModel]) -> str:
    """Return the docstring of a section's class as one line."""
    return " ".join((section.__doc__ or "").split("\nAttributes:")[0].split())


def values_text(annotation: Any, metadata: list[Any]) -> str:
    """Return the allowed values of a type in words."""
    if get_origin(annotation) is Annotated:
        inner, *marks = get_args(annotation)
        return values_text(inner, [*metadata, *marks])
    metadata = [part for mark in metadata for part in (getattr(mark, "metadata", None) or [mark])]
    if get_origin(annotation) in (Union, types.UnionType):
        alternatives = [values_text(part, metadata) for part in get_args(annotation)]
        return ", or ".join(dict.fromkeys(alternatives))
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{yaml_text(value)}`" for value in get_args(annotation))
    if get_origin(annotation) is tuple:
        item = values_text(get_args(annotation)[0], [])
        is_either = any(isinstance(mark, BeforeValidator) for mark in metadata)
        return f"{item}, or a list of such" if is_either else f"list: {item}"
    if annotation is type(None):
        return "`null`"
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        return "its keys, below"
    if annotation in (int, float):
        kind = "integer" if annotation is int else "number"
        signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
        bounds = [
            f"{sign} {getattr(mark, name):g}"
            for mark in metadata
            for name, sign in signs.items()
            if getattr(mark, name, None) is not None
        ]
        return f"{kind} {', '.join(bounds)}".strip()
    type_names = {str: "text", bool: "`true`, `false`", dict: "mapping", Constraint: "text"}
    return type_names.get(get_origin(annotation) or annotation, str(annotation))
