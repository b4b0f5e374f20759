"""Call a function in a separate Python process, which ends after the call.

The checks before a start import the user's files there. An import may load models, open connections
or start threads, none of which may remain in the run's driver process.
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

DEFAULT_LIMIT_S = 600.0
"""Default time limit of a call, in seconds."""
IMPORTING = "importing the functions of the config"
_PROGRAM = (
    "import pickle, sys; sys.path[:] = pickle.load(sys.stdin.buffer); "
    f"from {__name__} import run_call; run_call()"
)


class CallTooSlowError(ConfigError):
    """A call exceeded its time limit, and its process was killed."""


def descendants(pid: int) -> list[int]:
    """Return the ids of all child processes of a process, including their own children."""
    import psutil

    try:
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    except psutil.Error:  # the process has ended
        return []


def kill(*pids: int) -> None:
    """Kill processes, some of which may already have ended."""
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def call_in_subprocess(
    function: Callable[..., T], *args: Any, limit_s: float | None = None, what: str = ""
) -> T:
    """Call a function in a new process and return its result.

    The process inherits environment, working directory and `sys.path`. Its output goes to standard
    error.

    Args:
        function: A function of raypo, which is pickled by name.
        args: Arguments. They and the result must be picklable.
        limit_s: Seconds after which the process is killed. None means DEFAULT_LIMIT_S.
        what: Description of the function's task, for messages. Empty means that it imports the
            user's code.

    Raises:
        CallTooSlowError: the function took longer than the limit.
        ConfigError: the function raised it, or it ended its process.
        Exception: the function's own error.
    """
    limit_s = DEFAULT_LIMIT_S if limit_s is None else limit_s
    call = pickle.dumps(sys.path) + pickle.dumps((function, args))
    # Use a file instead of a pipe for the reply, because processes that the user's code leaves
    # behind would keep a pipe open.
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
        exit_code = process.returncode
        file.seek(0)
        reply = file.read()
    if not reply:
        remedy = "Look there for the cause." if what else "Import their files in Python to find it."
        raise ConfigError(
            f"{what or IMPORTING} ended the process that checks {'it' if what else 'them'} (status "
            f"{exit_code}). Its output is above. {remedy}"
        )
    result, error = pickle.loads(reply)
    if error is not None:
        raise error
    return result


def run_call() -> None:
    """Read a call from standard input, and write its result or error to standard output."""
    with os.fdopen(os.dup(1), "wb") as output:
        os.dup2(2, 1)  # keep the output of the user's code out of the reply
        result = error = None
        try:
            function, args = pickle.load(sys.stdin.buffer)
            result = function(*args)
        except Exception as raised:
            error = raised
        try:
            reply = pickle.dumps((result, error))
            pickle.loads(reply)  # some errors can be pickled but not unpickled
        except Exception:
            reply = pickle.dumps((None, ConfigError(f"{type(error).__name__}: {error}")))
        output.write(reply)
    sys.stdout.flush()
    os._exit(0)  # do not wait for threads of the user's code
