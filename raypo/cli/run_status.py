"""`raypo status`: show the progress of runs and sweeps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from raypo.cli.exit_status import exit_status

if TYPE_CHECKING:
    from raypo.storage.run_state import RunStatus


@exit_status()
def status(
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            help="Folders or URIs of runs or sweeps, or folders that contain several. Default: runs"
        ),
    ] = None,
) -> None:
    """Show the status, progress, scores and remaining time of each run."""
    import time
    from concurrent.futures import ThreadPoolExecutor
    from dataclasses import replace

    from rich.console import Console

    from raypo.config import ConfigError
    from raypo.storage.run_files import RunFiles
    from raypo.storage.run_state import no_run, paragraph, run_status, table
    from raypo.tracking.console import printable
    from raypo.tuning.sweep_folder import sweep_status, with_trial_status

    now = time.time()

    def status_at(files: RunFiles) -> RunStatus | None:
        run = run_status(files, now)
        try:
            sweep = sweep_status(files, now)
        except ConfigError as error:  # a sweep of an older version must not hide the other runs
            notes, go_on = (f"Its config is invalid: {error}",), "correct its config"
            return run and replace(run, recipe="sweep", notes=notes, go_on=go_on, log=None)
        return sweep or (run and with_trial_status(run, files))

    all_statuses: list[RunStatus] = []
    with ThreadPoolExecutor(8) as threads:  # remote storage takes about 0.1 s a request
        for location in runs or ["runs"]:
            files = RunFiles.at(location)
            location_status = status_at(files)
            names = (
                []
                if location_status
                else [name for name in files.names() if not name.startswith(".")]
            )
            statuses_below = threads.map(
                status_at, [RunFiles(files.location, name) for name in names]
            )
            statuses = (
                [location_status]
                if location_status
                else [run for run in statuses_below if run is not None]
            )
            if not statuses:
                raise no_run(location)
            statuses.sort(key=lambda run: run.age_s or 0.0)
            all_statuses += [replace(run, name=printable(run.name)) for run in statuses]
    if len(all_statuses) == 1:
        typer.echo(printable("\n".join(paragraph(all_statuses[0]))))
    else:
        Console(highlight=False, markup=False).print(table(all_statuses))
