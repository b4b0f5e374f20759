"""Passwords and keys in the values of a run file. A run writes its config to its folder."""

from __future__ import annotations

import re

_USER = re.compile(r"(?<=://)(?:[^/\s]+|[^/:@\s]+:(?!\d+/)[^@\s]*)@")
"""User and password of a URI. A password may contain / although it should be escaped."""
_PASSWORD = re.compile(r"(?<=://)[^/:@\s]+:(?!\d+/)[^@\s]+@")
_OPTION = re.compile(
    r"([?&][\w.-]*(?:key|token|secret|password|signature|sig)=)[^&\s]+", re.IGNORECASE
)
_NAME = re.compile(r"(.*\.)?((hf|auth|access)_token|(api|secret|access)_key|password)")
"""Names of keys, such as arguments of vLLM, whose values are secrets."""


def without_passwords(text: str) -> str:
    """Return a text without users, passwords and keys in its URIs."""
    return _OPTION.sub(r"\1***", _USER.sub("", text))


def has_password(key: str, text: str) -> bool:
    """Return True if the value of a config key contains a password or is one."""
    return bool(_PASSWORD.search(text) or _OPTION.search(text) or _NAME.fullmatch(key))
