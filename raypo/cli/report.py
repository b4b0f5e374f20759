"""`raypo report`: one HTML page of a run, of several runs, or of a sweep."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from raypo.cli.exit_status import exit_status


@exit_status()
def report(
    runs: Annotated[list[str], typer.Argument(help="Folders or URIs of runs, or of one sweep.")],
    out: Annotated[
        Path | None,
        typer.Option("--out", help="HTML file to write. Default: report.html in the run folder."),
    ] = None,
    samples: Annotated[bool, typer.Option(help="Include samples of the rollouts.")] = True,
) -> None:
    """Write one HTML page with result, curves, time, samples and config; compare several runs."""
    from raypo.extras import require

    require("report", "raypo report")
    from raypo.report.run_page import load_run, run_page
    from raypo.storage.run_files import RunFiles
    from raypo.tuning.sweep_page import load_sweep, sweep_page

    files = RunFiles.at(runs[0])
    if len(runs) == 1 and (sweep := load_sweep(files)):
        page = sweep_page(sweep)
    else:
        page = run_page([load_run(run) for run in runs], with_samples=samples)
    is_one_folder = len(runs) == 1 and "://" not in runs[0]
    path = page.write(out or (files.folder if is_one_folder else Path()) / "report.html")
    typer.echo(f"raypo: {path} ({path.stat().st_size / 1e6:.1f} MB)")
