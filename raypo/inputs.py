"""Digests of a run's inputs besides its config: data, Python files and models.

A run records them in `inputs.json` when it starts, and a resume compares them before anything is
loaded. Files up to `LARGE_BYTES` are hashed completely, and so are local data files, because the
run reads them completely anyway. Larger files are sampled: the digest covers the size and evenly
spaced blocks. The blocks of a file total 16 MB, which takes less than a second to read. Reading a
whole 15 GB model took 12 s from a local disk, and would take more than a minute over a network.
"""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, BinaryIO

import xxhash

from raypo.config import AnyConfig, RecipeConfig, SourceEntry, is_import_path
from raypo.config.paths import VERIFIERS, is_uri
from raypo.config.sources import path_of
from raypo.custom.loader import source_files
from raypo.data.rows import GYM, files_of, is_data_set, is_saved
from raypo.data.verifiers_environment import factory_of
from raypo.rewards.scoring import WeightedSum
from raypo.storage.folder import open_storage
from raypo.storage.run_files import RunFiles, is_given

Files = dict[str, str]
"""Digests of a source's files, by file name. Empty if the files are unknown."""
Inputs = dict[str, dict[str, Files]]
"""Digests by config key, by source name in the config, and by file name."""

GIVEN = "given in Python"
"""Source name of rows that are passed to a trainer in Python."""
LARGE_BYTES = 64 << 20
"""Size in bytes above which files are sampled."""
_BLOCKS, _BLOCK_BYTES = 256, 64 << 10
_HUB_TIMEOUT_S = 5.0
_MISSING = "missing"

_digest_cache: dict[tuple[str, int, int, int], str] = {}
"""Digests of files that this process has hashed, by (path, size, mtime, ctime)."""


def inputs_of(
    config: AnyConfig | RecipeConfig, given: Mapping[str, Callable[..., Any]] | None = None
) -> Inputs:
    """Return the digests of all files that the config names.

    Args:
        config: Config of any recipe. Relative paths are resolved against the current folder.
        given: Functions that were passed in Python instead of as import paths, by config key.
    """
    inputs: Inputs = {}
    for key in config.paths:
        is_model = key.startswith(("model.", "reward.", "rollout.engine."))
        digest_files = _model_files if is_model else partial(_data_files, key)
        inputs[key] = {
            _source_name(source): digest_files(source) for source in values_at(config, key)
        }
    for key, spec in functions_of_user(config):
        inputs.setdefault(key, {})[spec] = _python_files(spec)
    for key, function in (given or {}).items():
        inputs[key] = {
            f"{source} in Python": _digest_source(function) for source in values_at(config, key)
        }
    return {key: sources for key, sources in inputs.items() if sources}


def functions_of_user(config: AnyConfig | RecipeConfig) -> Iterator[tuple[str, str]]:
    """Yield the config key and import path of each function or class that the config names."""
    for key in config.functions:
        for spec in values_at(config, key):
            if is_import_path(spec):
                yield key, spec


def changes(recorded: Inputs, current: Inputs, *, keys: Sequence[str] | None = None) -> list[str]:
    """Return a line like `key (source): file has changed` for each file that differs.

    Sources that occur in only one of the two mappings are skipped, because the comparison of
    configs reports them. Callbacks are recorded but not compared: they only observe a run, and
    users must be able to fix a callback that failed.

    Args:
        recorded: Inputs with which the run started.
        current: Current inputs of the config.
        keys: Config keys to compare. None means all except `callbacks`.
    """
    lines: list[str] = []
    for key, sources in current.items():
        for source, files in sources.items():
            recorded_files = recorded.get(key, {}).get(source)
            should_compare = key != "callbacks" if keys is None else key in keys
            if not recorded_files or not files or not should_compare:
                continue
            for name in sorted(recorded_files.keys() | files.keys()):
                if recorded_files.get(name) != files.get(name):
                    lines.append(
                        f"{key} ({source}): {name} {_describe_change(recorded_files, files, name)}"
                    )
    return lines


def recorded_inputs(files: RunFiles) -> Inputs:
    """Return the inputs with which a run or sweep started, or {} if its folder has no record."""
    return (files.inputs() or {}).get("inputs", {})


def record_inputs(
    config: AnyConfig | RecipeConfig,
    files: RunFiles,
    *,
    resumes: bool,
    given: Mapping[str, Callable[..., Any]] | None = None,
) -> list[str]:
    """Write the config's inputs to `inputs.json`, and return the changes since the last record.

    The resume checks have already rejected changes that `checkpoint.changed_inputs` does not
    accept. The file also records the accepted changes.

    Args:
        config: Config of any recipe.
        files: Folder of the run or sweep.
        resumes: Whether the run continues an earlier run. False means that the record of an earlier
            run in the folder is overwritten.
        given: See `inputs_of`.
    """
    current, record = inputs_of(config, given), (files.inputs() or {}) if resumes else {}
    recorded, accepted = record.get("inputs", {}), record.get("accepted", [])
    change_lines = changes(recorded, current)
    if change_lines:
        accepted = [*accepted, {"after_step": files.last_step(), "changes": change_lines}]
    for key, sources in current.items():  # keep recorded digests if the hub does not respond
        for source, digests in sources.items():
            sources[source] = digests or recorded.get(key, {}).get(source, {})
    content = {"inputs": current} | ({"accepted": accepted} if accepted else {})
    files.write_inputs(json.dumps(content, indent=2))
    return change_lines


def cached_digests() -> dict[tuple[str, int, int, int], str]:
    """Return the digests that this process has cached, for `add_digests` in other processes."""
    return dict(_digest_cache)


def add_digests(digests: Mapping[tuple[str, int, int, int], str]) -> None:
    """Add another process's digests to the cache. They apply to files that have not changed."""
    _digest_cache.update(digests)


def _describe_change(recorded: Files, current: Files, name: str) -> str:
    if name not in recorded or recorded[name] == _MISSING:
        return "is new"
    return "is gone" if current.get(name, _MISSING) == _MISSING else "has changed"


def values_at(config: Any, key: str) -> list[Any]:
    """Return the values at a dotted key. Lists and mappings along the key are expanded."""
    values = [config]
    for name in key.split("."):
        values = [value for parent in values for value in _items(getattr(parent, name, None))]
    return values


def _items(value: Any) -> list[Any]:
    if value is None:
        return []
    if isinstance(value, Mapping):
        return list(value.values())
    return list(value) if isinstance(value, list | tuple) else [value]


def _source_name(source: str | SourceEntry) -> str:
    """Return the source as the config names it, or `GIVEN` for rows that were passed in Python.

    The file names of such rows contain a hash, so they change with the rows.
    """
    return GIVEN if is_given(path_of(source)) else str(source)


def _model_files(path: str) -> Files:
    """Digest the files that transformers reads from a folder, or return the commit of a hub id."""
    folder = Path(path).expanduser()
    if not folder.exists():
        return _find_commit(path, "model")
    templates = folder / "additional_chat_templates"
    return _digests_below(folder, [*folder.glob("*"), *templates.glob("*")])


def _digests_below(folder: Path, files: Sequence[Path]) -> Files:
    """Digest files, except hidden files, Markdown and licenses."""
    names = {str(file.relative_to(folder)): file for file in sorted(files) if file.is_file()}
    return {
        name: _digest(file)
        for name, file in names.items()
        if not any(part.startswith(".") for part in Path(name).parts)
        and file.suffix != ".md"
        and not file.name.startswith("LICENSE")
    }


def _data_files(key: str, source: str | SourceEntry) -> Files:
    path = path_of(source)
    for prefix, package in ((GYM, "reasoning-gym"), (VERIFIERS, "verifiers")):
        if path.startswith(prefix):
            try:
                return {package: version(package)}
            except PackageNotFoundError:
                return {}
    folder = Path(path).expanduser()
    if is_saved(path) or (is_data_set(source) and folder.is_dir()):
        # `datasets` writes its cache files next to the data.
        files = [file for file in folder.rglob("*") if not file.name.startswith("cache-")]
        return _digests_below(folder, files)
    if is_data_set(source):
        return _find_commit(path, "dataset")
    return {
        "the data set" if is_given(name) else name: (
            _remote_digest(name, key) if is_uri(name) else _digest(Path(name), read_all=True)
        )
        for name in files_of(path, key)
    }


def _python_files(spec: str) -> Files:
    """Digest the file that defines a function, and the neighbouring files that it imports.

    raypo's own functions are omitted, because `summary.json` has raypo's version.
    """
    if spec.startswith(VERIFIERS):
        spec = factory_of(spec.removeprefix(VERIFIERS))
    source_paths = source_files(spec)
    if not source_paths or spec.startswith("raypo."):
        return {}
    return {os.path.relpath(file, source_paths[0].parent): _digest(file) for file in source_paths}


def _digest_source(function: Callable[..., Any]) -> Files:
    """Digest only the source of a function, because the rest of its script may change between runs.

    For a weighted sum, digest the source of each function and the weights.
    """
    if isinstance(function, WeightedSum):
        parts = [
            _python_files(part_function)
            if isinstance(part_function, str)
            else _digest_source(part_function)
            for part_function in function.functions
        ]
        weights = repr([float(weight) for weight in function.weights]).encode()
        return {
            **{
                f"{name} {index}": value
                for index, part_files in enumerate(parts)
                for name, value in part_files.items()
            },
            "its weights": _hash(iter([weights]), len(weights)),
        }
    while isinstance(function, partial):
        function = function.func
    is_named = inspect.isroutine(function) or inspect.isclass(function)
    try:
        text = inspect.getsource(function if is_named else type(function))
    except (OSError, TypeError):  # defined in an interactive console
        return {}
    return {"its source": _hash(iter([text.encode()]), len(text))}


def _digest(path: Path, *, read_all: bool = False) -> str:
    try:
        status = path.stat()
        name, size = os.path.abspath(path), status.st_size
        key = (name, size, status.st_mtime_ns, status.st_ctime_ns)
        if key not in _digest_cache:
            with path.open("rb") as file:
                _digest_cache[key] = _hash(_read_blocks(file, size, read_all=read_all), size)
        return _digest_cache[key]
    except OSError:  # the input checks report this with a better message
        return _MISSING


def _remote_digest(uri: str, key: str) -> str:
    system, path = open_storage(uri, key=key)
    try:
        with system.open_input_file(path) as file:
            return _hash(_read_blocks(file, file.size()), file.size())
    except OSError:
        return _MISSING


def _read_blocks(file: BinaryIO | Any, size: int, *, read_all: bool = False) -> Iterator[bytes]:
    """Yield all blocks of a file, or evenly spaced blocks of a large file, including both ends."""
    if read_all or size <= LARGE_BYTES:
        while block := file.read(1 << 20):
            yield block
        return
    for index in range(_BLOCKS):
        file.seek((size - _BLOCK_BYTES) * index // (_BLOCKS - 1))
        yield file.read(_BLOCK_BYTES)


def _hash(content: Iterator[bytes], size: int) -> str:
    digest = xxhash.xxh3_128()
    for block in content:
        digest.update(block)
    return f"{size} bytes, xxh3 {digest.hexdigest()}"


def _find_commit(name: str, kind: str) -> Files:
    """Return the commit of a hub id, from the hub or from this machine's cache."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.file_download import repo_folder_name

    if not constants.HF_HUB_OFFLINE:
        try:
            sha = HfApi().repo_info(name, repo_type=kind, timeout=_HUB_TIMEOUT_S).sha
            return {"commit": sha} if sha else {}
        except Exception:  # the type depends on the HTTP client. Try the cache, like transformers.
            pass
    try:
        folder = repo_folder_name(repo_id=name, repo_type=kind)
        return {"commit": Path(constants.HF_HUB_CACHE, folder, "refs", "main").read_text().strip()}
    except (OSError, ValueError):  # not cached, or not a hub id: the checks report this better
        return {}
