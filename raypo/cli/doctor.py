"""`raypo doctor`: find what is wrong with a machine, a cluster or a run."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from raypo.cli.exit_status import FAILED, exit_status, tell

if TYPE_CHECKING:
    from raypo.doctor.result import Result


@exit_status()
def doctor(
    run: Annotated[
        str | None,
        typer.Argument(
            help="A run config (YAML), or the folder or URI of a run that has started. Default: "
            "the machine alone."
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="key=value for a run config, like learner.num_workers=2"),
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
    """Check the machine and all that a run needs, or the health of a run that has started.

    Before the start, all checks run concurrently, and nothing is loaded; exit status 1 means that
    the run would fail. Of a run's folder, the metrics so far are checked; exit status 1 means that
    something is wrong with the learning or with the run's processes.
    """
    from raypo.config import ConfigError
    from raypo.doctor.preflight import as_json, lines, verdict
    from raypo.doctor.run_health import health_verdict, run_health
    from raypo.tracking.console import printable

    if run is not None and ("://" in run or Path(run).is_dir()):
        if overrides or cluster or port:
            raise ConfigError(
                f"RUN ({run}): is the folder of a run, of which only the files are read. Leave out "
                "key=value, --cluster and --port, or name a run file."
            )
        results, words = run_health(run), health_verdict
    else:
        results, words = _preflight(run, overrides or (), cluster, port or ()), verdict
    if as_list:
        typer.echo(as_json(results))
    else:
        for line in lines(results):
            typer.echo(printable(line))
        tell(words(results))
    status = FAILED if any(result.status == "fault" for result in results) else 0
    sys.stdout.flush()
    sys.stderr.flush()
    if any(result.is_hung for result in results):
        os._exit(status)  # a normal exit could wait for what hangs
    raise typer.Exit(status)


def _preflight(
    run: str | None, overrides: Sequence[str], cluster: bool, ports: Sequence[int]
) -> list[Result]:
    from raypo.custom.in_subprocess import descendants, kill
    from raypo.doctor.preflight import preflight

    before, has_left = set(descendants(os.getpid())), True
    try:
        results = preflight(Path(run) if run else None, overrides, cluster=cluster, ports=ports)
        has_left = any(result.is_hung for result in results)
    finally:
        if has_left:  # processes of a check that hangs, or of all after Ctrl-C
            kill(*(pid for pid in descendants(os.getpid()) if pid not in before))
    return results
