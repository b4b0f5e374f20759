"""The `raypo` command. Wrong input is told and ends with status 2 before anything heavy loads."""

from __future__ import annotations

import typer

from raypo.cli.train import train

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Align language models with PPO on Ray Train, vLLM and DeepSpeed.",
)
app.command()(train)


@app.callback()
def _root() -> None:
    """Keeps `train` a word of its own while it is the only command."""


def main() -> None:
    """Run the command and end the process with its exit status."""
    app()
