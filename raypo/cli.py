"""The `raypo` command. Wrong input is told and ends with status 2 before anything heavy loads."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

FAILED, WRONG_INPUT, INTERRUPTED = 1, 2, 130

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Align language models with PPO on Ray Train, vLLM and DeepSpeed.",
)


@app.callback()
def _root() -> None:
    """Keeps `train` a word of its own while it is the only command."""


@contextmanager
def exit_status() -> Iterator[None]:
    """What a command raises becomes a text for people and an exit status."""
    from raypo.config import ConfigError

    try:
        yield
    except ConfigError as error:
        _tell(str(error))
        raise typer.Exit(WRONG_INPUT) from None
    except typer.Exit:
        raise
    except KeyboardInterrupt:
        _tell("stopped at once; the same command resumes from the last checkpoint.")
        sys.stdout.flush()
        os._exit(INTERRUPTED)  # Ray's threads must not hold the process back
    except Exception as error:
        raise typer.Exit(_tell_failure(error)) from None


def _tell(text: str) -> None:
    typer.echo("\n".join(f"raypo: {line}" for line in text.splitlines()), err=True)


def _tell_failure(error: Exception) -> int:
    """Tell an error whole; input that only the workers could see is told like other input."""
    import traceback

    from raypo.config import ConfigError

    failures = getattr(error, "worker_failures", None)
    if not failures:
        typer.echo("".join(traceback.format_exception(error)).rstrip(), err=True)
        return FAILED
    causes = [getattr(failure, "_base_exc", failure) for failure in failures.values()]
    if all(isinstance(cause, ConfigError) for cause in causes):
        _tell(str(causes[0]))
        return WRONG_INPUT
    typer.echo(str(error), err=True)  # it holds the workers' tracebacks
    return FAILED


@app.command()
@exit_status()
def train(
    config: Annotated[Path, typer.Argument(help="A run config (YAML).")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="key=value, like ppo.kl.coef=0.02")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start over; removes the run.")] = False,
) -> None:
    """Start a run, resume one that was interrupted, or say that it is finished."""
    from raypo.checks import check_inputs, check_run_folder, is_finished
    from raypo.config import PPOConfig
    from raypo.config.paths import storage_path
    from raypo.metrics.run_files import RunFiles

    run = PPOConfig.load(config, overrides)
    check_inputs(run)
    files = RunFiles(storage_path(run), run.name)
    if fresh:
        with files.lock():
            files.remove()
    check_run_folder(run, files)
    if is_finished(files):
        typer.echo(
            f"raypo: {run.name} is finished, files in {files.location}; --fresh starts over."
        )
        return
    from raypo.trainer import PPOTrainer  # Ray and torch from here on

    result = PPOTrainer(run).fit()
    if (result.return_value or {}).get("status") == "interrupted":
        raise typer.Exit(INTERRUPTED)


def main() -> None:
    """Run the command and end the process with its exit status."""
    app()


if __name__ == "__main__":
    main()
