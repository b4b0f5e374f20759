"""Rows that Python hands to a trainer: written once, so that the config can name them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import xxhash

from raypo.config import ConfigError, RecipeConfig
from raypo.config.paths import storage_path
from raypo.storage.folder import TEMPORARY
from raypo.storage.run_files import GIVEN_ROWS, RunFiles

AnyConfig = TypeVar("AnyConfig", bound=RecipeConfig)
Rows = Any
"""What has a length and gives mappings: a `datasets.Dataset`, a list of dicts."""


def check_rows(kind: type[RecipeConfig], given: Mapping[str, Rows]) -> None:
    """Refuse what names no key of the recipe, or cannot be read more than once.

    Raises:
        ConfigError: the first that does.
    """
    known = [key for key in kind.paths if key.startswith(("data.", "eval."))]
    for key, rows in given.items():
        if key not in known:
            raise ConfigError(
                f"datasets ({key}): its keys are those of the config whose place rows take: "
                f"{', '.join(known)}."
            )
        if isinstance(rows, str | Mapping) or not hasattr(rows, "__len__"):
            raise ConfigError(
                f"datasets ({key}: {type(rows).__name__}): rows are a datasets.Dataset or a list "
                f"of dicts. What streams is written to files first (save_to_disk, write_parquet), "
                f"and {key} names them."
            )


def with_rows(config: AnyConfig, given: Mapping[str, Rows]) -> AnyConfig:
    """The config that names files in the run's folder, with rows that Python handed over.

    The name of a file is made of what is in it, so that a run that goes on with others is refused.

    Raises:
        ConfigError: a row is no mapping, or has what JSON cannot say.
    """
    if not given:
        return config
    files = RunFiles(storage_path(config), config.name)
    values = config.model_dump()
    for key, rows in given.items():
        section, _, name = key.partition(".")
        values[section][name] = _write(key, rows, files)
    files.sync()
    return type(config).parse(values, origin="trainer")


def _write(key: str, rows: Rows, files: RunFiles) -> str:
    """Rows as JSON lines; their path or URI."""
    folder = files.folder / GIVEN_ROWS
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f"{TEMPORARY}{os.getpid()}-{key}"
    content = xxhash.xxh3_64()
    try:
        with temporary.open("wb") as file:
            for line in _lines(key, rows):
                file.write(line)
                content.update(line)
        name = f"{key}-{content.hexdigest()}.jsonl"
        os.replace(temporary, folder / name)
    finally:
        temporary.unlink(missing_ok=True)
    if files.is_local:
        return str(folder / name)
    place, mark, options = files.storage_path.partition("?")
    return f"{place.rstrip('/')}/{files.name}/{GIVEN_ROWS}/{name}{mark}{options}"


def _lines(key: str, rows: Rows) -> Iterator[bytes]:
    for number, row in enumerate(rows, start=1):
        try:
            yield json.dumps(dict(row), ensure_ascii=False, default=_plain).encode() + b"\n"
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"datasets ({key}): row {number} cannot be written as JSON: {error}. Rows are "
                f"mappings of texts, numbers, lists and mappings; leave other columns out."
            ) from None


def _plain(value: Any) -> Any:
    """What NumPy holds, as lists and numbers."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__} is in it")
