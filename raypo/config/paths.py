"""Relative paths of a run file, which every machine resolves against the driver's folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from glob import glob
from pathlib import Path, PurePath
from typing import Any

VERIFIERS = "verifiers:"
"""Prefix of an environment from the package verifiers. The environment's name or a Python file
follows. With `//` after the prefix, the path names the environment's data set:
`verifiers://NAME?split=eval`."""


def make_absolute(
    values: dict[str, Any], base: Path, *, paths: Sequence[str], functions: Sequence[str]
) -> None:
    """Make the paths in a config's values absolute if they exist below `base`.

    Hub ids are unchanged.

    Args:
        values: Nested values of the config, changed in place.
        base: Folder that relative paths start from.
        paths: Dotted keys of paths.
        functions: Dotted keys of functions, `file.py:name`.
    """
    for key in paths:
        _change(values, key.split("."), lambda path: _absolute(path, base))
    for key in functions:
        _change(values, key.split("."), lambda spec: absolute_function(spec, base))


def short_name(path: str) -> str:
    """Return the last two parts of a folder, a hub id or a function's path, for display."""
    return "/".join(PurePath(path).parts[-2:])


def is_uri(path: str) -> bool:
    """Return whether a storage path is a URI (s3://bucket/folder) rather than a local path."""
    return "://" in path


def _change(values: dict[str, Any], key: list[str], change: Callable[[str], str]) -> None:
    """Apply `change` to the string at a dotted key, or to every item of a list at that key."""
    name, *subkeys = key
    value = values.get(name)
    if value is None:
        return
    if subkeys:
        for section in value if isinstance(value, list | tuple) else [value]:
            if isinstance(section, dict):  # a source may be a plain path
                _change(section, subkeys, change)
    elif isinstance(value, list | tuple):
        values[name] = [_change_entry(entry, change) for entry in value]
    else:
        values[name] = _change_entry(value, change)


def _change_entry(
    entry: str | dict[str, Any], change: Callable[[str], str]
) -> str | dict[str, Any]:
    """Apply `change` to a path, to the path of a data source, or to all paths of a mapping."""
    if isinstance(entry, str):
        return change(entry)
    return {
        key: change(value) if key == "path" or "path" not in entry else value
        for key, value in entry.items()
    }


def _absolute(path: str, base: Path) -> str:
    if path.startswith(VERIFIERS):
        slashes = "//" if is_uri(path) else ""
        name, separator, query = path.removeprefix(VERIFIERS + slashes).partition("?")
        file = _absolute(name, base) if name.endswith(".py") else name
        return f"{VERIFIERS}{slashes}{file}{separator}{query}"
    if is_uri(path):
        return path
    full_path = base / Path(path).expanduser()
    return str(full_path) if full_path.exists() or glob(str(full_path), recursive=True) else path


def absolute_function(spec: str, base: Path) -> str:
    """Return `file.py:name` with the file's absolute path; `package.module:name` is unchanged."""
    if ":" not in spec:
        return spec
    if spec.startswith(VERIFIERS):
        return _absolute(spec, base)
    file, name = spec.rsplit(":", 1)
    return f"{_absolute(file, base)}:{name}" if file.endswith(".py") else spec
