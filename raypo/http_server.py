"""Helpers that raypo's HTTP servers share."""

from __future__ import annotations

import hmac
import os
import socket

from starlette.datastructures import Headers

from raypo.config import ConfigError


def has_token(headers: Headers, token: str) -> bool:
    """Return whether a request has the bearer token."""
    given = headers.get("Authorization", "").removeprefix("Bearer ")
    return hmac.compare_digest(given.encode(), token.encode())


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket; port 0 means any free port.

    Raises:
        ConfigError: the port is not available.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise ConfigError(
            f"--port ({port}): cannot be listened on at {host} ({os.strerror(error.errno or 0)}). "
            f"Choose another."
        ) from None


def address(host: str, port: int) -> str:
    """Return the URL of a server."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
