"""Refusals of `raypo serve --ray` and `raypo.llm_config`; a slow test serves a policy."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from typer.testing import CliRunner

import raypo
from raypo.cli import app
from raypo.config import ConfigError
from raypo.serving.ray_serve import serve_on_ray


@pytest.mark.parametrize(
    ("arguments", "key", "message"),
    [
        (["--host", "0.0.0.0"], None, "Ray Serve does not check API keys"),
        ([], "a-key", "Ray Serve does not check API keys"),
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


@pytest.mark.parametrize("applications", [{}, {"theirs": "RUNNING"}])
def test_a_ray_serve_that_runs_already_keeps_its_addresses_and_is_refused(
    monkeypatch: pytest.MonkeyPatch, applications: dict[str, str]
):
    """It would ignore the host, and might serve the policy to every machine."""
    status = SimpleNamespace(proxies={"a-node": "HEALTHY"}, applications=applications)
    stand_in: Any = SimpleNamespace(status=lambda: status)
    monkeypatch.setattr(ray, "serve", stand_in, raising=False)
    monkeypatch.setitem(sys.modules, "ray.serve", stand_in)
    monkeypatch.setitem(sys.modules, "ray.serve.llm", SimpleNamespace(build_openai_app=None))
    config: Any = None
    with pytest.raises(ConfigError, match="--ray: this cluster already serves applications"):
        serve_on_ray(config, host="127.0.0.1", port=1, ready=lambda address: None)
