"""Relative paths of a run file mean the driver's folder, wherever the reader runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from glob import glob
from pathlib import Path, PurePath
from typing import Any


def make_absolute(
    values: dict[str, Any], base: Path, *, paths: Sequence[str], functions: Sequence[str]
) -> None:
    """Make every path of a config's values that exists below `base` absolute; hub ids stay.

    Args:
        paths: Dotted keys of paths.
        functions: Dotted keys of functions: `file.py:name`.
    """
    for key in paths:
        _change(values, key.split("."), lambda path: _absolute(path, base))
    for key in functions:
        _change(values, key.split("."), lambda spec: _absolute_function(spec, base))


def short_name(path: str) -> str:
    """The last two words of a folder, a hub id or a function's path, for people."""
    return "/".join(PurePath(path).parts[-2:])


def is_uri(path: str) -> bool:
    """Whether a storage path is a URI (s3://bucket/folder) and no local path."""
    return "://" in path


def _change(values: dict[str, Any], key: list[str], change: Callable[[str], str]) -> None:
    """Change the texts at a dotted key; every item of a list, each of its own keys below."""
    first, *rest = key
    found = values.get(first)
    if found is None:
        return
    if rest:
        for section in found if isinstance(found, list | tuple) else [found]:
            if isinstance(section, dict):  # a source may be only its path
                _change(section, rest, change)
    elif isinstance(found, list | tuple):
        values[first] = [_changed(entry, change) for entry in found]
    else:
        values[first] = _changed(found, change)


def _changed(entry: str | dict[str, Any], change: Callable[[str], str]) -> str | dict[str, Any]:
    """A path, an entry like that of a data set with the path in it, or paths by name."""
    if isinstance(entry, str):
        return change(entry)
    return {
        key: change(value) if key == "path" or "path" not in entry else value
        for key, value in entry.items()
    }


def _absolute(path: str, base: Path) -> str:
    if is_uri(path):
        return path
    full = base / Path(path).expanduser()
    return str(full) if full.exists() or glob(str(full), recursive=True) else path


def _absolute_function(spec: str, base: Path) -> str:
    """`file.py:name` with the file's full path; `package.module:name` stays."""
    if ":" not in spec:
        return spec
    file, name = spec.rsplit(":", 1)
    return f"{_absolute(file, base)}:{name}" if file.endswith(".py") else spec
