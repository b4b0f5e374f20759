"""Errors of user code: text, the user's part of the traceback, and a common base class."""

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
    """The user's code raised an error or returned an unusable value. The text is one line."""

    user_frames: str = ""
    """The user's part of the traceback. Empty if the code returned normally."""
    log: str = ""
    """Path of the log file with the whole traceback. Empty if there is none."""

    @classmethod
    def caused_by(cls, error: BaseException, text: str) -> Self:
        """Return an error with this text and with the user's frames of the causing error."""
        user_error = cls(text)
        user_error.user_frames = user_frames(error)
        return user_error

    @property
    def line(self) -> str:
        """The text, followed by the log file with the whole traceback if there is one."""
        return f"{self} The whole traceback: {self.log}" if self.log else str(self)


def text_of(error: BaseException) -> str:
    """Return the text of an exception, even if its `__str__` raises an exception."""
    with suppress(Exception):
        return str(error)
    return "its message is not available"


def user_frames(error: BaseException) -> str:
    """Return the part of an exception's traceback in the user's files, as Python prints it.

    Frames of raypo, of Python and of installed packages are omitted. If no other frames are left,
    the frames of packages are returned, because the function then comes from a package.
    """
    if isinstance(remote_frames := getattr(error, "user_frames", None), str):
        return remote_frames
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((_RAYPO, "<frozen"))
    ]
    own_frames = [frame for frame in frames if not is_library(frame.filename)]
    return "".join(traceback.format_list(own_frames or frames))


def located_text(error: BaseException) -> str:
    """Return the class and text of an exception, and the line of user code that raised it."""
    text = f"{type(error).__name__}: {text_of(error)}"
    lines = [line.strip() for line in user_frames(error).splitlines() if line.startswith("  File ")]
    return f"{text} ({lines[-1]})" if lines else text


def is_library(filename: str) -> bool:
    """Return True for a file of Python itself or of an installed package."""
    return filename.startswith(_LIBRARIES)
