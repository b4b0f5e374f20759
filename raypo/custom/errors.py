"""Texts of exceptions from user code."""

from __future__ import annotations

from contextlib import suppress


def text_of(error: BaseException) -> str:
    """Return the text of an exception, even if its `__str__` raises."""
    with suppress(Exception):
        return str(error)
    return "its message is not available"
