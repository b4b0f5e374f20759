import json
import socket
import stat
from pathlib import Path
from urllib.parse import parse_qs, urlparse

import pytest
from typer.testing import CliRunner

from raypo.cli import app
from raypo.config import ConfigError
from raypo.metrics.monitoring import servers
from raypo.metrics.monitoring.grafana import PANELS, grafana_dashboard


@pytest.fixture
def session(tmp_path: Path) -> servers.Session:
    folder = tmp_path / "ray" / "session_1"
    (folder / "metrics" / "grafana").mkdir(parents=True)
    (folder / "prom_metrics_service_discovery.json").write_text("[]")
    # Of another Ray of this machine, which was started later.
    (tmp_path / "ray" / "prom_metrics_service_discovery.json").write_text("['other']")
    return servers.Session.find(folder)


def test_the_dashboard_has_every_panel_once_without_overlap():
    board = grafana_dashboard()
    places = {(p["gridPos"]["x"], p["gridPos"]["y"]) for p in board["panels"]}
    assert len(places) == len(board["panels"]) == len(PANELS) + 1
    assert board["panels"][0]["targets"][0]["expr"] == 'ray_raypo_rollout_score_mean{run=~"$run"}'
    phases = board["panels"][-1]["targets"][0]["expr"]
    assert phases == (
        '{__name__=~"ray_raypo_time_.*", run=~"$run", __name__!="ray_raypo_time_step_s"}'
    )


def test_the_command_writes_the_dashboard(tmp_path: Path):
    path = tmp_path / "raypo.json"
    done = CliRunner().invoke(app, ["monitor", "--dashboard", str(path)])
    assert done.exit_code == 0
    assert json.loads(path.read_text())["uid"] == "raypo"


def test_the_page_of_prometheus_shows_the_figures():
    query = parse_qs(urlparse(servers.prometheus_url(9090)).query)
    assert query["g0.expr"] == ["ray_raypo_rollout_score_mean{} or ray_raypo_eval_score_mean{}"]
    assert query["g1.expr"] == ["ray_raypo_kl_ref_response_mean{}"]


def test_without_a_ray_it_is_told(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"--session \(.*\): no Ray is there.*ray start --head"):
        servers.Session.find(tmp_path / "session_latest")


def test_what_is_missing_is_named_with_how_to_install_it(
    session: servers.Session, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(servers.shutil, "which", lambda name: None)
    done = CliRunner().invoke(app, ["monitor", "--session", str(session.folder)])
    assert done.exit_code == 1
    assert "apt-get install prometheus" in done.output


def test_a_server_that_ends_at_once_is_told_with_its_log(
    session: servers.Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    binary = tmp_path / "prometheus"
    binary.write_text("#!/bin/sh\necho address already in use\nexit 1\n")
    binary.chmod(binary.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(servers.shutil, "which", lambda name: str(binary))
    with pytest.raises(ConfigError, match=r"address already in use.*Choose another port"):
        servers.start_prometheus(session, tmp_path / "data", 1)


@pytest.mark.parametrize("server", ["prometheus", "grafana"])
def test_another_program_on_the_port_is_not_taken_for_the_own_server(
    server: str, session: servers.Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(servers.shutil, "which", lambda name: "/bin/true")
    session.grafana.mkdir(parents=True, exist_ok=True)
    start = getattr(servers, f"start_{server}")
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"--{server}-port \({port}\): another program"):
            start(session, tmp_path / "data", port)
