"""Tests of the folders for compiled code, and of who compiles first."""

import os
import threading
from pathlib import Path

import pytest

from raypo.models.compiled import FOLDERS, compiled_once, keep_compiled_code


def test_compiled_code_stays_in_the_users_cache_unless_the_user_says_where(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for variable in FOLDERS:
        monkeypatch.delenv(variable, raising=False)
    keep_compiled_code()
    for variable, name in FOLDERS.items():
        assert os.environ[variable] == str(tmp_path / "raypo" / name)
        assert (tmp_path / "raypo" / name).is_dir()
        monkeypatch.setenv(variable, "elsewhere")
    keep_compiled_code()
    assert {os.environ[variable] for variable in FOLDERS} == {"elsewhere"}


def test_where_nothing_can_be_written_the_folders_are_the_usual_ones(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nobody")
    for variable in FOLDERS:
        monkeypatch.delenv(variable, raising=False)
    keep_compiled_code()
    assert not FOLDERS.keys() & os.environ.keys()
    with compiled_once("a model"):
        pass


def test_one_compiles_first_and_all_others_at_once_afterwards(monkeypatch, tmp_path: Path):
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    at_work, go = list[str](), threading.Event()
    together = threading.Barrier(2, timeout=10)

    def others() -> None:
        with compiled_once("a model"):
            at_work.append("other")
            together.wait()  # fails unless both are here at the same time

    threads = [threading.Thread(target=others) for _ in range(2)]
    with compiled_once("a model"):
        for each in threads:
            each.start()
        with compiled_once("another model"):  # has nothing to wait for
            assert not go.wait(0.3)
        assert at_work == []
    for each in threads:
        each.join(10)
    assert at_work == ["other"] * 2
    assert not together.broken
    with compiled_once("a model"), compiled_once("a model"):
        pass  # all is compiled, so nobody takes the lock


def test_who_fails_to_compile_lets_the_next_one_try_alone(monkeypatch, tmp_path: Path):
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    with pytest.raises(OSError, match="no compiler"), compiled_once("a model"):
        raise OSError("no compiler")
    assert [each.suffix for each in (tmp_path / "raypo").iterdir()] == [".lock"]
    with compiled_once("a model"):
        pass
    assert len([*(tmp_path / "raypo").iterdir()]) == 2
