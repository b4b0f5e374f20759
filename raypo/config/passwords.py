"""Passwords and keys in the values of a run file. A run writes its config to its folder."""

from __future__ import annotations

import re

_PORT = r"(?!\d+(?:[/?#]|$))"
_USER = re.compile(rf"(?<=://)(?:[^/?#\s]+|[^/:@\s]+:{_PORT}[^@\s]*)@")
"""User and password of a URI. A password may contain / although it should be escaped."""
_PASSWORD = re.compile(rf"(?<=://)[^/:@\s]+:{_PORT}[^@\s]+@")
_OPTION = re.compile(
    r"([?&](?:[\w.-]*(?:(?:api|access|secret|account|private|shared|subscription)[_-]?key"
    r"|token|secret|password|signature)|key|sig)=)[^&\s]+",
    re.IGNORECASE,
)
_NAME = re.compile(r"(.*\.)?((hf|auth|access)_token|(api|secret|access)_key|password)")
"""Names of keys, such as arguments of vLLM, whose values are secrets."""
_PLACEHOLDERS = ("", "empty", "none", "null", "dummy")
"""Values that stand for no key, as clients of servers without keys need one."""


def without_passwords(text: str) -> str:
    """Return a text without users, passwords and keys in its URIs."""
    return _OPTION.sub(r"\1***", _USER.sub("", text))


def has_password(key: str, text: str) -> bool:
    """Return True if the value of a config key contains a password or is one."""
    if text.strip().lower() in _PLACEHOLDERS:
        return False
    return bool(_PASSWORD.search(text) or _OPTION.search(text) or _NAME.fullmatch(key))
