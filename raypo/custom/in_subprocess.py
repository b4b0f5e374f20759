"""Call a function in a Python process of its own, which ends with the call.

The checks before the start import the user's files there. An import may load models, open
connections or start threads, none of which may remain in the process that drives the run.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from raypo.config import ConfigError

T = TypeVar("T")

LIMIT_S = 600.0
"""Default time limit of a call."""
IMPORTING = "importing the functions of the config"
_PROGRAM = (
    "import pickle, sys; sys.path[:] = pickle.load(sys.stdin.buffer); "
    f"from {__name__} import answer; answer()"
)


class CallTooSlowError(ConfigError):
    """A call exceeded its time limit, and its process was killed."""


def descendants(pid: int) -> list[int]:
    """Return the processes that a process has started, and those that they have started."""
    import psutil

    try:
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    except psutil.Error:  # it has ended
        return []


def kill(*pids: int) -> None:
    """Kill processes, of which some may have ended."""
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def call_in_subprocess(
    function: Callable[..., T], *args: Any, limit_s: float | None = None, what: str = ""
) -> T:
    """Call a function in a new process and return its result.

    The process has this one's environment, folder and `sys.path`. What it prints goes to standard
    error.

    Args:
        function: A function of raypo, which is pickled by its name.
        args: Its arguments, which are pickled, as the result is.
        limit_s: Seconds after which the process is killed. None means LIMIT_S.
        what: What the function does, for messages. Empty means that it imports the user's code.

    Raises:
        CallTooSlowError: the function took longer than the limit.
        ConfigError: the function raised it or ended its process.
        Exception: the function's own error.
    """
    limit_s = LIMIT_S if limit_s is None else limit_s
    call = pickle.dumps(sys.path) + pickle.dumps((function, args))
    # The answer is a file and not a pipe: processes that the user's code leaves behind would keep
    # a pipe open.
    with tempfile.TemporaryFile() as file:
        process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM], stdin=subprocess.PIPE, stdout=file
        )
        try:
            process.communicate(call, timeout=limit_s)
        except subprocess.TimeoutExpired:
            remedy = (
                "Load models in the first call of a function, and not when its file is imported."
            )
            raise CallTooSlowError(
                f"{what or IMPORTING} took longer than {limit_s:g} s. "
                + (remedy if not what else "Find out why it does not answer.")
            ) from None
        finally:  # also after Ctrl-C
            if process.poll() is None:
                kill(*descendants(process.pid), process.pid)
                process.wait()
        status = process.returncode
        file.seek(0)
        content = file.read()
    if not content:
        remedy = "Look there for the cause." if what else "Import their files in Python to find it."
        raise ConfigError(
            f"{what or IMPORTING} ended the process that checks {'it' if what else 'them'} (status "
            f"{status}). Its output is above. {remedy}"
        )
    result, error = pickle.loads(content)
    if error is not None:
        raise error
    return result


def answer() -> None:
    """Read a call from standard input, and write its result or error to standard output."""
    with os.fdopen(os.dup(1), "wb") as output:
        os.dup2(2, 1)  # what the user's code prints is no part of the answer
        result = error = None
        try:
            function, args = pickle.load(sys.stdin.buffer)
            result = function(*args)
        except Exception as raised:
            error = raised
        try:
            answered = pickle.dumps((result, error))
            pickle.loads(answered)  # some errors are pickled and cannot be made again
        except Exception:
            answered = pickle.dumps((None, ConfigError(f"{type(error).__name__}: {error}")))
        output.write(answered)
    sys.stdout.flush()
    os._exit(0)  # without waiting for threads of the user's code
