"""Rows that a script passes to a trainer. They are written to files, which the config then names.

The files are in the run's folder. A Ray Data set is executed once, while its rows are written one
by one. The learner workers read the files like any other files. The order of the rows therefore
depends neither on the number of workers nor on how Ray schedules the data set's tasks.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import xxhash

from raypo.cluster.connect import connect
from raypo.config import ConfigError, RecipeConfig
from raypo.config.fields import PATH, marked_keys
from raypo.storage.folder import TEMPORARY, below
from raypo.storage.run_files import GIVEN_ROWS, RunFiles

AnyConfig = TypeVar("AnyConfig", bound=RecipeConfig)

Rows = Any
"""A `ray.data.Dataset`, or a sized iterable of mappings: a `datasets.Dataset`, a list of dicts."""


def check_rows(config_class: type[RecipeConfig], rows_by_key: Mapping[str, Rows]) -> None:
    """Refuse rows for an unknown key, and iterators, which can be read only once.

    Raises:
        ConfigError: a key or its rows are refused.
    """
    keys = [key for key in marked_keys(config_class, PATH) if key.startswith(("data.", "eval."))]
    for key, rows in rows_by_key.items():
        if key not in keys:
            raise ConfigError(
                f"datasets ({key}): the keys must be train, eval or keys of the config: "
                f"{', '.join(keys)}."
            )
        if remedy := _remedy(key, rows):
            raise ConfigError(
                f"{key} ({type(rows).__module__}.{type(rows).__name__}): rows must be a "
                f"ray.data.Dataset, a datasets.Dataset or a list of dicts. {remedy}"
            )


_ROW_METHODS = {
    "pandas": 'to_dict("records")',
    "polars": "to_dicts()",
    "pyarrow": "to_pylist()",
}
"""Method that returns the rows of a table as dicts, by package."""


def _remedy(key: str, rows: Rows) -> str | None:
    """Return how to pass rows of an unsupported type, or None for a supported type."""
    if isinstance(rows, str):
        return f"Name files and data sets in the config: {key}."
    if isinstance(rows, Mapping):
        splits = [repr(name) for name in rows]
        return f"Pass one of its values, like [{splits[0]}]." if splits else "This one is empty."
    if method := _ROW_METHODS.get(type(rows).__module__.partition(".")[0]):
        return f"Pass its rows as dicts: {method}."
    if is_ray_data(rows) or hasattr(rows, "__len__"):
        return None
    return (
        "Write a streaming data set to files first (save_to_disk, write_parquet), and name them "
        f"in {key}."
    )


def is_ray_data(rows: Rows) -> bool:
    """Return whether rows are a Ray Data set. Ray Data is imported only for rows of its types."""
    if not type(rows).__module__.startswith("ray.data"):
        return False
    from ray.data import Dataset

    return isinstance(rows, Dataset)


def with_rows(config: AnyConfig, rows_by_key: Mapping[str, Rows]) -> AnyConfig:
    """Write rows given in Python into the run's folder. Return the config that names the files.

    A file's name contains a hash of its content, so that other rows never overwrite the rows of a
    run that can resume.

    Raises:
        ConfigError: there are no rows, a row is not a mapping, or JSON cannot represent a row.
    """
    if not rows_by_key:
        return config
    files = RunFiles(config.storage_path, config.name)
    values = config.model_dump()
    for key, rows in rows_by_key.items():
        section, _, name = key.partition(".")
        if is_ray_data(rows):
            connect(config.cluster)
            with _preserve_order(rows):
                values[section][name] = _write(key, rows.iter_rows(), files)
        else:
            values[section][name] = _write(key, rows, files)
    files.sync()
    return type(config).parse(values, origin="trainer")


@contextmanager
def _preserve_order(dataset: Any) -> Iterator[None]:
    """Make a Ray Data set yield its blocks in their order, not in the order of completion."""
    options = dataset.context.execution_options
    previous, options.preserve_order = options.preserve_order, True
    try:
        yield
    finally:
        options.preserve_order = previous


def _write(key: str, rows: Iterable[Any], files: RunFiles) -> str:
    """Write rows as JSON lines, and return the path or URI."""
    folder = files.folder / GIVEN_ROWS
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f"{TEMPORARY}{os.getpid()}-{key}"
    content = xxhash.xxh3_64()
    try:
        with temporary.open("wb") as file:
            for line in _json_lines(key, rows):
                file.write(line)
                content.update(line)
            if not file.tell():
                raise ConfigError(f"{key} (given in Python): there are no rows. Give at least one.")
        name = f"{key}-{content.hexdigest()}.jsonl"
        os.replace(temporary, folder / name)
    finally:
        temporary.unlink(missing_ok=True)
    return below(files.location, GIVEN_ROWS, name)


def _json_lines(key: str, rows: Iterable[Any]) -> Iterator[bytes]:
    for row_number, row in enumerate(rows, start=1):
        try:
            yield json.dumps(dict(row), ensure_ascii=False, default=_plain).encode() + b"\n"
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"{key} (given in Python): row {row_number} cannot be written as JSON: {error}. "
                "Rows must be mappings that contain texts, numbers, lists and mappings; leave "
                "other columns out."
            ) from None


def _plain(value: Any) -> Any:
    """Convert NumPy values to lists and numbers."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__} is in it")
