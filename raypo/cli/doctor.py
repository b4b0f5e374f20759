"""`raypo doctor`: find what is wrong with a machine, a cluster or a run before it starts."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from raypo.cli.exit_status import FAILED, exit_status, tell


@exit_status()
def doctor(
    config: Annotated[
        Path | None, typer.Argument(help="A run config (YAML). Default: the machine alone.")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Argument(help="key=value, like learner.num_workers=2")
    ] = None,
    cluster: Annotated[
        bool,
        typer.Option(
            "--cluster", help="Check every node of the cluster at cluster.address or RAY_ADDRESS."
        ),
    ] = False,
    port: Annotated[
        list[int] | None,
        typer.Option(min=1, max=65535, help="Port that must be free, like that of raypo serve."),
    ] = None,
    as_list: Annotated[
        bool, typer.Option("--json", help="Print the results as a JSON list.")
    ] = False,
) -> None:
    """Check the machine and all that a run needs, concurrently, before anything is loaded.

    Exit status 1 means that the run would fail.
    """
    from raypo.custom.in_subprocess import descendants, kill
    from raypo.doctor.preflight import as_json, lines, preflight, verdict
    from raypo.tracking.console import printable

    before, has_left = set(descendants(os.getpid())), True
    try:
        results = preflight(config, overrides or (), cluster=cluster, ports=port or ())
        has_left = any(result.is_hung for result in results)
    finally:
        if has_left:  # processes of a check that hangs, or of all after Ctrl-C
            kill(*(pid for pid in descendants(os.getpid()) if pid not in before))
    if as_list:
        typer.echo(as_json(results))
    else:
        for line in lines(results):
            typer.echo(printable(line))
        tell(verdict(results))
    status = FAILED if any(result.status == "fault" for result in results) else 0
    sys.stdout.flush()
    sys.stderr.flush()
    if any(result.is_hung for result in results):
        os._exit(status)  # a normal exit could wait for what hangs
    raise typer.Exit(status)
