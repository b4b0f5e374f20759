"""A run's folder where files are written: the folder itself, or a stage that is synced to a URI."""

from __future__ import annotations

import math
import os
import shutil
import tempfile
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from raypo.config import ConfigError

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem

TEMPORARY = ".partial-"
"""Names of files that are being written start so; they are never synced."""


def open_folder(storage_path: str, name: str) -> Folder:
    """The folder of one run; a storage path with a scheme (s3://, file://) is remote.

    Files are known by their names below it, like `rollouts/step_00001.parquet`.
    """
    if "://" in storage_path:
        return RemoteFolder(storage_path, name)
    return Folder(Path(storage_path).expanduser().absolute() / name)


def below(location: str, *names: str) -> str:
    """The path or URI of something in a folder; the options of a URI stay at its end."""
    path, mark, options = _without_options(location)
    return "/".join([path.rstrip("/"), *names]) + mark + options


def parent_and_name(location: str) -> tuple[str, str]:
    """The folder that a path or URI lies in, and its own name there."""
    path, mark, options = _without_options(location)
    parent, _, name = path.rstrip("/").rpartition("/")
    return parent + mark + options, name


def _without_options(location: str) -> tuple[str, str, str]:
    return location.partition("?") if "://" in location else (location, "", "")


def replace_file(path: Path, content: bytes) -> None:
    """Write a file so that a reader sees the old content or the new, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{TEMPORARY}{os.getpid()}-{path.name}")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def link_tree(source: str | Path, target: str | Path) -> None:
    """Copy a local folder whose files never change: on one disk by hard links."""
    shutil.copytree(source, target, copy_function=_link)


def finite(value: Any) -> Any:
    """A value as JSON knows it: what is not a finite number is null, arrays are lists."""
    if hasattr(value, "tolist"):  # numpy, torch
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Folder:
    """The run folder itself."""

    def __init__(self, path: Path) -> None:
        self.path = path
        """Where files are written on this machine."""
        self.location = str(path)
        """Where they end up: a path or a URI."""

    def read(self, name: str) -> bytes | None:
        """The content of a file; None where there is none."""
        try:
            return (self.path / name).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def stage(self, name: str) -> Path:
        """The file's path, with what it holds so far and its folder made."""
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def names(self, below: str = "") -> list[str]:
        """Names of files and folders directly below a folder, sorted."""
        folder = self.path / below
        return sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []

    def written_at(self, name: str) -> float | None:
        """When a file was last written, in seconds since 1970; None where there is none."""
        path = self.path / name
        return path.stat().st_mtime if path.exists() else None

    def delete(self, name: str) -> None:
        """Remove one file."""
        (self.path / name).unlink(missing_ok=True)

    def sync(self) -> None:
        """Copy what has changed to where it ends up: here files are written in place."""

    def remove(self) -> None:
        """Remove the folder and all in it."""
        if self.path.exists():
            shutil.rmtree(self.path)


class RemoteFolder(Folder):
    """A temporary local folder whose changed files are copied to a URI at each sync.

    What this process has written is read from the temporary folder, all else at the URI.
    """

    def __init__(self, storage_path: str, name: str) -> None:
        super().__init__(Path(tempfile.mkdtemp(prefix="raypo-run-")))
        self._file_system, root = open_storage(storage_path, key="storage_path")
        self._root = f"{root.rstrip('/')}/{name}"
        self.location = below(storage_path, name)
        self._synced: dict[str, tuple[int, int]] = {}  # name -> (mtime_ns, bytes)
        self._made: set[str] = set()  # folders that exist at the URI
        self._cleaner = weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)

    @override
    def read(self, name: str) -> bytes | None:
        staged = super().read(name)
        return staged if staged is not None else self._download(name)

    @override
    def stage(self, name: str) -> Path:
        path = super().stage(name)
        if not path.exists() and (content := self._download(name)) is not None:
            path.write_bytes(content)
            self._synced[name] = _stamp(path)
        return path

    @override
    def names(self, below: str = "") -> list[str]:
        from pyarrow.fs import FileSelector

        selector = FileSelector(self._remote(below), allow_not_found=True)
        remote = {info.base_name for info in self._file_system.get_file_info(selector)}
        return sorted(remote | set(super().names(below)))

    @override
    def written_at(self, name: str) -> float | None:
        written = self._file_system.get_file_info(self._remote(name)).mtime
        return None if written is None else written.timestamp()

    @override
    def delete(self, name: str) -> None:
        super().delete(name)
        self._synced.pop(name, None)
        if self._file_system.get_file_info(self._remote(name)).is_file:
            self._file_system.delete_file(self._remote(name))

    @override
    def sync(self) -> None:
        from pyarrow.fs import LocalFileSystem, copy_files

        for path in sorted(self.path.rglob("*")):
            if path.name.startswith(TEMPORARY) or not path.is_file():
                continue
            name, stamp = path.relative_to(self.path).as_posix(), _stamp(path)
            if self._synced.get(name) == stamp:
                continue
            target = self._remote(name)
            folder = target.rpartition("/")[0]
            if folder not in self._made:
                self._file_system.create_dir(folder, recursive=True)
                self._made.add(folder)
            copy_files(str(path), target, LocalFileSystem(), self._file_system)
            self._synced[name] = stamp

    @override
    def remove(self) -> None:
        from pyarrow.fs import FileType

        super().remove()
        self.path.mkdir()
        self._synced.clear()
        self._made.clear()
        if self._file_system.get_file_info(self._root).type == FileType.Directory:
            self._file_system.delete_dir(self._root)

    def _remote(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def _download(self, name: str) -> bytes | None:
        try:
            with self._file_system.open_input_stream(self._remote(name)) as stream:
                return stream.read()
        except FileNotFoundError:
            return None


def open_storage(uri: str, *, key: str) -> tuple[FileSystem, str]:
    """The file system of a URI and the path in it; `key` names the URI in messages.

    Raises:
        ConfigError: pyarrow does not know the scheme, or cannot open it.
    """
    import pyarrow as pa
    from pyarrow.fs import FileSystem

    try:
        return FileSystem.from_uri(uri)
    except (pa.ArrowException, OSError, ImportError) as error:
        raise ConfigError(
            f"{key} ({uri}): this storage cannot be opened: {error}. "
            "Give a local path, or a URI that pyarrow opens (s3://, gs://, abfs://, hdfs://)."
        ) from error


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another disk
        shutil.copy2(source, target)


def _stamp(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_mtime_ns, status.st_size
