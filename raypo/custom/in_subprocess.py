"""Call a function in a Python process of its own, which ends with the call.

The checks before the start import the user's files there. An import may load models, open
connections or start threads, none of which may remain in the process that drives the run.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any, TypeVar

from raypo.config import ConfigError

T = TypeVar("T")

LIMIT_S = 600.0
"""Default time limit of a call."""
_PROGRAM = (
    "import pickle, sys; sys.path[:] = pickle.load(sys.stdin.buffer); "
    f"from {__name__} import answer; answer()"
)


class CallTooSlowError(ConfigError):
    """A call exceeded its time limit, and its process was killed."""


def call_in_subprocess(function: Callable[..., T], *args: Any, limit_s: float | None = None) -> T:
    """Call a function in a new process and return its result.

    The process has this one's environment, folder and `sys.path`. What it prints goes to standard
    error.

    Args:
        function: A function of raypo, which is pickled by its name.
        args: Its arguments, which are pickled, as the result is.
        limit_s: Seconds after which the process is killed. None means LIMIT_S.

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
        try:
            status = subprocess.run(
                [sys.executable, "-c", _PROGRAM], input=call, stdout=file, timeout=limit_s
            ).returncode
        except subprocess.TimeoutExpired:
            raise CallTooSlowError(
                f"importing the functions of the config took longer than {limit_s:g} s. Load "
                "models in the first call of a function, and not when its file is imported."
            ) from None
        file.seek(0)
        content = file.read()
    if not content:
        raise ConfigError(
            "importing the functions of the config ended the process that checks them (status "
            f"{status}). Its output is above. Import their files in Python to find the cause."
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
