"""Temporary folders that a later process removes if their owner was killed.

Ray Train ends its workers with `ray.kill`, which runs no exit handler. The name of a folder
therefore identifies the process that owns it: `raypo-run-<host>-<pid namespace>-<pid>-<random>`.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import tempfile
from functools import cache
from pathlib import Path

_PREFIX = "raypo-run-"


def temporary_folder() -> Path:
    """Create a temporary folder of this process. The first call removes those of dead processes."""
    remove_abandoned()
    return Path(tempfile.mkdtemp(prefix=f"{_prefix_here()}{os.getpid()}-"))


@cache
def remove_abandoned() -> None:
    """Remove the folders of dead processes of this host and pid namespace. Errors are ignored."""
    name = re.compile(rf"{re.escape(_prefix_here())}(\d+)-\w+")
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        if (match := name.fullmatch(path.name)) and _is_dead(int(match[1])):
            shutil.rmtree(path, ignore_errors=True)  # of another user, or removed at the same time


def _prefix_here() -> str:
    """Return the beginning of the names, with all that makes a process id unique.

    Containers may share their temporary folder, and even the host's name.
    """
    try:
        namespace = os.stat("/proc/self/ns/pid").st_ino
    except OSError:  # not Linux
        namespace = 0
    return f"{_PREFIX}{socket.gethostname()}-{namespace}-"


def _is_dead(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        pass  # it is alive, but of another user
    return False
