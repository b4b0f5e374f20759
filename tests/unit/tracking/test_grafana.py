import json
from pathlib import Path
from urllib.parse import parse_qs, urlparse

import pytest
from typer.testing import CliRunner, Result

from raypo.cli import app
from raypo.tracking.grafana import PANELS, grafana_dashboard, prometheus_url


@pytest.fixture
def session(tmp_path: Path) -> Path:
    """A folder as Ray's dashboard leaves it."""
    folder = tmp_path / "ray" / "session_1"
    (folder / "metrics" / "grafana" / "dashboards").mkdir(parents=True)
    (folder / "metrics" / "prometheus").mkdir()
    (folder / "metrics" / "prometheus" / "prometheus.yml").write_text("global: {}")
    return folder


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for programs, and no other program is to be found."""
    programs = tmp_path / "programs" / "bin"
    programs.mkdir(parents=True)
    monkeypatch.setenv("PATH", str(programs))
    return programs


def install(program: Path, script: str) -> None:
    """A program that writes its arguments beside itself and then does what the script says."""
    program.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {program}.arguments\n{script}\n')
    program.chmod(0o755)


def monitor(*options: str) -> Result:
    return CliRunner().invoke(app, ["monitor", *options])


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
    done = monitor("--dashboard", str(path))
    assert done.exit_code == 0
    assert json.loads(path.read_text())["uid"] == "raypo"


def test_the_page_of_prometheus_shows_the_figures():
    query = parse_qs(urlparse(prometheus_url(9090)).query)
    assert query["g0.expr"] == ["ray_raypo_rollout_score_mean{} or ray_raypo_eval_score_mean{}"]
    assert query["g1.expr"] == ["ray_raypo_kl_ref_response_mean{}"]


def test_without_a_ray_it_is_told(tmp_path: Path):
    done = monitor("--session", str(tmp_path / "session_latest"))
    assert done.exit_code == 2
    assert "session_latest): no Ray is there that tells its metrics" in done.stderr
    assert "ray start --head" in done.stderr


def test_what_is_missing_is_named_with_how_to_get_it(session: Path, installed: Path):
    done = monitor("--session", str(session))
    assert done.exit_code == 1
    assert "apt-get install prometheus" in done.output
    assert "ray metrics launch-prometheus" in done.output
    assert "raypo monitor --dashboard raypo.json" in done.output


def test_prometheus_and_grafana_start_with_the_files_that_ray_wrote(session: Path, installed: Path):
    install(installed / "prometheus", "exec /bin/sleep 60")
    install(installed / "grafana", f"until [ -s {installed}/prometheus.arguments ]; do :; done")
    (installed.parent / "public").mkdir()
    done = monitor("--session", str(session), "--prometheus-port", "19", "--grafana-port", "20")
    prometheus, grafana = (
        (installed / f"{name}.arguments").read_text().splitlines()
        for name in ("prometheus", "grafana")
    )
    assert f"--config.file={session}/metrics/prometheus/prometheus.yml" in prometheus
    assert "--web.listen-address=127.0.0.1:19" in prometheus
    assert grafana[:2] == ["server", f"--homepath={installed.parent}"]
    assert f"--config={session}/metrics/grafana/grafana.ini" in grafana
    assert "cfg:server.http_port=20" in grafana
    assert "http://127.0.0.1:20/d/raypo" in done.output
    board = session / "metrics" / "grafana" / "dashboards" / "raypo.json"
    assert json.loads(board.read_text()) == grafana_dashboard()


def test_a_program_that_ends_ends_the_command(session: Path, installed: Path):
    """As it does where another program listens at its port: it says so on the terminal."""
    install(installed / "prometheus", "exit 1")
    done = monitor("--session", str(session))
    assert done.exit_code == 1
    assert "prometheus ended, for the reason that it gave above" in done.output
