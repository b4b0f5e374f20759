"""`raypo train`: start or resume a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from raypo.cli.exit_status import INTERRUPTED, exit_status


@exit_status(resumes=True)
def train(
    config: Annotated[Path, typer.Argument(help="A run config (YAML), or the folder of a run.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="key=value, like ppo.kl.coef=0.02")
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start over, and remove the earlier run.")
    ] = False,
) -> None:
    """Start a run, resume an interrupted run, or report that it is finished."""
    from raypo.checks.input_checks import check_disk, check_inputs
    from raypo.checks.resume_checks import (
        check_fresh_start,
        check_run_folder,
        finished_message,
        is_finished,
    )
    from raypo.checks.row_checks import with_steps_of_epochs
    from raypo.cluster.machine import check_machine
    from raypo.config import load_run_config
    from raypo.storage.run_files import RunFiles

    run = load_run_config(config, overrides)
    files = RunFiles(run.storage_path, run.name)
    may_be_finished = not fresh and (files.summary() or {}).get("status") == "finished"
    if not may_be_finished:  # a finished run needs no Ray
        check_machine(run.cluster)
    notes = check_inputs(run)
    run = with_steps_of_epochs(run)
    if fresh:
        check_fresh_start(run, files)
    else:
        check_run_folder(run, files)
        if is_finished(files, run):
            typer.echo(finished_message(files, run, fresh="--fresh"))
            return
    if may_be_finished:
        check_machine(run.cluster)
    check_disk(run)
    files.check_writable()
    from raypo.cluster.connect import connected_in_background  # imports Ray

    with connected_in_background(run.cluster) as connected:
        from raypo.trainer import trainer_for  # imports torch

        # Not before: a trainer writes to a dict of Ray that `ray.init` iterates over.
        connected.result()
        result = trainer_for(run, fresh=fresh, notes=notes).fit()
    if (result.return_value or {}).get("status") == "interrupted":
        raise typer.Exit(INTERRUPTED)
