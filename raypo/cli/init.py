"""`raypo init`: write a run file from the settings of another project."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from raypo.cli.exit_status import exit_status

SOURCE = (
    "A JSON of a TRL config (json.dump(args.to_dict(), ...)), the config of verl (--cfg job "
    "--resolve > verl.yaml), or one plain command of verl or OpenRLHF: a file, or the command in "
    "quotes."
)


@exit_status()
def init(
    source: Annotated[str, typer.Argument(help=SOURCE)],
    to: Annotated[Path, typer.Option(help="Run file to write. It must not exist yet.")] = Path(
        "run.yaml"
    ),
) -> None:
    """Translate the settings of TRL, verl or OpenRLHF into a run file.

    Nothing is executed, and no program and no shell is interpreted. The top of the file lists what
    is left to you.
    """
    from raypo.config import ConfigError
    from raypo.translation.foreign_settings import read_source
    from raypo.translation.run_file import run_file, translate

    if to.exists():
        raise ConfigError(
            f"--to ({to}): this file exists already. Name another file, or remove it."
        )
    translation = translate(read_source(source))
    to.write_text(run_file(translation), encoding="utf-8")
    todo = len(translation.todo())
    next_task = f"Set the {todo} TODO{'s' * (todo > 1)} listed" if todo else "Read the notes"
    plan = f"raypo plan {to} --cluster 8xH100"
    typer.echo(f"raypo: wrote {to}. {next_task} at its top; then run, with your GPUs: {plan}")
