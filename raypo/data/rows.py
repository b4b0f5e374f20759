"""Rows of data files, each with the place that a message can point to."""

from __future__ import annotations

import csv
import json
import re
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from raypo.config import ConfigError

EXTENSIONS = (".jsonl", ".json", ".parquet", ".csv")
_DATA_SET_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_LOOKS_LIKE_A_FILE = re.compile(r".*\.[A-Za-z]{1,5}")


class Row(NamedTuple):
    """One row and where it stands: `prompts.jsonl:7` or `prompts.parquet, row 7`."""

    where: str
    values: dict[str, Any]


def is_data_set_id(source: str) -> bool:
    """Whether a source is a Hugging Face data set id: `gsm8k`, `openai/gsm8k`."""
    return (
        not Path(source).exists()
        and _DATA_SET_ID.fullmatch(source) is not None
        and _LOOKS_LIKE_A_FILE.fullmatch(source) is None
    )


def read_rows(source: str, *, key: str) -> Iterator[Row]:
    """The rows of a file or data set, read as they are asked for.

    In a csv file everything is text, so that a label 007 stays what it is.

    Args:
        source: A file (jsonl, json with a list, parquet, csv) or a Hugging Face data set id.
        key: The config key that `source` comes from, for messages.

    Raises:
        ConfigError: the file is missing, has no rows, is of an unknown kind or cannot be read.
    """
    if is_data_set_id(source):
        rows = _data_set(source, key)
    else:
        rows = _READERS[check_file(source, key=key)](source, key)
    number = 0
    for number, row in enumerate(rows, start=1):  # noqa: B007 (asked for after the loop)
        yield row
    if not number:
        raise ConfigError(f"{key} ({source}): the file has no rows. Write prompts into it.")


def check_file(source: str, *, key: str) -> str:
    """The extension of a data file that is there.

    Raises:
        ConfigError: it is not there, a folder, or of an unknown kind.
    """
    path = Path(source)
    known = ", ".join(extension[1:] for extension in EXTENSIONS)
    if path.is_dir():
        raise ConfigError(f"{key} ({source}): this is a folder. Name the files in it ({known}).")
    if path.suffix.lower() not in EXTENSIONS:
        raise ConfigError(
            f"{key} ({source}): {path.suffix or 'no extension'} is no kind of file that raypo "
            f"reads. Give a file of the kind {known}, or a Hugging Face data set id."
        )
    if not path.is_file():
        raise ConfigError(f"{key} ({source}): there is no such file in {path.absolute().parent}.")
    return path.suffix.lower()


def check_data_set(source: str, *, key: str) -> None:
    """Refuse a data set id where the library that loads it is missing."""
    if find_spec("datasets") is None:
        raise ConfigError(
            f"{key} ({source}): there is no such file, and a Hugging Face data set needs the "
            "package datasets. Correct the path, or pip install datasets."
        )


def _jsonl(source: str, key: str) -> Iterator[Row]:
    with _opened(source) as file:
        for number, line in enumerate(_decoded(file, source, key), start=1):
            if line.strip():
                where = f"{source}:{number}"
                yield Row(where, _object(_parsed(line, where, key), where, key))


def _json(source: str, key: str) -> Iterator[Row]:
    with _opened(source) as file:
        rows = _parsed("".join(_decoded(file, source, key)) or "[]", source, key)
    if not isinstance(rows, list):
        raise ConfigError(
            f"{key} ({source}): a json file must hold one list of rows, this holds "
            f"{type(rows).__name__}. Write a list, or one object a line in a .jsonl file."
        )
    for number, row in enumerate(rows, start=1):
        where = f"{source}, row {number}"
        yield Row(where, _object(row, where, key))


def _csv(source: str, key: str) -> Iterator[Row]:
    csv.field_size_limit(sys.maxsize)
    with _opened(source, newline="") as file:
        reader = csv.DictReader(_decoded(file, source, key), strict=True)
        while True:
            try:
                values = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                where = f"{source}, after line {reader.line_num}"
                raise _unreadable(where, str(error), key) from None
            if None in values or None in values.values():
                columns = len(reader.fieldnames or ())
                problem = f"the row has not as many fields as the header ({columns})"
                raise _unreadable(f"{source}:{reader.line_num}", problem, key)
            yield Row(f"{source}:{reader.line_num}", dict(values))


def _parquet(source: str, key: str) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    try:
        with pq.ParquetFile(source) as file:
            for batch in file.iter_batches(batch_size=1024):
                for values in batch.to_pylist():
                    number += 1
                    yield Row(f"{source}, row {number}", values)
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(source, str(error), key) from None


def _data_set(source: str, key: str) -> Iterator[Row]:
    check_data_set(source, key=key)
    from datasets import load_dataset  # pyright: ignore[reportMissingImports]

    try:
        rows = load_dataset(source, split="train")
    except Exception as error:
        raise ConfigError(
            f"{key} ({source}): there is no such file, and the train split of a Hugging Face data "
            f"set of this name cannot be loaded: {error}. Correct the path or the name."
        ) from error
    for number, values in enumerate(rows, start=1):
        yield Row(f"{source}, row {number}", dict(values))


_READERS = {".jsonl": _jsonl, ".json": _json, ".csv": _csv, ".parquet": _parquet}


def _opened(source: str, newline: str | None = None):
    return open(source, encoding="utf-8-sig", newline=newline)  # -sig: Excel writes a mark


def _decoded(file: Iterator[str], source: str, key: str) -> Iterator[str]:
    try:
        yield from file
    except UnicodeDecodeError as error:
        raise _unreadable(source, f"it is not UTF-8: {error}", key) from None


def _parsed(text: str, where: str, key: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise _unreadable(where, f"{error.msg} at column {error.colno}", key) from None


def _object(value: Any, where: str, key: str) -> dict[str, Any]:
    if isinstance(value, dict):
        return value
    raise _unreadable(where, f"a row must be an object, this is {type(value).__name__}", key)


def _unreadable(where: str, problem: str, key: str) -> ConfigError:
    return ConfigError(f"{key} ({where}): cannot be read: {problem}. Correct the file.")
