"""`raypo monitor`: write raypo's Grafana dashboard next to Ray's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from raypo.cli.exit_status import exit_status


@exit_status()
def monitor(
    session: Annotated[
        Path, typer.Option(help="Folder of the Ray session on this machine.")
    ] = Path("/tmp/ray/session_latest"),
    dashboard: Annotated[
        Path | None, typer.Option(help="Only write the dashboard's JSON there.")
    ] = None,
) -> None:
    """Write raypo's dashboard for Grafana, and say how to start Prometheus and Grafana."""
    from raypo.config import ConfigError
    from raypo.tracking.grafana import UID, grafana_dashboard

    config = session.resolve() / "metrics"  # Ray writes config files of both programs there
    if dashboard is None and not (config / "grafana").exists():
        raise ConfigError(
            f"--session ({session}): no Ray is there that exports its metrics. Start a run or "
            "`ray start --head` on this machine first, with the dashboard (ray[default])."
        )
    path = dashboard or config / "grafana" / "dashboards" / "raypo.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(grafana_dashboard(), indent=2) + "\n")
    typer.echo(f"raypo: {path}")
    if dashboard is None:
        files = f"{config}/prometheus/prometheus.yml", f"{config}/grafana/grafana.ini"
        typer.echo(
            "Start both in terminals of their own:\n"
            f"  prometheus --config.file={files[0]}\n"
            "    (not installed? `ray metrics launch-prometheus` downloads one and starts it)\n"
            f"  grafana server --homepath=/usr/share/grafana --config={files[1]}\n"
            f"raypo's dashboard is then at http://127.0.0.1:3000/d/{UID}, and Ray's own dashboard "
            "shows curves on its Metrics page."
        )
