"""`raypo sweep`: search over the keys of a run config."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from raypo.cli.exit_status import FAILED, INTERRUPTED, exit_status
from raypo.cli.plan import print_sweep_plan


@exit_status(resumes=True)
def sweep(
    file: Annotated[Path, typer.Argument(help="A sweep file (YAML), or the folder of a sweep.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="key=value, like num_samples=16 or overrides.num_steps=8"),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Print trials, resources and concurrency; start nothing."),
    ] = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start over, and remove the earlier sweep.")
    ] = False,
) -> None:
    """Start or resume a search over keys of a run config, or report that it is finished.

    A larger num_samples adds trials to a finished sweep.
    """
    if dry_run:
        print_sweep_plan(file, overrides, None)
        return
    from raypo.extras import require

    require("sweep", "raypo sweep")
    from raypo.checks.input_checks import check_disk, check_inputs
    from raypo.checks.resume_checks import check_outside
    from raypo.cluster.machine import check_machine
    from raypo.config.sweep_config import SweepConfig
    from raypo.storage.run_files import RunFiles
    from raypo.tuning.goal import check_metrics
    from raypo.tuning.sweep_folder import check_sweep_folder, is_complete

    config = SweepConfig.load(file, overrides)
    base = config.base_config()
    check_machine(base.cluster)
    check_metrics(config, base)
    for note in check_inputs(base):
        typer.echo(f"Note: {note}.")
    files = RunFiles(config.storage_path, config.name)
    files.check_writable()
    with files.lock():
        if fresh:
            files.check_removable(kind="sweep")
            check_outside(base, files, base=os.path.abspath(config.base))
        else:
            check_sweep_folder(config, base, files)
            if is_complete(config, files):
                extend_text = (
                    "" if config.searcher == "grid" else "a larger num_samples adds trials, "
                )
                typer.echo(
                    f"raypo: {config.name} is finished, files in {files.location}; "
                    f"{extend_text}--fresh starts over."
                )
                return
        check_disk(base)
        from raypo.tuning.sweep_file import run_sweep  # imports Ray and torch

        outcome = run_sweep(config, base, files, fresh=fresh)
    if outcome.status == "interrupted":
        raise typer.Exit(INTERRUPTED)
    if outcome.status == "failed":
        raise typer.Exit(FAILED)
