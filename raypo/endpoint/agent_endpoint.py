"""HTTP server for the agents of one worker. An API key identifies an episode.

Concurrency. A worker has at most one server, in a daemon thread with its own event loop. This loop
receives requests and sends HTTP responses. Each request is handled by a coroutine in the event loop
of the caller that opened the episode. The coroutine is cancelled if the client disconnects or the
episode ends.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from ray.util import get_node_ip_address

from raypo.cluster.network import is_loopback
from raypo.config import ConfigError
from raypo.endpoint.protocol import Answer, Answering, Wanted

if TYPE_CHECKING:
    import uvicorn

KEEP_ALIVE_S = 600
"""Keep-alive of idle connections in seconds. It is longer than that of clients, so that clients
close connections first."""


class AgentEndpoint:
    """HTTP server, and the episodes that it serves."""

    def __init__(self, host: str, max_model_len: int) -> None:
        """Store the arguments. The server starts when its URL is first read.

        Args:
            host: Address to listen on, `rollout.endpoint_host`.
            max_model_len: Maximum number of prompt and response tokens together.
        """
        self._host, self._max_model_len = host, max_model_len
        self._episodes: dict[str, Answering] = {}
        """Maps the API key of each open episode to the function that handles its requests."""
        self._server: uvicorn.Server | None = None
        self._starting = threading.Lock()
        self._base_url = ""

    @contextmanager
    def open(self, answering: Answering) -> Iterator[str]:
        """Serve an episode within this context, by calls of `answering` in the caller's event loop.

        Yields:
            The API key of the episode.
        """
        key, loop = secrets.token_urlsafe(), asyncio.get_running_loop()

        async def answer(wanted: Wanted) -> Answer:
            there = asyncio.run_coroutine_threadsafe(answering(wanted), loop)
            return await asyncio.wrap_future(there)

        self._episodes[key] = answer
        try:
            yield key
        finally:
            del self._episodes[key]

    def base_url(self) -> str:
        """Return the URL of the server, and start it if necessary. Any thread may call this.

        Raises:
            ConfigError: the host is not an address of this machine.
        """
        from raypo.endpoint.app import app_of  # needs the `serve` extra
        from raypo.http_server import make_server

        with self._starting:
            if self._server is None:
                try:
                    listening = socket.create_server((self._host, 0), backlog=2048)
                except OSError as error:
                    raise ConfigError(
                        f"rollout.endpoint_host ({self._host}): this machine cannot listen on "
                        f"this address: {error}. Set it to 127.0.0.1, to 0.0.0.0, or to an "
                        "address of every worker's node."
                    ) from error
                host = _address_for_others() if self._host == "0.0.0.0" else self._host
                _use_no_proxy(host)
                self._base_url = f"http://{host}:{listening.getsockname()[1]}/v1"
                app = app_of(self._episodes.get, self._max_model_len)
                self._server = make_server(app, keep_alive_s=KEEP_ALIVE_S)
                run = {"target": self._server.run, "kwargs": {"sockets": [listening]}}
                threading.Thread(**run, daemon=True).start()
            return self._base_url

    def close(self) -> None:
        """Stop the server, if it is running."""
        if self._server:
            self._server.should_exit = self._server.force_exit = True


def _address_for_others() -> str:
    """Return this node's address: Ray's, or the network's if Ray is on the loopback interface."""
    host = get_node_ip_address()
    if is_loopback(host):
        with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("192.0.2.1", 9))  # sends nothing; an address of no network (RFC 5737)
            return probe.getsockname()[0]
    return host


def _use_no_proxy(host: str) -> None:
    """Exempt a host from the proxies that clients in this process read from the environment.

    Clients prefer the name in lower case, so both names get the same value.
    """
    hosts = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    if hosts != "*" and host not in hosts.split(","):
        hosts = f"{hosts},{host}".lstrip(",")
    os.environ["no_proxy"] = os.environ["NO_PROXY"] = hosts
