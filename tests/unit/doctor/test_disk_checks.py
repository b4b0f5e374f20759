"""Folders and storage with planted faults: full, slow, failing, blocked, late, stale."""

import errno
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import namedtuple
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.local import LocalFileSystem
from pyarrow.fs import FSSpecHandler, PyFileSystem

from raypo.config import PPOConfig
from raypo.doctor import disk_checks, machine_checks
from raypo.doctor.disk_checks import folder, uri
from raypo.doctor.machine_checks import machine_checks as checks_of
from raypo.doctor.result import Check, run_checks
from tests.small_disk import small_disk

Usage = namedtuple("Usage", ["total", "used", "free"])


def test_a_healthy_folder_is_measured_and_left_as_it_was(tmp_path: Path):
    result = folder(tmp_path / "runs" / "deep", "TMPDIR")
    assert result.status == "ok"
    assert result.found.startswith(f"{tmp_path}/runs/deep: ")
    assert "GB free" in result.found
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_place_of_a_folder(tmp_path: Path):
    (tmp_path / "runs").touch()
    result = folder(tmp_path / "runs", "TMPDIR")
    assert (result.status, result.found) == ("fault", f"{tmp_path}/runs: is a file")
    assert result.remedy == "Make it a writable folder, or set TMPDIR to another one."


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs without any free space."""
    with small_disk(tmp_path / "full", size="64k") as path:
        yield path


def test_a_full_disk(full_disk: Path):
    result = folder(full_disk, "TMPDIR")
    assert result.status == "fault"
    assert result.found == f"{full_disk}: writing a file failed (No space left on device)"
    assert result.remedy == f"{disk_checks.FREE_SPACE} (TMPDIR)."
    assert list(full_disk.iterdir()) == []


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.ENOSPC, "Remove what is not needed there"),
        (errno.EDQUOT, "Remove what is not needed there"),
        (errno.EACCES, "Make it a writable folder, or set TMPDIR to another one."),
        (errno.EROFS, "Make it a writable folder, or set TMPDIR to another one."),
    ],
)
def test_free_space_is_advised_only_if_a_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, remedy: str
):
    def failing(folder: Path) -> Any:
        raise OSError(number, "planted")

    monkeypatch.setattr(disk_checks, "_try_files", failing)
    result = folder(tmp_path, "TMPDIR")
    assert (result.status, result.found) == (
        "fault",
        f"{tmp_path}: writing a file failed (planted)",
    )
    assert result.remedy.startswith(remedy)


def test_a_file_system_that_renames_wrongly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(disk_checks.os, "replace", lambda old, new: None)
    result = folder(tmp_path, "TMPDIR")
    assert result.status == "fault"
    assert result.meaning == "Readers could see half-written files."
    assert result.remedy == "Use another file system (TMPDIR)."


def test_a_quota_that_ends_a_write(tmp_path: Path):
    """The limit of a file's size is real, so it needs a process of its own."""
    code = (
        "import resource, signal, sys, pathlib; from raypo.doctor.disk_checks import folder;"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000));"
        "result = folder(pathlib.Path(sys.argv[1]), 'TMPDIR');"
        "print(result.status, result.found)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"fault {tmp_path}: writing a file failed (File too large)\n"


def test_a_disk_without_room_for_the_checkpoints(tmp_path: Path):
    free = shutil.disk_usage(tmp_path).free
    assert folder(tmp_path, "TMPDIR", needed=lambda: free // 2).status == "ok"
    result = folder(tmp_path, "TMPDIR", needed=lambda: 2 * free)
    assert result.status == "fault"
    assert "are needed" in result.meaning


def test_little_space_is_no_fault_unless_the_run_needs_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    usage = Usage(10**10, 10**10 - 10**8, 10**8)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    assert folder(tmp_path, "TMPDIR").status == "warning"
    assert folder(tmp_path, "TMPDIR", needed=lambda: 10**9).status == "fault"
    usage = Usage(0, 0, 0)  # of some network file systems
    result = folder(tmp_path, "TMPDIR", needed=lambda: 10**9)
    assert (result.status, "free space is unknown" in result.found) == ("ok", True)


def test_a_slow_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(disk_checks, "SLOW_S", 0.0)
    assert folder(tmp_path, "TMPDIR").status == "warning"


def test_rays_disk_above_the_share_at_which_it_stops_to_spill(monkeypatch: pytest.MonkeyPatch):
    with tempfile.TemporaryDirectory(dir="/tmp") as path:  # short, because of Ray's sockets
        monkeypatch.setenv("RAY_TMPDIR", path)
        assert disk_checks._ray_folder().status == "ok"
        full = Usage(1000 * 10**9, 960 * 10**9, 40 * 10**9)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
        result = disk_checks._ray_folder()
    assert (result.status, result.found) == ("warning", f"{path}/ray: 96% of the disk is used")


def test_rays_folder_whose_sockets_would_have_too_long_a_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    deep = tmp_path / ("long" * 25)
    deep.mkdir()
    monkeypatch.setenv("RAY_TMPDIR", str(deep))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)

    def by_name(node: str) -> dict[str, Check]:
        return {check.name: check for check in checks_of(None, num_nodes=1, node=node)}

    (result,) = run_checks([by_name("")["Ray"]])
    assert result.status == "fault"
    assert result.found.startswith(f"RAY_TMPDIR ({deep}): the path is ")
    assert "Ray" not in by_name("10.0.0.1")  # it runs there
    (result,) = run_checks([by_name("10.0.0.1")["Ray's files"]])
    assert result.status != "fault"


def test_a_cluster_that_is_gone_is_a_fault_without_cluster_too(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    first, *_ = checks_of(None, num_nodes=1)
    (result,) = run_checks([first])
    assert (result.check, result.status) == ("Ray", "fault")
    assert result.found.startswith("RAY_ADDRESS (127.0.0.1:1): nothing listens there")
    monkeypatch.setenv("RAY_ADDRESS", "")  # counts as unset
    assert run_checks([first])[0].found == "a local Ray can start"


def test_this_machine_is_asked_by_the_checks_within_their_limits(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(machine_checks, "this_machine", None)
    checks = {check.name: check for check in checks_of(None, num_nodes=1)}
    (result,) = run_checks([checks["shared memory"]])
    assert result.found.startswith("TypeError")


class Storage(LocalFileSystem):
    """Storage with a planted fault."""

    cachable = False

    def __init__(self, fault: str, release: threading.Event) -> None:
        super().__init__(auto_mkdir=True)
        self.fault, self.release = fault, release

    def _open(self, path: str, mode: str = "rb", block_size: Any = None, **kwargs: Any) -> Any:
        if "w" in mode and self.fault == "fails":
            raise OSError(5, "the storage does not answer")
        if "r" in mode and self.fault == "unread":
            raise OSError(5, "the storage does not answer")
        if "w" in mode and self.fault == "slow":
            time.sleep(0.3)
        if self.fault == "blocked":
            self.release.wait(60.0)
        if mode == "wb" and self.fault == "stale" and Path(path).exists():
            path = f"{path}.lost"
        return super()._open(path, mode, block_size=block_size, **kwargs)

    def find(self, path: str, *args: Any, **kwargs: Any) -> Any:
        return {} if self.fault == "late" else super().find(path, *args, **kwargs)


@pytest.fixture
def release() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, release: threading.Event) -> Any:
    """Return a function that plants a fault into the storage of s3://bucket/runs."""

    def plant(fault: str) -> None:
        storage = PyFileSystem(FSSpecHandler(Storage(fault, release)))
        monkeypatch.setattr(
            disk_checks, "open_storage", lambda uri, *, key: (storage, str(tmp_path / "runs"))
        )

    return plant


def test_storage_that_does_what_it_should(stored: Any, tmp_path: Path):
    stored("none")
    result = uri("s3://bucket/runs")
    assert (result.status, list((tmp_path / "runs").iterdir())) == ("ok", [])


@pytest.mark.parametrize(
    ("fault", "found"),
    [
        ("fails", "s3://bucket/runs: [Errno 5] the storage does not answer"),
        ("unread", "s3://bucket/runs: [Errno 5] the storage does not answer"),
        ("late", "s3://bucket/runs: a file is not listed after it was written"),
        ("stale", "s3://bucket/runs: a file that was overwritten is read with its old content"),
    ],
)
def test_storage_with_a_fault(stored: Any, fault: str, found: str, tmp_path: Path):
    stored(fault)
    result = uri("s3://bucket/runs")
    assert result.status == "fault"
    assert found in result.found
    assert list((tmp_path / "runs").iterdir()) == []


def test_slow_storage(stored: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(disk_checks, "SLOW_S", 0.5)
    stored("slow")
    assert uri("s3://bucket/runs").status == "warning"


def test_storage_that_blocks_is_given_up(stored: Any):
    stored("blocked")
    (result,) = run_checks([Check("storage_path", partial(uri, "s3://bucket/runs"), 1.0)])
    assert (result.status, result.is_hung) == ("fault", True)


def test_a_uri_of_an_unknown_kind():
    (result,) = run_checks([Check("storage_path", partial(uri, "nowhere://bucket/runs"))])
    assert result.status == "fault"
    assert result.found.startswith("storage_path (nowhere://bucket/runs): this storage cannot be")


def test_a_storage_path_is_checked_by_its_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked: list[str] = []
    monkeypatch.setattr(disk_checks, "uri", lambda path: asked.append(path))
    values = {
        "name": "run",
        "model": {"policy": str(tmp_path)},
        "data": {"prompts": "rows.jsonl"},
        "reward": {"function": "exact"},
    }
    for path in (str(tmp_path / "runs"), "s3://bucket/runs"):
        config = PPOConfig.parse(values | {"storage_path": path})
        first, *_ = disk_checks.disk_checks(config, lambda: 0)
        assert first.name == "storage_path"
        result = first.function()
    assert result is None
    assert asked == ["s3://bucket/runs"]
