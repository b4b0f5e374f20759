"""Conversion of a command's exceptions into messages and exit statuses."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer

FAILED, WRONG_INPUT, INTERRUPTED = 1, 2, 130


@contextmanager
def exit_status(*, resumes: bool = False) -> Iterator[None]:
    """Turn a command's exceptions into a message and an exit status.

    Args:
        resumes: Whether the message may say that the same command resumes the interrupted work.
    """
    from raypo.config import ConfigError

    try:
        yield
    except ConfigError as error:
        tell(str(error))
        raise typer.Exit(WRONG_INPUT) from None
    except typer.Exit:
        raise
    except KeyboardInterrupt:
        resume_text = "; the same command resumes from the last checkpoint" if resumes else ""
        tell(f"stopped at once{resume_text}.")
        sys.stdout.flush()
        os._exit(INTERRUPTED)  # a normal exit could wait for Ray's threads
    except Exception as error:
        raise typer.Exit(_report_failure(error)) from None


def tell(text: str) -> None:
    """Write lines to standard error, each with the prefix `raypo:`, without control characters."""
    from raypo.tracking.console import printable

    lines = printable(text).splitlines()
    typer.echo("\n".join(f"raypo: {line}" for line in lines), err=True)


def _report_failure(error: Exception) -> int:
    """Write an error with its traceback, and return the exit status.

    Wrong input that only workers can detect is reported like other wrong input.
    """
    import traceback

    from raypo.config import ConfigError
    from raypo.custom.errors import UserCodeError
    from raypo.ray_internals import cause_of
    from raypo.tracking.console import printable

    start_error = getattr(error, "controller_failure", None)
    if isinstance(start_error, ConfigError):  # raised in a worker; Ray has added a traceback
        tell(str(getattr(start_error, "cause", start_error)))
        return WRONG_INPUT
    failures = getattr(error, "worker_failures", None)
    causes = [cause_of(failure) for failure in failures.values()] if failures else [error]
    if all(isinstance(cause, ConfigError) for cause in causes):
        tell(str(causes[0]))
        return WRONG_INPUT
    for cause in causes:
        if isinstance(cause, UserCodeError):
            typer.echo(printable(cause.user_frames), err=True, nl=False)
            tell(cause.line)
            return FAILED
    # The text of Ray Train's error includes the workers' tracebacks.
    text = str(error) if failures else "".join(traceback.format_exception(error)).rstrip()
    typer.echo(printable(text), err=True)
    return FAILED
