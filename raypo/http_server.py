"""HTTP servers of raypo: their limits on what a client may send, and their tokens.

A server reads the head of a request for at most `HEAD_S` seconds and 64 KB, and its body for at
most `BODY_S` seconds and `MAX_BODY_BYTES`. Each server runs in one thread with an event loop.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import socket
from collections.abc import Callable
from typing import Any

import h11
import uvicorn
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from typing_extensions import override
from uvicorn.protocols.http.h11_impl import H11Protocol

from raypo.config import ConfigError

MAX_BODY_BYTES = 64 << 20
"""Size limit of a request's body."""
HEAD_S = 30.0
"""Seconds in which the head of a request must arrive, from the start of the connection or from the
first byte of a later request."""
BODY_S = 120.0
"""Seconds in which the body of a request must arrive."""


class BodyError(ValueError):
    """The body of a request is too large or did not arrive. `status` is the HTTP status."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


async def body_of(request: Request) -> bytes:
    """Read the body of a request.

    Raises:
        BodyError: it is too large, too slow or incomplete. At most the limit has been read.
    """
    content, limit = bytearray(), MAX_BODY_BYTES
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.stream():
                content += part
                if len(content) > limit:
                    raise BodyError(f"the body of a request has at most {limit} bytes", 413)
    except TimeoutError:
        raise BodyError(f"the body of a request must arrive in {BODY_S:g} s", 408) from None
    except ClientDisconnect:
        raise BodyError("the client has gone before the end of its request", 400) from None
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
        make_server(app).run(sockets=[listening])


def make_server(app: Any, *, keep_alive_s: int = 5) -> uvicorn.Server:
    """Return a server of an ASGI application with the limits of this module.

    Args:
        app: The ASGI application.
        keep_alive_s: Seconds after which an idle connection is closed.
    """
    # Errors only: a warning about each malformed request would let strangers fill the log.
    config = uvicorn.Config(
        app,
        http=_LimitedProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="error",
        access_log=False,
        timeout_keep_alive=keep_alive_s,
    )
    return uvicorn.Server(config)


class _LimitedProtocol(H11Protocol):
    """Connection that is closed if the head of a request does not arrive in time.

    uvicorn itself would wait forever. h11 limits the size of a head; httptools, which uvicorn
    prefers if it is installed, does not.
    """

    _deadline: asyncio.TimerHandle | None = None

    @override
    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._limit_head()

    @override
    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._limit_head()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._end_limit()

    def _limit_head(self) -> None:
        is_answering = self.conn.our_state not in (h11.IDLE, h11.DONE)
        if is_answering and self.conn.their_state is not h11.IDLE:
            self._end_limit()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(HEAD_S, self.timeout_keep_alive_handler)

    def _end_limit(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
