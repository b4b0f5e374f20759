"""What exceptions of the user's code say."""

from __future__ import annotations

from contextlib import suppress


def text_of(error: BaseException) -> str:
    """The text of an exception, whose `__str__` may fail itself."""
    with suppress(Exception):
        return str(error)
    return "its text cannot be had"
