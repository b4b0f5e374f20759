"""A disk that is full and storage that fails are told, and tried again a few times."""

import json
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from fsspec.implementations.local import LocalFileSystem
from pyarrow.fs import FSSpecHandler, PyFileSystem

from raypo.learner.state import write_tensors
from raypo.storage import retries
from raypo.storage.checkpoints import damages, write_manifest
from raypo.storage.retries import StorageError, retried
from raypo.storage.run_files import RunFiles


class Failing(LocalFileSystem):
    """Storage that refuses some writes."""

    cachable = False

    def __init__(self, failures: int) -> None:
        super().__init__(auto_mkdir=True)
        self.failures = failures

    def _open(self, path: str, mode: str = "rb", block_size: Any = None, **kwargs: Any) -> Any:
        if "w" in mode and self.failures:
            self.failures -= 1
            raise OSError(5, "the storage does not answer")
        return super()._open(path, mode, block_size=block_size, **kwargs)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(retries, "WAITS_S", (0.0, 0.0, 0.0))
    return []


@pytest.fixture
def small_disk() -> Iterator[None]:
    """No file of this process may have more than 100,000 bytes; a write of more raises EFBIG."""
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    signal.signal(signal.SIGXFSZ, before)


def storage_of(run: RunFiles, failures: int) -> Failing:
    storage = Failing(failures)
    run._folder._file_system = PyFileSystem(FSSpecHandler(storage))  # type: ignore[attr-defined]
    return storage


def test_a_uri_that_fails_three_times_gets_its_files_at_the_fourth(
    tmp_path: Path, told: list[str], caplog: pytest.LogCaptureFixture
):
    run = RunFiles(f"file://{tmp_path}", "run")
    storage = storage_of(run, failures=3)
    run.append_metrics(1, {"x": 1.0})
    run.sync()
    assert storage.failures == 0
    assert json.loads((tmp_path / "run" / "metrics.jsonl").read_text()) == {"step": 1, "x": 1.0}
    assert caplog.text.count("copying metrics.jsonl to") == 3
    assert "the storage does not answer" in caplog.text


def test_a_uri_that_never_answers_is_given_up(tmp_path: Path, told: list[str]):
    run = RunFiles(f"file://{tmp_path}", "run")
    storage = storage_of(run, failures=99)
    run.append_metrics(1, {"x": 1.0})
    with pytest.raises(StorageError, match=r"metrics.jsonl to .* failed 4 times .* not answer"):
        run.sync()
    assert storage.failures == 95


def test_a_state_that_does_not_fit_is_told_and_written_once_there_is_room(
    tmp_path: Path, told: list[str], small_disk: None
):
    path, state = tmp_path / "policy_0.pt", {"weight": torch.arange(50_000)}

    def tell(message: str) -> None:
        told.append(message)
        if len(told) == 2:  # somebody makes room
            _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))

    retried(lambda: write_tensors(path, state), "writing the checkpoint of step 3", tell=tell)
    assert len(told) == 2
    assert told[0].startswith("warning: writing the checkpoint of step 3 failed ([Errno 27] File")
    assert torch.equal(torch.load(path)["weight"], state["weight"])


def test_small_files_of_a_checkpoint_and_the_timeline_are_tried_again(
    tmp_path: Path, told: list[str], monkeypatch: pytest.MonkeyPatch
):
    opened, failures = Path.open, [OSError(28, "No space left on device")] * 2

    def failing(path: Path, mode: str = "r", *args: Any, **named: Any) -> Any:
        if mode in ("w", "a") and failures:
            raise failures.pop()
        return opened(path, mode, *args, **named)

    (tmp_path / "a.pt").write_bytes(b"state")
    monkeypatch.setattr(Path, "open", failing)
    write_manifest(tmp_path, 0, 1, {})
    assert (failures, damages(tmp_path)) == ([], [])
    failures.append(OSError(28, "No space left on device"))
    files = RunFiles(str(tmp_path), "run")
    files.append_timeline("worker", {"step": 1})
    assert (failures, files.timeline()) == ([], [{"step": 1}])


def test_a_line_of_the_timeline_that_was_cut_by_a_full_disk_is_whole_at_the_next_attempt(
    tmp_path: Path, told: list[str], monkeypatch: pytest.MonkeyPatch
):
    opened, failures = Path.open, [OSError(28, "No space left on device")] * 2

    @contextmanager
    def cutting(path: Path, *args: Any, **named: Any) -> Iterator[Any]:
        with opened(path, *args, **named) as file:
            if failures:
                file.write('{"step": ')
                raise failures.pop()
            yield file

    files = RunFiles(str(tmp_path), "run")
    files.append_timeline("worker", {"step": 1})
    monkeypatch.setattr(Path, "open", cutting)
    files.append_timeline("worker", {"step": 2})
    files.append_timeline("worker", {"step": 3})
    monkeypatch.undo()
    assert files.timeline() == [{"step": 1}, {"step": 2}, {"step": 3}]


def test_a_line_of_metrics_that_was_cut_by_a_full_disk_is_whole_at_the_next_attempt(
    tmp_path: Path, told: list[str], small_disk: None, monkeypatch: pytest.MonkeyPatch
):
    run = RunFiles(str(tmp_path), "run")
    run.append_metrics(1, {"x" * 60_000: 1.0})

    def room(seconds: float) -> None:
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))

    monkeypatch.setattr(retries.time, "sleep", room)
    run.append_metrics(2, {"x" * 60_000: 2.0})
    assert [list(row.values()) for row in run.metrics()] == [[1, 1.0], [2, 2.0]]


def test_a_missing_file_is_no_matter_of_patience(tmp_path: Path, told: list[str]):
    with pytest.raises(FileNotFoundError):
        retried((tmp_path / "none").read_bytes, "reading", tell=told.append)
    assert told == []
