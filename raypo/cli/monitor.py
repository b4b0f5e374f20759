"""`raypo monitor`: Prometheus and Grafana beside Ray."""

from __future__ import annotations

import signal
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from raypo.cli.status import exit_status


@exit_status()
def monitor(
    session: Annotated[
        Path, typer.Option(help="Folder of the Ray session on this machine.")
    ] = Path("/tmp/ray/session_latest"),
    prometheus_port: Annotated[int, typer.Option(help="Ray's dashboard looks at 9090.")] = 9090,
    grafana_port: Annotated[int, typer.Option(help="Ray's dashboard looks at 3000.")] = 3000,
    dashboard: Annotated[
        Path | None, typer.Option(help="Only write the Grafana dashboard's JSON there.")
    ] = None,
) -> None:
    """Start Prometheus and Grafana for the runs of this machine's Ray, until Ctrl-C."""
    from raypo.metrics.monitoring import servers

    if dashboard is not None:
        servers.write_dashboard(dashboard)
        typer.echo(f"raypo: {dashboard}")
        return
    found = servers.Session.find(session)
    for each in (signal.SIGINT, signal.SIGTERM):  # also where a shell has them ignored
        signal.signal(each, signal.default_int_handler)
    folder = Path(tempfile.mkdtemp(prefix="raypo-monitor-"))
    processes = []
    try:
        prometheus = servers.start_prometheus(found, folder / "prometheus", prometheus_port)
        if prometheus is None:
            typer.echo(f"raypo: {servers.PROMETHEUS_MISSING}")
            raise typer.Exit(1)
        processes.append(prometheus)
        typer.echo(f"raypo: Prometheus, raypo's figures: {servers.prometheus_url(prometheus_port)}")
        grafana = servers.start_grafana(found, folder / "grafana", grafana_port)
        if grafana is None:
            typer.echo(f"raypo: {servers.GRAFANA_MISSING}")
        else:
            processes.append(grafana)
            typer.echo(f"raypo: Grafana, raypo's dashboard: {servers.grafana_url(grafana_port)}")
        typer.echo(f"raypo: data and logs in {folder}; Ctrl-C ends both.")
        prometheus.wait()
    except KeyboardInterrupt:
        typer.echo("raypo: ended.")
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()
