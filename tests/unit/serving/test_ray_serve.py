"""What `raypo serve --ray` and `raypo.llm_config` refuse; a slow test serves a policy."""

import sys

import pytest
from typer.testing import CliRunner

import raypo
from raypo.cli import app
from raypo.config import ConfigError


@pytest.mark.parametrize(
    ("arguments", "key", "message"),
    [
        (["--host", "0.0.0.0"], None, "Ray Serve asks clients for no API key"),
        ([], "a-key", "Ray Serve asks clients for no API key"),
        (["--", "--max-num-seqs", "64"], None, "-- (--max-num-seqs 64): --ray passes no command"),
    ],
)
def test_what_ray_serve_would_not_do_is_refused(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], key: str | None, message: str
):
    monkeypatch.delenv("RAYPO_API_KEY", raising=False)
    if key:
        monkeypatch.setenv("RAYPO_API_KEY", key)
    done = CliRunner().invoke(app, ["serve", "runs/any", "--ray", *arguments])
    assert done.exit_code == 2
    assert message in " ".join(done.output.replace("raypo:", "").split())


def test_missing_packages_are_named_with_what_installs_them(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "ray.serve.llm", None)
    with pytest.raises(ConfigError, match=r"pip install 'ray\[serve\]'"):
        raypo.llm_config("runs/any")
