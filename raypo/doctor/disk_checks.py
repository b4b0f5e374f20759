"""Checks of folders and storage: space, speed, and the operations that a run relies on."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from raypo.cluster.hardware import GB
from raypo.cluster.machine import ray_temporary_folder
from raypo.config import AnyConfig
from raypo.config.paths import is_uri
from raypo.doctor.result import Check, Result, fault, ok, warning
from raypo.models.compiled import FOLDERS, cache_folder
from raypo.storage.folder import TEMPORARY, existing_parent, open_storage

TRIAL_BYTES = 4 << 20
SLOW_S = 2.0
"""Seconds to write `TRIAL_BYTES` above which storage counts as slow."""
LEAST_FREE_BYTES = 10**9
RAY_FULL = 0.95
"""Used share of a disk above which Ray neither spills objects nor maps new ones there (2.60)."""
FREE_SPACE = "Remove what is not needed there, or use another disk"


def disk_checks(config: AnyConfig | None, checkpoint_bytes: Callable[[], int]) -> list[Check]:
    """Return the checks of `storage_path`, Ray's folder and the folders of compiled code.

    Args:
        config: Config of the run. None means that there is no `storage_path` to check.
        checkpoint_bytes: Function that returns the predicted size of a run's checkpoints.
    """
    checks = [
        Check("Ray's files", _ray_folder),
        Check("compiled code", _caches),
    ]
    if config is not None:
        path = config.storage_path
        function = partial(uri, path) if is_uri(path) else partial(_storage, path, checkpoint_bytes)
        checks.insert(0, Check("storage_path", function))
    return checks


def _storage(path: str, checkpoint_bytes: Callable[[], int]) -> Result:
    fewer = ", or keep fewer checkpoints (checkpoint.keep)"
    location = Path(path).expanduser().absolute()
    return folder(location, "storage_path", alternative=fewer, needed=checkpoint_bytes)


def _ray_folder() -> Result:
    path = ray_temporary_folder()
    result = folder(path, "RAY_TMPDIR")
    usage = shutil.disk_usage(existing_parent(path))
    if result.status == "ok" and usage.used > RAY_FULL * (usage.used + usage.free):
        return warning(
            f"{path}: {usage.used / (usage.used + usage.free):.0%} of the disk is used",
            f"Above {RAY_FULL:.0%} Ray refuses to spill objects, which ends a run whose objects "
            "do not fit into memory.",
            f"{FREE_SPACE} (RAY_TMPDIR).",
        )
    return result


def _caches() -> Result:
    result = ok("")
    for variable, name in FOLDERS.items():
        path = Path(os.environ.get(variable) or cache_folder() / name)
        result = folder(path, variable)
        if result.status != "ok":
            return replace(result, status="warning", meaning="Every start may recompile.")
    return result


def folder(
    path: Path, setting: str, *, alternative: str = "", needed: Callable[[], int] = lambda: 0
) -> Result:
    """Check space, speed, atomic renames and listings of a folder or its nearest existing parent.

    Args:
        path: The folder. It is not created.
        setting: Key or environment variable that names the folder.
        alternative: Further remedy if it lacks space, after a comma.
        needed: Function that returns the bytes that will be written there.
    """
    cannot = "A run cannot write its files there."
    free_space = f"{FREE_SPACE} ({setting}){alternative}."
    other_folder = f"Make it a writable folder, or set {setting} to another one."
    existing = existing_parent(path)
    if existing != path and path.exists():
        return fault(f"{path}: is a file", cannot, other_folder)
    usage = shutil.disk_usage(existing)
    try:
        with tempfile.TemporaryDirectory(prefix=f"{TEMPORARY}doctor-", dir=existing) as name:
            write_s, problem = _try_files(Path(name))
    except OSError as error:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        return fault(
            f"{path}: writing a file failed ({error.strerror or error})",
            cannot,
            free_space if is_full else other_folder,
        )
    if problem:
        return fault(
            f"{path}: {problem}",
            "Readers could see half-written files.",
            f"Use another file system ({setting}).",
        )
    speed = f"{TRIAL_BYTES / 1e6 / write_s:.3g} MB/s with fsync"
    observed = f"{path}: {usage.free / GB:.3g} GB free, {speed}"
    needed_bytes = needed()
    if not usage.total:  # some network file systems report that they have 0 bytes
        observed = f"{path}: {speed}; its free space is unknown"
    elif usage.free < needed_bytes:
        meaning = f"About {needed_bytes / GB:.2g} GB are needed; the run would fill the disk."
        return fault(observed, meaning, free_space)
    elif usage.free < LEAST_FREE_BYTES:
        return warning(observed, "A run's logs and checkpoints may fill the disk.", free_space)
    if write_s > SLOW_S:
        return warning(observed, "Checkpoints and logs are slow to write.", "Use a faster disk.")
    return ok(observed)


def _try_files(folder: Path) -> tuple[float, str]:
    """Write, replace, list and read a file. Return the seconds of the write, and any problem."""
    content, begin = os.urandom(TRIAL_BYTES), time.perf_counter()
    new, path = folder / "new", folder / "file"
    with new.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    write_s = time.perf_counter() - begin
    path.write_bytes(b"old")
    os.replace(new, path)
    if [entry.name for entry in folder.iterdir()] != ["file"]:
        return write_s, "a renamed file is listed under its old name"
    if path.read_bytes() != content:
        return write_s, "a file that replaced another one has the old content"
    return write_s, ""


def uri(location: str) -> Result:
    """Check that storage at a URI can be written, replaced, listed, read and deleted.

    Raises:
        ConfigError: pyarrow cannot open it.
    """
    import pyarrow as pa
    from pyarrow.fs import FileSelector

    storage, root = open_storage(location, key="storage_path")
    below = f"{root.rstrip('/')}/{TEMPORARY}doctor-{os.urandom(8).hex()}"
    name, content = f"{below}/file", os.urandom(TRIAL_BYTES)
    problem, begin = "", time.perf_counter()
    try:
        storage.create_dir(below, recursive=True)
        for written in (b"old", content):
            with storage.open_output_stream(name) as stream:
                stream.write(written)
        write_s = time.perf_counter() - begin
        if name not in (info.path for info in storage.get_file_info(FileSelector(below))):
            problem = "a file is not listed after it was written"
        with storage.open_input_stream(name) as stream:
            if stream.read() != content:
                problem = "a file that was overwritten is read with its old content"
        storage.delete_dir(below)
        below = ""
    except (OSError, pa.ArrowException) as error:
        return fault(
            f"{location}: {error}",
            "A run cannot keep its files there.",
            "Use a URI with permission to list, read, write and delete, and check its credentials.",
        )
    finally:
        if below:
            with suppress(OSError, pa.ArrowException):
                storage.delete_dir(below)
    if problem:
        late = "Resuming might not find the last checkpoint."
        return fault(f"{location}: {problem}", late, "Use strongly consistent storage, like S3.")
    observed = f"{location}: {TRIAL_BYTES / 1e6 / write_s:.3g} MB/s"
    if write_s > SLOW_S:
        slow = "Every step that uploads metrics or a checkpoint waits for it."
        return warning(observed, slow, "Use storage in the same region, or a local storage_path.")
    return ok(observed)
