"""Helpers that raypo's HTTP servers share."""

from __future__ import annotations

import hmac
import os
import socket
from collections.abc import Callable
from typing import Any

import uvicorn
from starlette.datastructures import Headers
from starlette.requests import Request

from raypo.config import ConfigError

MAX_BODY_BYTES = 64 << 20
"""Size limit of a request's body."""


class BodyTooLargeError(ValueError):
    """The body of a request is larger than `MAX_BODY_BYTES`."""


async def body_of(request: Request) -> bytes:
    """Read the body of a request.

    Raises:
        BodyTooLargeError: it is too large. At most the limit has been read.
    """
    content = bytearray()
    async for part in request.stream():
        content += part
        if len(content) > MAX_BODY_BYTES:
            raise BodyTooLargeError(f"the body of a request has at most {MAX_BODY_BYTES} bytes")
    return bytes(content)


def has_token(headers: Headers, token: str) -> bool:
    """Return True if a request's Authorization header carries `token` as its bearer token."""
    return is_secret(headers.get("Authorization", "").removeprefix("Bearer "), token)


def is_secret(given: str, secret: str) -> bool:
    """Return True if a string equals the secret. The comparison takes constant time."""
    return hmac.compare_digest(given.encode(), secret.encode())


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
            f"--port ({port}): the server cannot listen on this port at {host} "
            f"({os.strerror(error.errno or 0)}). Choose another."
        ) from None


def address(host: str, port: int) -> str:
    """Return the URL of a server."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def run_server(app: Any, *, host: str, port: int, ready: Callable[[str], None]) -> None:
    """Serve an ASGI application until SIGINT or SIGTERM.

    Args:
        app: The ASGI application.
        host: Address to listen on.
        port: Port to listen on.
        ready: Callback `(address)`, called once the socket listens.

    Raises:
        ConfigError: the port cannot be opened.
    """
    with listen(host, port) as listening:
        ready(address(host, listening.getsockname()[1]))
        config = uvicorn.Config(app, log_level="warning", access_log=False)
        uvicorn.Server(config).run(sockets=[listening])
