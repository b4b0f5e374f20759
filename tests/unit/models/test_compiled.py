"""Tests of the folder for compiled code."""

import os

from raypo.models.compiled import CACHE, keep_compiled_code


def test_compiled_code_stays_in_the_users_cache_unless_the_user_says_where(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(CACHE, raising=False)
    keep_compiled_code()
    assert os.environ[CACHE] == str(tmp_path / "raypo" / "inductor")
    assert (tmp_path / "raypo" / "inductor").is_dir()
    monkeypatch.setenv(CACHE, "elsewhere")
    keep_compiled_code()
    assert os.environ[CACHE] == "elsewhere"


def test_where_nothing_can_be_written_it_is_torchs_own_folder(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nobody")
    monkeypatch.delenv(CACHE, raising=False)
    keep_compiled_code()
    assert CACHE not in os.environ
