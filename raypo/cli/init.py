"""`raypo init`: write a run file from a script or command of another project."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated

import typer

from raypo.cli.exit_status import exit_status


@exit_status()
def init(
    from_trl: Annotated[Path | None, typer.Option(help="A Python script that uses TRL.")] = None,
    from_verl: Annotated[str | None, typer.Option(help="A command, or a shell file.")] = None,
    from_openrlhf: Annotated[str | None, typer.Option(help="A command, or a shell file.")] = None,
    to: Annotated[Path, typer.Option(help="Run file to write. It must not exist yet.")] = Path(
        "run.yaml"
    ),
) -> None:
    """Translate a TRL script, a verl command or an OpenRLHF command into a run file.

    Nothing is executed. The top of the file lists everything that could not be translated.
    """
    from raypo.config import ConfigError
    from raypo.translation.reading import read_command, read_script
    from raypo.translation.run_file import translate

    given = {"TRL": from_trl, "verl": from_verl, "OpenRLHF": from_openrlhf}
    chosen = {project: each for project, each in given.items() if each is not None}
    if len(chosen) != 1:
        raise ConfigError("Give one of --from-trl, --from-verl and --from-openrlhf.")
    if to.exists():
        raise ConfigError(
            f"--to ({to}): this file exists already. Name another file, or remove it."
        )
    ((project, source),) = chosen.items()
    is_file = os.path.isfile(source)  # False, not an error, for a command too long for a file name
    if not is_file and (project == "TRL" or not re.search(r"[\s=]", str(source))):
        raise ConfigError(f"--from-{project.lower()} ({source}): there is no such file.")
    text = Path(source).read_text() if is_file else str(source)
    if project == "TRL":
        recipe, arguments = read_script(text)
    else:
        recipe, arguments = "ppo", read_command(text, project)
    if not arguments:
        raise ConfigError(f"--from-{project.lower()}: it contains no argument of {project}.")
    to.write_text(translate(project, arguments, recipe))
    plan = f"raypo plan {to} --cluster 8xH100"
    typer.echo(f"raypo: wrote {to}. Read the notes at its top; then run, with your GPUs: {plan}")
