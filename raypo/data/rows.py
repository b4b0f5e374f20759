"""Rows of data files, each with the place that a message can point to.

`key` is the config key that a source comes from; errors begin with it.
"""

from __future__ import annotations

import csv
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from glob import glob, has_magic
from importlib.util import find_spec
from io import TextIOWrapper
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TextIO, TypeVar
from urllib.parse import parse_qsl

from raypo.config import ConfigError, PromptSource, SourceEntry
from raypo.config.paths import is_uri
from raypo.config.sources import DATA_FILES, path_of
from raypo.storage.folder import open_storage

_DATA_SET_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_LOOKS_LIKE_A_FILE = re.compile(r".*\.[A-Za-z]{1,5}")
GYM = "reasoning_gym://"
"""How a source begins that reasoning-gym makes: `reasoning_gym://chain_sum?size=2000&seed=0`."""
_BUFFER_BYTES = 1 << 20
"""One request to a remote storage asks for so many."""


T = TypeVar("T")
U = TypeVar("U")


class Row(NamedTuple):
    """One row and where it stands: `prompts.jsonl:7` or `prompts.parquet, row 7`."""

    where: str
    values: dict[str, Any]
    number: int = 0
    """Its place among the rows of its source."""


class RowError(ConfigError):
    """One row is wrong, and the others of its source may be right; see `data.on_error`."""


@dataclass
class BadRows:
    """The rows of a config key that cannot be used: refused at the first, or counted."""

    on_error: str
    """`data.on_error`."""
    count: int = 0
    first: str = ""
    """The error of the first such row, which names its file and line."""

    def add(self, error: RowError) -> None:
        """Count a row, or raise its error where `data.on_error` is `refuse`."""
        if self.on_error == "refuse":
            raise error
        self.count += 1
        self.first = self.first or str(error)

    def each(self, work: Callable[[T], U], rows: Iterable[T]) -> Iterator[U]:
        """Yield what `work` makes of each row, without those that it refuses."""
        for row in rows:
            try:
                done = work(row)
            except RowError as error:
                self.add(error)
            else:
                yield done

    def notes(self, key: str) -> list[str]:
        """Return how many rows of a config key were dropped and why, as a line for people."""
        words = f"{self.count} bad rows of {key} are dropped (data.on_error). The first found:"
        return [f"{words} {self.first}"] if self.count else []

    def refuse_all(self, key: str) -> None:
        """Raise where rows were dropped, because no other row is left.

        Raises:
            ConfigError: with the first row's error.
        """
        if self.count:
            raise ConfigError(
                f"{key}: none of its rows is left, and {self.count} are bad. The first found: "
                f"{self.first}"
            )


class RowsOnDisk:
    """Rows of a `datasets.Dataset`, read when they are asked for: none of them stays in memory."""

    def __init__(self, source: PromptSource, rows: Any) -> None:
        self._source, self._rows = source, rows

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Row]:
        for number, values in enumerate(self._rows, start=1):
            yield Row(f"{self._source}, row {number}", dict(values), number - 1)

    def __getitem__(self, place: int) -> Row:
        return Row(f"{self._source}, row {place + 1}", dict(self._rows[place]), place)


def is_data_set(source: PromptSource) -> bool:
    """Whether the package `datasets` must load a source: an id like `openai/gsm8k`, say.

    An entry may also name a folder that it reads; whatever has a configuration or split is its.
    """
    path = path_of(source)
    if is_uri(path) or is_saved(path) or _is_pattern(path):
        return False
    is_entry = isinstance(source, SourceEntry)
    if Path(path).exists():
        return is_entry and Path(path).is_dir()
    if is_entry and str(source) != path:
        return True
    is_id = _DATA_SET_ID.fullmatch(path) is not None
    return is_id and _LOOKS_LIKE_A_FILE.fullmatch(path) is None


def read_rows(source: PromptSource, *, key: str, bad: BadRows | None = None) -> Iterator[Row]:
    """Yield the rows of a source, read as they are asked for.

    In a csv file everything is text, so that a label 007 stays what it is.

    Args:
        bad: Takes the lines that are no rows. None refuses the first.

    Raises:
        ConfigError: a file is missing, has no rows, is of an unknown kind or cannot be read.
    """
    path = path_of(source)
    if (on_disk := rows_on_disk(source, key=key)) is not None:
        rows = iter(on_disk)
    elif path.startswith(GYM):
        rows = _reasoning_gym(path, key)
    else:
        kinds = {file: _kind_of(file, key) for file in files_of(path, key)}
        bad = bad or BadRows("refuse")
        rows = chain.from_iterable(_READERS[kind](file, key, bad) for file, kind in kinds.items())
    number = -1
    for number, row in enumerate(rows):
        yield row._replace(number=number)
    if number < 0 and not (bad and bad.count):
        raise _no_rows(source, key)


def rows_on_disk(source: PromptSource, *, key: str) -> RowsOnDisk | None:
    """The rows of a source of which any can be read by itself; None: of another one.

    Raises:
        ConfigError: it cannot be read, or has no rows.
    """
    if is_data_set(source):
        rows = _data_set(source, key)
    elif is_saved(path_of(source)):
        rows = _saved(source, key)
    else:
        return None
    if not len(rows):
        raise _no_rows(source, key)
    return RowsOnDisk(source, rows)


def files_of(path: str, key: str) -> list[str]:
    """What a path names: itself, or what matches it as a pattern, by name."""
    if not _is_pattern(path):
        return [path]
    found = _matching_uris(path, key) if is_uri(path) else glob(path, recursive=True)
    if files := sorted(file for file in found if not Path(file).is_dir()):
        return files
    where = "" if is_uri(path) else f" in {Path.cwd()}"
    raise ConfigError(f"{key} ({path}): no file matches this pattern{where}. Correct it.")


def _kind_of(source: str, key: str) -> str:
    """The extension of a data file; refuses one that is not there or of an unknown kind."""
    if is_uri(source):
        is_folder, is_file, place = _looked_up(source, key)
        suffix = Path(source.partition("?")[0]).suffix  # behind it are the storage's options
    else:
        path = Path(source)
        is_folder, is_file, place = path.is_dir(), path.is_file(), str(path.absolute().parent)
        suffix = path.suffix
    known = ", ".join(extension[1:] for extension in DATA_FILES)
    if is_folder:
        raise ConfigError(
            f"{key} ({source}): this is a folder. Name the files in it ({known}), all of a kind by "
            f"a pattern like {source}/*.jsonl."
        )
    if suffix.lower() not in DATA_FILES:
        raise ConfigError(
            f"{key} ({source}): {suffix or 'no extension'} is not a kind of file that "
            f"raypo reads. Give a file of the kind {known}, or a Hugging Face data set id."
        )
    if not is_file:
        raise ConfigError(f"{key} ({source}): there is no such file in {place}.")
    return suffix.lower()


def check_data_set(source: PromptSource, *, key: str) -> None:
    """Refuse a data set, also one of `save_to_disk`, without the library that loads it."""
    if find_spec("datasets") is not None:
        return
    is_folder = is_saved(path_of(source))
    what = "a folder of save_to_disk" if is_folder else "a Hugging Face data set"
    is_meant = is_folder or isinstance(source, SourceEntry)
    raise ConfigError(
        f"{key} ({source}): {'' if is_meant else 'there is no such file, and '}{what} needs the "
        f"package datasets. {'' if is_meant else 'Correct the path, or '}pip install datasets on "
        f"every node."
    )


def is_saved(path: str) -> bool:
    """Whether a path is a folder of `save_to_disk`: of one data set, or of several splits."""
    return any((Path(path) / name).is_file() for name in ("state.json", "dataset_dict.json"))


def _jsonl(source: str, key: str, bad: BadRows) -> Iterator[Row]:
    def row_of(numbered: tuple[int, str]) -> Row:
        number, line = numbered
        where = f"{source}:{number}"
        try:
            return Row(where, _object(json.loads(line), where, key))
        except json.JSONDecodeError as error:
            raise _bad_row(where, f"{error.msg} at column {error.colno}", key) from None

    with _opened(source, key) as file:
        lines = enumerate(_decoded(file, source, key), start=1)
        yield from bad.each(row_of, ((number, line) for number, line in lines if line.strip()))


def _json(source: str, key: str, bad: BadRows) -> Iterator[Row]:
    def row_of(numbered: tuple[int, Any]) -> Row:
        where = f"{source}, row {numbered[0]}"
        return Row(where, _object(numbered[1], where, key))

    with _opened(source, key) as file:
        text = "".join(_decoded(file, source, key)) or "[]"
    try:
        rows = json.loads(text)
    except json.JSONDecodeError as error:
        problem = f"{error.msg} at line {error.lineno}, column {error.colno}"
        if _begins_with_an_object(text):
            remedy = "It has one object a line, as .jsonl files do: rename it to .jsonl."
            raise _unreadable(source, problem, key, remedy=remedy) from None
        raise _unreadable(source, problem, key) from None
    if not isinstance(rows, list):
        raise ConfigError(
            f"{key} ({source}): a json file must hold one list of rows, this holds "
            f"{type(rows).__name__}. Write a list, or one object a line in a .jsonl file."
        )
    yield from bad.each(row_of, enumerate(rows, start=1))


def _begins_with_an_object(text: str) -> bool:
    """Return whether the first line is a JSON object of its own, and lines follow it."""
    first, _, rest = text.strip().partition("\n")
    try:
        return isinstance(json.loads(first), dict) and bool(rest)
    except json.JSONDecodeError:
        return False


def _csv(source: str, key: str, bad: BadRows) -> Iterator[Row]:
    csv.field_size_limit(sys.maxsize)
    with _opened(source, key, newline="") as file:
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
                bad.add(_bad_row(f"{source}:{reader.line_num}", problem, key))
                continue
            yield Row(f"{source}:{reader.line_num}", dict(values))


def _parquet(source: str, key: str, _: BadRows) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    files, path = open_storage(source, key=key) if is_uri(source) else (None, source)
    try:
        with pq.ParquetFile(path, filesystem=files) as file:
            for batch in file.iter_batches(
                batch_size=1024, use_threads=False
            ):  # see storage.parquet
                for values in batch.to_pylist():
                    number += 1
                    yield Row(f"{source}, row {number}", values)
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(source, str(error), key) from None


def _saved(source: PromptSource, key: str) -> Any:
    check_data_set(source, key=key)
    from datasets import DatasetDict, load_from_disk

    entry = source if isinstance(source, SourceEntry) else SourceEntry(path=source)
    try:
        loaded = load_from_disk(entry.path)
    except Exception as error:  # of Arrow, of JSON, of files
        raise _unreadable(str(source), str(error), key, remedy="Save it again.") from error
    splits = list(map(str, loaded)) if isinstance(loaded, DatasetDict) else []
    if entry.config or (not splits and str(entry) != entry.path):
        raise ConfigError(
            f"{key} ({source}): a folder of save_to_disk has no configurations, and this one "
            f"{f'has the splits {splits}' if splits else 'no splits'}. Remove what it has not."
        )
    if not splits:
        return loaded
    if entry.split in splits:
        return loaded[entry.split]
    raise ConfigError(
        f"{key} ({source}): the folder has no split {entry.split}, it has {', '.join(splits)}. "
        f"Set {key}={{path: {entry.path}, split: {splits[0]}}}."
    )


def _data_set(source: PromptSource, key: str) -> Any:
    check_data_set(source, key=key)
    from datasets import load_dataset

    entry = source if isinstance(source, SourceEntry) else SourceEntry(path=source)
    try:
        return load_dataset(entry.path, entry.config, split=entry.split)
    except Exception as error:
        if isinstance(source, SourceEntry):
            raise ConfigError(
                f"{key} ({source}): this Hugging Face data set cannot be loaded: {error}. Correct "
                "its path, config or split."
            ) from error
        raise ConfigError(
            f"{key} ({source}): there is no such file, and the train split of a Hugging Face data "
            f"set of this name cannot be loaded: {error}. Correct the path or the name; another "
            f"split or a configuration is named by {key}={{path: {source}, config: NAME, split: "
            "NAME}."
        ) from error


def _reasoning_gym(source: str, key: str) -> Iterator[Row]:
    """Rows `prompt`, `answer` and `entry`, which is what the task's verifier asks for."""
    try:
        import reasoning_gym
    except ImportError as error:
        raise ConfigError(
            f"{key} ({source}): needs the package reasoning-gym ({error}). "
            "pip install 'raypo[math]' on every node."
        ) from None
    task, _, query = source.removeprefix(GYM).partition("?")
    try:
        given = {name: json.loads(value) for name, value in parse_qsl(query)}
        entries = reasoning_gym.create_dataset(task, **{"seed": 0} | given)  # its own is random
    except Exception as error:  # each task checks its arguments in its own way
        raise ConfigError(
            f"{key} ({source}): reasoning-gym refuses it: {error}. Write it like "
            f"{GYM}chain_sum?size=2000&seed=0, arguments as JSON."
        ) from error
    for number, entry in enumerate(entries, start=1):
        values = {"prompt": entry["question"], "answer": entry["answer"], "entry": entry}
        yield Row(f"{source}, row {number}", values)


_READERS = {".jsonl": _jsonl, ".json": _json, ".csv": _csv, ".parquet": _parquet}


def _looked_up(uri: str, key: str) -> tuple[bool, bool, str]:
    """Whether there is a folder or a file at a URI, and the folder that it would lie in."""
    from pyarrow.fs import FileType

    files, path = open_storage(uri, key=key)
    with _storage_answers(uri, key):
        kind = files.get_file_info(path).type
    return kind == FileType.Directory, kind == FileType.File, uri.rpartition("/")[0]


@contextmanager
def _storage_answers(uri: str, key: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        remedy = "Correct the URI, or allow access."
        raise _unreadable(uri, str(error), key, remedy=remedy) from error


def _is_pattern(path: str) -> bool:
    """Whether a path stands for the files that match it; `?` begins the options of a URI."""
    if is_uri(path):
        return "*" in path.partition("?")[0] and not path.startswith(GYM)
    return has_magic(path) and not Path(path).exists()


def _matching_uris(pattern: str, key: str) -> list[str]:
    """The files at a URI whose names match; folders are named in full."""
    from pyarrow.fs import FileSelector, FileType

    place, mark, options = pattern.partition("?")
    folder, _, name = place.rpartition("/")
    files, path = open_storage(folder + mark + options, key=key)
    with _storage_answers(pattern, key):
        found = files.get_file_info(FileSelector(path, allow_not_found=True))
    return [
        f"{folder}/{each.base_name}{mark}{options}"
        for each in found
        if each.type == FileType.File and fnmatch(each.base_name, name)
    ]


def _opened(source: str, key: str, newline: str | None = None) -> TextIO:
    if is_uri(source):
        files, path = open_storage(source, key=key)
        binary: Any = files.open_input_stream(path, compression=None, buffer_size=_BUFFER_BYTES)
    else:
        binary = open(source, "rb")  # noqa: SIM115 (closed with the text)
    return TextIOWrapper(binary, encoding="utf-8-sig", newline=newline)  # -sig: Excel's mark


def _decoded(file: Iterator[str], source: str, key: str) -> Iterator[str]:
    try:
        yield from file
    except UnicodeDecodeError as error:
        raise _unreadable(source, f"it is not UTF-8: {error}", key) from None
    except OSError as error:  # a storage that stops to answer
        raise _unreadable(source, str(error), key, remedy="Try again.") from error


def _object(value: Any, where: str, key: str) -> dict[str, Any]:
    if isinstance(value, dict):
        return value
    raise _bad_row(where, f"a row must be an object, this is {type(value).__name__}", key)


def _no_rows(source: PromptSource, key: str) -> ConfigError:
    return ConfigError(f"{key} ({source}): the file has no rows. Write prompts into it.")


def _unreadable(
    where: str, problem: str, key: str, *, remedy: str = "Correct the file."
) -> ConfigError:
    return ConfigError(f"{key} ({where}): cannot be read: {problem}. {remedy}")


def _bad_row(where: str, problem: str, key: str) -> RowError:
    return RowError(str(_unreadable(where, problem, key)))
