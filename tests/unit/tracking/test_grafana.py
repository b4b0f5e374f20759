import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from raypo.cli import app
from raypo.tracking.grafana import PHASES, ROWS, expression, grafana_dashboard


@pytest.fixture
def session(tmp_path: Path) -> Path:
    """A folder as Ray's dashboard leaves it."""
    folder = tmp_path / "ray" / "session_1"
    (folder / "metrics" / "grafana" / "dashboards").mkdir(parents=True)
    return folder


def monitor(*options: str) -> Result:
    return CliRunner().invoke(app, ["monitor", *options])


def test_the_dashboard_has_every_plot_once_without_overlap():
    panels = grafana_dashboard()["panels"]
    places = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in panels]
    assert len(set(places)) == len(set(p["id"] for p in panels)) == len(panels)
    assert places == sorted(places, key=lambda place: place[1])
    assert [p["title"] for p in panels if p["type"] == "row"] == list(ROWS)
    drawn = [p["title"] for p in panels if p["type"] != "row"]
    assert drawn == [plot.title for plots in ROWS.values() for plot in plots]
    assert {"Score", "KL to the reference", "Entropy", PHASES} <= set(drawn)


def test_metrics_and_patterns_are_asked_of_the_chosen_runs():
    assert expression("rollout/score_mean") == 'ray_raypo_rollout_score_mean{run=~"$run"}'
    assert expression("engine/queued") == 'ray_raypo_engine_queued{engine=~"raypo:($run):.*"}'
    assert expression("time/*", "") == (
        '{__name__=~"ray_raypo_time_.*", __name__!~".*(_initial_.*|_time_step_s)", }'
    )


def test_the_command_writes_the_dashboard(tmp_path: Path):
    path = tmp_path / "raypo.json"
    done = monitor("--dashboard", str(path))
    assert done.exit_code == 0
    assert json.loads(path.read_text())["uid"] == "raypo"


def test_without_a_ray_it_says_so(tmp_path: Path):
    done = monitor("--session", str(tmp_path / "session_latest"))
    assert done.exit_code == 2
    assert "session_latest): no Ray in this session exports its metrics" in done.stderr
    assert "ray start --head" in done.stderr


def test_the_dashboard_goes_where_grafana_looks_and_both_programs_are_named(session: Path):
    done = monitor("--session", str(session))
    assert done.exit_code == 0
    board = session / "metrics" / "grafana" / "dashboards" / "raypo.json"
    assert json.loads(board.read_text()) == grafana_dashboard()
    assert f"--config.file={session}/metrics/prometheus/prometheus.yml" in done.output
    assert f"--config={session}/metrics/grafana/grafana.ini" in done.output
    assert "ray metrics launch-prometheus" in done.output
