"""Folder of a run: a local folder, or a local staging folder that is synced to a URI."""

from __future__ import annotations

import math
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from raypo.config import ConfigError
from raypo.pending_work import moved
from raypo.storage.retries import retried
from raypo.storage.temporary import temporary_folder

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem

TEMPORARY = ".partial-"
"""Prefix of files and folders that are being written. They are never synced."""
STAGE = f"{TEMPORARY}checkpoint-"
"""Prefix of folders in which a checkpoint is written."""


def open_folder(storage_path: str, name: str) -> Folder:
    """Return the folder of one run. It is remote if the storage path has a scheme (s3://, file://).

    File names are relative to the folder, like `rollouts/step_00001.parquet`.
    """
    if "://" in storage_path:
        return RemoteFolder(storage_path, name)
    return Folder(Path(storage_path).expanduser().absolute() / name)


def below(location: str, *names: str) -> str:
    """Append names to a path or URI. The options of a URI stay at its end."""
    path, mark, options = _without_options(location)
    return "/".join([path.rstrip("/"), *names]) + mark + options


def parent_and_name(location: str) -> tuple[str, str]:
    """Split a path or URI into parent and name. The options of a URI stay with the parent."""
    path, mark, options = _without_options(location)
    parent, _, name = path.rstrip("/").rpartition("/")
    return parent + mark + options, name


def _without_options(location: str) -> tuple[str, str, str]:
    return location.partition("?") if "://" in location else (location, "", "")


def replace_file(path: Path, content: bytes) -> None:
    """Write a file atomically: readers see either the old content or the new content."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{TEMPORARY}{os.getpid()}-{path.name}")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def existing_parent(path: Path) -> Path:
    """Return a folder, or the nearest one above it that exists.

    Raises:
        ConfigError: this user may not look into a folder above it.
    """
    for folder in (path, *path.parents):
        try:
            if folder.is_dir():
                return folder
        except PermissionError as error:
            raise _not_readable(folder, error) from None
    return Path(path.anchor)


def link_tree(source: str | Path, target: str | Path) -> None:
    """Copy a local folder of immutable files, by hard links if the disk is the same."""
    shutil.copytree(source, target, copy_function=_link)


def finite(value: Any) -> Any:
    """Convert a value for JSON. Numbers that are not finite become null; arrays become lists."""
    if hasattr(value, "tolist"):  # numpy, torch
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Folder:
    """A local run folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        """Local folder that files are written to."""
        self.location = str(path)
        """Final location of the files: a path or a URI."""

    def local(self, name: str) -> Path:
        """Return the local path of a file or subfolder.

        Raises:
            ConfigError: a symbolic link leads out of this folder. Whoever may write to a shared
                folder could otherwise have other files of this user read or overwritten.
        """
        path, root = self.path / name, os.path.realpath(self.path)
        real = os.path.realpath(path)
        if real != root and not real.startswith(f"{root.rstrip('/')}/"):
            raise ConfigError(
                f"{path}: a symbolic link leads out of the run's folder, to {real}. Remove the "
                "link, or replace it by what it leads to."
            )
        return path

    def read(self, name: str) -> bytes | None:
        """Return the content of a file, or None if it does not exist."""
        try:
            return self.local(name).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except PermissionError as error:
            raise _not_readable(self.path / name, error) from None

    def check_writable(self) -> None:
        """Create the folder's parent, and refuse a folder that cannot be written to.

        A small file is written into the parent, the folder and each of its subfolders.

        Raises:
            ConfigError: one of them is a file, belongs to another user, or is on a full disk.
        """
        folder = parent = self.path.parent
        try:
            parent.mkdir(parents=True, exist_ok=True)
            for folder in (parent, self.path, *self.path.glob("*/")):
                if folder.exists():
                    with tempfile.TemporaryFile(dir=folder) as file:
                        file.write(b"x")
        except OSError as error:
            raise _not_writable(str(parent), f"{folder}: {error.strerror}") from None

    def stage(self, name: str) -> Path:
        """Return the local path of a file, ready for appending. Its folder is created."""
        path = self.local(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def names(self, below: str = "") -> list[str]:
        """Return the names of files and folders directly in a folder, sorted."""
        folder = self.local(below)
        try:
            return sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []
        except PermissionError as error:
            raise _not_readable(folder, error) from None

    def written_at(self, name: str) -> float | None:
        """Return a file's modification time in seconds since 1970, or None if there is no file."""
        path = self.local(name)
        return path.stat().st_mtime if path.exists() else None

    def delete(self, name: str) -> None:
        """Remove a file if it exists."""
        (self.local(os.path.dirname(name)) / os.path.basename(name)).unlink(missing_ok=True)

    def sync(self, wanted: Callable[[str], bool] = lambda name: True) -> None:
        """Copy changed files to the final location. A no-op here: files are written in place.

        Args:
            wanted: Filter of names directly in the folder. True copies the file or subfolder.
        """

    def remove(self, name: str = "", *, keep: Collection[str] = ()) -> None:
        """Remove the folder, or a file or subfolder of it, with its contents.

        Args:
            name: Name of the file or subfolder. Empty means the folder itself.
            keep: Names of existing files and subfolders to keep, and the folders that hold them.
        """
        prefix = f"{name}/" if name else ""
        if not any(f"{kept_name}/".startswith(prefix) for kept_name in keep):
            self._remove(name)
        elif name not in keep:
            for child in self.names(name):
                self.remove(f"{prefix}{child}", keep=keep)

    def _remove(self, name: str) -> None:
        path = self.path / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)

    def close(self) -> None:
        """Remove the local copies of a folder at a URI. A no-op here."""


class RemoteFolder(Folder):
    """A temporary local folder whose changed files are copied to a URI at each sync.

    Files that this process has written since the last sync are read locally. All other files are
    read from the URI, because another process may have replaced them.
    """

    def __init__(self, storage_path: str, name: str) -> None:
        super().__init__(temporary_folder())
        self._file_system, root = open_storage(storage_path, key="storage_path")
        self._root = f"{root.rstrip('/')}/{name}"
        self.location = below(storage_path, name)
        self._synced: dict[str, tuple[int, int]] = {}  # name -> (mtime_ns, bytes)
        self._made: set[str] = set()  # folders that exist at the URI
        self._cleaner = weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)

    @override
    def read(self, name: str) -> bytes | None:
        path = self.path / name
        is_synced = path.exists() and self._synced.get(name) == _stamp(path)
        staged = None if is_synced else super().read(name)
        return staged if staged is not None else self._download(name)

    @override
    def check_writable(self) -> None:
        """Write a small file to the URI and remove it.

        Raises:
            ConfigError: this failed.
        """
        import pyarrow as pa

        name = self._remote(f"{TEMPORARY}{os.urandom(8).hex()}")
        try:
            self._file_system.create_dir(self._root, recursive=True)
            with self._file_system.open_output_stream(name) as stream:
                stream.write(b"x")
            self._file_system.delete_file(name)
        except (OSError, pa.ArrowException) as error:
            raise _not_writable(parent_and_name(self.location)[0], str(error)) from None

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
    def sync(self, wanted: Callable[[str], bool] = lambda name: True) -> None:
        for path in self._complete_files():
            name = path.relative_to(self.path).as_posix()
            if not wanted(name.partition("/")[0]):
                continue  # and may be gone: another thread renames the files of a model it writes
            if self._synced.get(name) == (stamp := _stamp(path)):
                continue
            target = self._remote(name)
            if (folder := target.rpartition("/")[0]) not in self._made:
                create = partial(self._file_system.create_dir, folder, recursive=True)
                retried(create, f"creating {folder}")
                self._made.add(folder)
            copy_to(path, target, self._file_system)
            self._synced[name] = stamp

    @override
    def _remove(self, name: str) -> None:
        from pyarrow.fs import FileType

        super()._remove(name)
        self.path.mkdir(exist_ok=True)
        self._synced.clear()
        self._made.clear()
        kind = self._file_system.get_file_info(self._remote(name)).type
        if kind == FileType.Directory:
            self._file_system.delete_dir(self._remote(name))
        elif kind == FileType.File:
            self._file_system.delete_file(self._remote(name))

    @override
    def close(self) -> None:
        """Remove the local copies. Content that was not synced is lost.

        If a checkpoint is staged, Ray Train may still upload it, so the folder stays. It is removed
        by a later process (see `raypo.storage.temporary`).
        """
        if not any(self.path.glob(f"{STAGE}*")):
            shutil.rmtree(self.path, ignore_errors=True)
            self._synced.clear()

    def _complete_files(self) -> Iterator[Path]:
        # os.walk ignores folders that are removed meanwhile, such as an uploaded checkpoint.
        for folder, folders, names in os.walk(self.path):
            folders[:] = sorted(
                folder_name for folder_name in folders if not folder_name.startswith(TEMPORARY)
            )
            paths = (Path(folder, name) for name in sorted(names) if not name.startswith(TEMPORARY))
            yield from (path for path in paths if path.is_file())  # a symlink may be broken

    def _remote(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def _download(self, name: str) -> bytes | None:
        try:
            with self._file_system.open_input_stream(self._remote(name)) as stream:
                return stream.read()
        except FileNotFoundError:
            return None


def copy_to(
    path: Path,
    target: str,
    file_system: FileSystem,
    *,
    tell: Callable[[str], None] = lambda message: None,
) -> None:
    """Copy a local file to a file system, with several attempts.

    Args:
        path: The local file.
        target: Path on the file system. Its folder exists.
        file_system: The file system.
        tell: Callback for a message about each failed attempt.

    Raises:
        StorageError: all attempts failed.
    """
    from pyarrow.fs import LocalFileSystem, copy_files

    def copy() -> None:
        copy_files(str(path), target, LocalFileSystem(), file_system)

    retried(copy, f"copying {path.name} to {target}", tell=tell)
    moved()


def open_storage(uri: str, *, key: str) -> tuple[FileSystem, str]:
    """Return the file system of a URI, and the path in it. `key` is the config key for messages.

    Raises:
        ConfigError: pyarrow does not know the scheme, or cannot open the URI.
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


def _not_writable(storage_path: str, reason: str) -> ConfigError:
    return ConfigError(
        f"storage_path ({storage_path}): a run writes its files there, but a small file could not "
        f"be written ({reason}). Give a folder or URI that you may write to, with free space."
    )


def _not_readable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"{path}: this user may not read it ({error.strerror or error}). Give a folder that you "
        "may read and write, or ask its owner for access."
    )


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # a different disk
        shutil.copy2(source, target)


def _stamp(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_mtime_ns, status.st_size
