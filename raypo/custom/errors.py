"""Errors of user code: their text, the user's part of their traceback, and a common base class."""

from __future__ import annotations

import os
import sysconfig
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Self

_RAYPO = f"{Path(__file__).parents[1]}{os.sep}"
_LIBRARIES = ("<frozen", *{sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
"""Folders of Python's own modules and of installed packages."""


class UserCodeError(RuntimeError):
    """The user's code raised an error, or returned an unusable value. The text is one line."""

    user_frames: str = ""
    """The user's part of the traceback. Empty if the code returned normally."""
    log: str = ""
    """Log file with the whole traceback. Empty if there is none."""

    @classmethod
    def caused_by(cls, error: BaseException, text: str) -> Self:
        """Return an error with this text, and with the user's frames of its cause."""
        made = cls(text)
        made.user_frames = user_frames(error)
        return made

    @property
    def line(self) -> str:
        """The text, and the log file with the whole traceback."""
        return f"{self} The whole traceback: {self.log}" if self.log else str(self)


def text_of(error: BaseException) -> str:
    """Return the text of an exception, even if its `__str__` raises."""
    with suppress(Exception):
        return str(error)
    return "its message is not available"


def user_frames(error: BaseException) -> str:
    """Return the part of an exception's traceback that is in the user's files, as Python prints it.

    Frames of raypo, of Python and of installed packages are left out. If all frames are such, those
    of packages are returned: the function then comes from one of them.
    """
    if isinstance(of_another_process := getattr(error, "user_frames", None), str):
        return of_another_process
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((_RAYPO, "<frozen"))
    ]
    own = [frame for frame in frames if not is_library(frame.filename)]
    return "".join(traceback.format_list(own or frames))


def located_text(error: BaseException) -> str:
    """Return the class and text of an exception, and the line of the user's that raised it."""
    text = f"{type(error).__name__}: {text_of(error)}"
    lines = [line.strip() for line in user_frames(error).splitlines() if line.startswith("  File ")]
    return f"{text} ({lines[-1]})" if lines else text


def is_library(filename: str) -> bool:
    """Return True for a file of Python itself or of an installed package."""
    return filename.startswith(_LIBRARIES)
