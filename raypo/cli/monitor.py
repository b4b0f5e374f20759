"""`raypo monitor`: a live page of a run, or raypo's Grafana dashboard next to Ray's."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from raypo.cli.exit_status import exit_status

if TYPE_CHECKING:
    from raypo.report.page import Page


@exit_status()
def monitor(
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            help="Folders or URIs of runs, or of one sweep. Without any, the Grafana dashboard is "
            "written."
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="Interface to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port. 0 picks a free one.")] = 0,
    session: Annotated[
        Path, typer.Option(help="For Grafana: folder of the Ray session on this machine.")
    ] = Path("/tmp/ray/session_latest"),
    dashboard: Annotated[
        Path | None, typer.Option(help="For Grafana: only write the dashboard's JSON to this path.")
    ] = None,
) -> None:
    """Serve a live page of a run; without one, write raypo's dashboard for Grafana."""
    if runs:
        _serve_page(runs, host, port)
    else:
        _write_dashboard(session, dashboard)


def _serve_page(runs: Sequence[str], host: str, port: int) -> None:
    import secrets

    from raypo.extras import require

    require("report", "raypo monitor RUN")
    require("serve", "raypo monitor RUN")
    from raypo.http_server import run_server
    from raypo.report.live_page import make_app

    make_page, version = page_source(runs)
    make_page()  # refuse a folder without a run before the server starts
    token = secrets.token_urlsafe()

    def ready(address: str) -> None:
        typer.echo(f"raypo: live page of {' '.join(runs)} at {address}/?token={token}")
        typer.echo(
            "raypo: anyone with this address can read the run; Ctrl-C stops only this page, not "
            "the run."
        )

    try:
        run_server(make_app(make_page, version, token=token), host=host, port=port, ready=ready)
    except KeyboardInterrupt:
        typer.echo("raypo: ended.")


def page_source(runs: Sequence[str]) -> tuple[Callable[[], Page], Callable[[], str]]:
    """Return functions that return the page of runs or a sweep, and the page's version.

    The version changes when a run writes a file, starts or ends.
    """
    import time
    from dataclasses import replace

    from raypo.report.page import Section, Table
    from raypo.report.run_page import load_run, run_page
    from raypo.storage.folder import below
    from raypo.storage.run_files import RunFiles
    from raypo.storage.run_state import facts, progress, run_status
    from raypo.tuning.sweep_folder import TRIALS_FOLDER, sweep_status
    from raypo.tuning.sweep_page import load_sweep, sweep_page

    run_files = [RunFiles.at(run) for run in runs]

    def make_page() -> Page:
        files = run_files[0]
        sweep = load_sweep(files) if len(runs) == 1 else None
        page = sweep_page(sweep) if sweep else run_page([load_run(run) for run in runs])
        page.subtitle = f"as of {time.strftime('%H:%M:%S')}; reload the page for new samples"
        now = time.time()
        if len(runs) == 1 and (status := sweep_status(files, now) or run_status(files, now)):
            status = replace(
                status, age_s=None
            )  # a shown age would become wrong before the page changes
            rows = [("progress", progress(status)), *facts(status)]
            page.sections.insert(0, Section("Now").add(Table(["", ""], rows)))
        return page

    def version() -> str:
        trials = [
            RunFiles(below(files.location, TRIALS_FOLDER), name)
            for files in run_files
            for name in RunFiles(files.location, TRIALS_FOLDER).names()
            if not name.startswith(".")
        ]
        names = "config.yaml", "metrics.jsonl", "summary.json", "trials.parquet"
        write_times = [files.written_at(name) for files in [*run_files, *trials] for name in names]
        return f"{hash((*write_times, *(files.is_running() for files in run_files))):x}"

    return make_page, version


def _write_dashboard(session: Path, dashboard: Path | None) -> None:
    from raypo.config import ConfigError
    from raypo.tracking.grafana import UID, grafana_dashboard

    config = session.resolve() / "metrics"  # Ray writes Prometheus' and Grafana's config there
    if dashboard is None and not (config / "grafana").exists():
        raise ConfigError(
            f"--session ({session}): no Ray in this session exports its metrics. Start a run or "
            "`ray start --head` on this machine first, with the dashboard (ray[default])."
        )
    path = dashboard or config / "grafana" / "dashboards" / "raypo.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(grafana_dashboard(), indent=2) + "\n")
    typer.echo(f"raypo: {path}")
    if dashboard is None:
        files = f"{config}/prometheus/prometheus.yml", f"{config}/grafana/grafana.ini"
        typer.echo(
            "Start each of these in its own terminal:\n  prometheus "
            f"--config.file={files[0]}\n    (not installed? `ray metrics launch-prometheus` "
            "downloads one and starts it)\n  grafana server --homepath=/usr/share/grafana "
            f"--config={files[1]}\nraypo's dashboard is then at http://127.0.0.1:3000/d/{UID}, "
            "and Ray's own dashboard shows curves on its Metrics page."
        )
