"""Fields of config classes: sections, keys, and values as written in a run file."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Mapping
from typing import Any, Final, get_args, get_origin

from pydantic import BaseModel

PATH: Final = "names files"
"""Mark of fields whose values are paths or hub ids."""
FUNCTION: Final = "names code"
"""Mark of fields whose values are import paths of functions and classes."""


@functools.cache
def marked_keys(model: type[BaseModel], mark: str, prefix: str = "") -> list[str]:
    """Return the dotted keys of all fields with a mark, including fields of sections in lists."""
    keys = []
    for name, field in model.model_fields.items():
        key = f"{prefix}{name}"
        if mark in field.metadata or _is_marked(field.annotation, mark):
            keys.append(key)
        if section := section_of(field.annotation):
            keys += marked_keys(section, mark, f"{key}.")
    return keys


def _is_marked(annotation: Any, mark: str) -> bool:
    is_marked = mark in getattr(annotation, "__metadata__", ())
    return is_marked or any(_is_marked(argument, mark) for argument in get_args(annotation))


def section_of(annotation: Any, *, items: bool = True) -> type[BaseModel] | None:
    """Return the section class in a type or union. None means that there is no section.

    Args:
        annotation: Type of a field.
        items: Also return the section class of the items of a list.
    """
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) is tuple and not items:
        return None
    sections = (section_of(part, items=items) for part in get_args(annotation))
    return next((section for section in sections if section is not None), None)


def known_keys(model: type[BaseModel], prefix: str = "") -> list[str]:
    """Return every dotted key below a config class, including the keys that are sections."""
    keys = []
    for name, field in model.model_fields.items():
        keys.append(f"{prefix}{name}")
        if section := section_of(field.annotation, items=False):
            keys += known_keys(section, f"{prefix}{name}.")
    return keys


def yaml_text(value: Any) -> str:
    """Return a value as it is written in a run file."""
    if isinstance(value, str):
        return value
    if isinstance(value, float):
        return f"{value:.1e}".replace("e-0", "e-") if 0 < value < 1e-3 else f"{value:g}"
    return json.dumps(value)


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return `{"a": {"b": 1}}` as `{"a.b": 1}`; empty mappings stay as values."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Undo `flatten`."""
    tree: dict[str, Any] = {}
    for key, value in flat.items():
        *sections, name = key.split(".")
        section = tree
        for section_name in sections:
            section = section.setdefault(section_name, {})
        section[name] = value
    return tree
