"""`raypo monitor`: Prometheus and Grafana beside Ray."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer

from raypo.cli.exit_status import exit_status

PROMETHEUS_MISSING = (
    "Prometheus is not installed, so there are no curves over time. Install it (Debian, Ubuntu: "
    "apt-get install prometheus; macOS: brew install prometheus; or https://prometheus.io/download)"
    ", or let Ray download one and start it for the Ray in /tmp/ray: ray metrics launch-prometheus."
)
GRAFANA_MISSING = (
    "Grafana is not installed; Prometheus draws the same metrics plainly. Install it "
    "(https://grafana.com/docs/grafana/latest/setup-grafana/installation) and start this command "
    "again, or load the dashboard into another Grafana: raypo monitor --dashboard raypo.json."
)


@exit_status()
def monitor(
    session: Annotated[
        Path, typer.Option(help="Folder of the Ray session on this machine.")
    ] = Path("/tmp/ray/session_latest"),
    prometheus_port: Annotated[
        int, typer.Option(help="Ray's dashboard and Grafana look at 9090.")
    ] = 9090,
    grafana_port: Annotated[int, typer.Option(help="Ray's dashboard looks at 3000.")] = 3000,
    dashboard: Annotated[
        Path | None, typer.Option(help="Only write the Grafana dashboard's JSON there.")
    ] = None,
) -> None:
    """Start Prometheus and Grafana for the runs of this machine's Ray, until Ctrl-C."""
    from raypo.config import ConfigError
    from raypo.tracking.grafana import UID, grafana_dashboard, prometheus_url

    text = json.dumps(grafana_dashboard(), indent=2) + "\n"
    if dashboard is not None:
        dashboard.parent.mkdir(parents=True, exist_ok=True)
        dashboard.write_text(text)
        typer.echo(f"raypo: {dashboard}")
        return
    metrics = session.resolve() / "metrics"  # with the files that Ray writes for both programs
    if not (metrics / "prometheus" / "prometheus.yml").exists():
        raise ConfigError(
            f"--session ({session}): no Ray is there that tells its metrics. Start a run or "
            "`ray start --head` on this machine first, with the dashboard (ray[default])."
        )
    data = Path(tempfile.mkdtemp(prefix="raypo-monitor-"))
    commands: list[list[str]] = []
    if prometheus := shutil.which("prometheus"):
        commands.append(_prometheus(prometheus, metrics, data / "prometheus", prometheus_port))
        typer.echo(f"raypo: Prometheus, raypo's metrics: {prometheus_url(prometheus_port)}")
    else:
        typer.echo(f"raypo: {PROMETHEUS_MISSING}")
    if grafana := shutil.which("grafana") or shutil.which("grafana-server"):
        (metrics / "grafana" / "dashboards" / "raypo.json").write_text(text)
        commands.append(
            _grafana(Path(grafana), metrics / "grafana", data / "grafana", grafana_port)
        )
        typer.echo(f"raypo: Grafana, raypo's dashboard: http://127.0.0.1:{grafana_port}/d/{UID}")
    else:
        typer.echo(f"raypo: {GRAFANA_MISSING}")
    if not commands:
        raise typer.Exit(1)
    typer.echo(f"raypo: data in {data}; Ctrl-C ends what was started.")
    _run_until_told(commands)


def _prometheus(program: str, metrics: Path, data: Path, port: int) -> list[str]:
    return [
        program,
        f"--config.file={metrics / 'prometheus' / 'prometheus.yml'}",
        f"--storage.tsdb.path={data}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=error",
    ]


def _grafana(program: Path, config: Path, data: Path, port: int) -> list[str]:
    homes = [Path("/usr/share/grafana"), program.resolve().parent.parent]
    home = next((each for each in homes if (each / "public").exists()), homes[-1])
    return [
        str(program),
        *(["server"] if program.name == "grafana" else []),
        f"--homepath={home}",
        f"--config={config / 'grafana.ini'}",
        f"cfg:paths.provisioning={config / 'provisioning'}",  # Ray's file names the latest session
        f"cfg:paths.data={data}",
        f"cfg:server.http_port={port}",
        "cfg:server.http_addr=127.0.0.1",
        "cfg:log.level=error",
    ]


def _run_until_told(commands: list[list[str]]) -> None:
    """Run the programs until Ctrl-C or SIGTERM.

    Raises:
        typer.Exit: one of them ended by itself, after it said why on this terminal.
    """
    for each in (signal.SIGINT, signal.SIGTERM):  # also where a shell has them ignored
        signal.signal(each, signal.default_int_handler)
    processes: list[subprocess.Popen[bytes]] = []
    try:
        processes += [subprocess.Popen(command) for command in commands]
        while all(process.poll() is None for process in processes):
            time.sleep(0.2)
        ended = next(
            c for c, p in zip(commands, processes, strict=True) if p.returncode is not None
        )
        typer.echo(f"raypo: {Path(ended[0]).name} ended, for the reason that it gave above.")
        raise typer.Exit(1)
    except KeyboardInterrupt:
        typer.echo("raypo: ended.")
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()
