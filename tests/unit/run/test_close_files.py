"""At its end a worker copies its last files to the URI, whatever ended it."""

import logging
from contextlib import ExitStack
from pathlib import Path

import pytest

from raypo.run.run import close_files
from raypo.storage import retries
from raypo.storage.run_files import RunFiles


def fail(files: RunFiles) -> None:
    with ExitStack() as at_end:
        at_end.callback(close_files, files)
        raise ValueError("the step failed")


def test_the_log_of_a_step_that_failed_is_uploaded_but_not_a_half_written_model(tmp_path: Path):
    files = RunFiles(tmp_path.as_uri(), "run")
    files.log_path("worker_1.log").write_text("out of memory\n")
    (files.folder / "policy.new").mkdir()
    (files.folder / "policy.new" / "model.safetensors").write_text("half of it")
    with pytest.raises(ValueError, match="the step failed"):
        fail(files)
    assert (tmp_path / "run" / "logs" / "worker_1.log").read_text() == "out of memory\n"
    assert not (tmp_path / "run" / "policy.new").exists()
    assert not files.folder.exists()


def test_a_storage_that_fails_does_not_hide_what_ended_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(retries, "WAITS_S", ())
    (tmp_path / "run").write_text("a file where the folder should be")
    files = RunFiles(tmp_path.as_uri(), "run")
    files.write("config.yaml", b"")
    with caplog.at_level(logging.ERROR), pytest.raises(ValueError, match="the step failed"):
        fail(files)
    assert "the last files were not copied to the URI" in caplog.text
    assert not files.folder.exists()
