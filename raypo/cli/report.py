"""`raypo report`: a run, or several, as one HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from raypo.cli.status import exit_status


@exit_status()
def report(
    runs: Annotated[list[str], typer.Argument(help="Run folders or URIs; also of runs under way.")],
    out: Annotated[
        Path | None, typer.Option("--out", help="The page; default: report.html in the run folder.")
    ] = None,
    samples: Annotated[bool, typer.Option(help="Put samples of the rollouts in.")] = True,
) -> None:
    """Write one HTML page: result, curves, time, samples, config; several runs are compared."""
    from raypo.metrics.report import load_run, run_page

    loaded = [load_run(run) for run in runs]
    page = run_page(loaded, with_samples=samples)
    is_one_folder = len(runs) == 1 and "://" not in runs[0]
    path = page.write(out or (loaded[0].files.folder if is_one_folder else Path()) / "report.html")
    typer.echo(f"raypo: {path} ({path.stat().st_size / 1e6:.1f} MB)")
