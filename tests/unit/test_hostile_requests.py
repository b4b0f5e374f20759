"""Raw hostile HTTP against raypo's servers, live: wrong lengths, bombs, escapes, slow bodies."""

from __future__ import annotations

import json
import logging
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import httpx
import numpy as np
import psutil
import pytest

from raypo import http_server
from raypo.endpoint.app import app_of
from raypo.endpoint.protocol import Answer, Answered, ChatRequest, Wanted
from raypo.http_server import make_server
from raypo.report.live_page import make_app as make_page_app
from raypo.report.page import Page, Table
from raypo.rewards.server import make_app as make_reward_app
from raypo.serving.requests import Completion
from raypo.types import Rollout

KEY = "the-right-key"
SEED, NUM_MUTATED = 58, 150
MAX_GROWTH = 200 << 20
"""Bytes by which hostile requests may enlarge the process."""


def length_of(rollouts: list[Rollout]) -> list[float]:
    return [float(len(rollout.response)) for rollout in rollouts]


async def says_yes(wanted: Wanted) -> Answer:
    num_prompts = 1 if isinstance(wanted, ChatRequest) else len(wanted.prompts)
    completion = Completion(np.array([1]), np.array([-0.5]), "stop", 1)
    return [[1]] * num_prompts, [Answered("yes", completion, [], [])] * (num_prompts * wanted.n)


def page() -> Page:
    made = Page("run")
    made.section("Now").add(Table(["step"], [[3]]))
    return made


SAMPLES = {"samples": [{"prompt": "a", "response": "bcd"}]}
CHAT = {"messages": [{"role": "user", "content": "hi"}]}
SERVERS: dict[str, tuple[Callable[[], Any], str, str, Any]] = {
    "reward": (lambda: make_reward_app(length_of, name="n", token=KEY), "POST", "/score", SAMPLES),
    "open reward": (
        lambda: make_reward_app(length_of, name="n", token=None),
        "POST",
        "/score",
        SAMPLES,
    ),
    "endpoint": (lambda: app_of({KEY: says_yes}.get, 64), "POST", "/v1/chat/completions", CHAT),
    "page": (lambda: make_page_app(page, lambda: "1", token=KEY), "GET", "/", None),
}
"""By name: the application, and a request that it answers with 200."""


class Target:
    """A live server, and the request that it answers."""

    def __init__(self, name: str, port: int, key: str = KEY) -> None:
        self.name, self.port, self.key = name, port, key
        _, self.method, self.path, self.body = SERVERS[name]

    def head(self, *lines: str, key: str | None = None) -> bytes:
        key = self.key if key is None else key
        first = f"{self.method} {self.path} HTTP/1.1"
        own = [first, "Host: here", f"Authorization: Bearer {key}", *lines]
        return "\r\n".join(own).encode("utf-8", "surrogateescape") + b"\r\n\r\n"

    def request(self, content: bytes | None = None, key: str | None = None) -> bytes:
        if content is None:
            content = b"" if self.body is None else json.dumps(self.body).encode()
        return self.head(f"Content-Length: {len(content)}", key=key) + content

    def status(self, content: bytes, *, timeout_s: float = 0.2) -> int | None:
        """Return the status of the answer, or None if the server closes or waits for more."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=5) as connection:
            with suppress(ConnectionError):  # the server may close before it has read everything
                connection.sendall(content)
            connection.settimeout(timeout_s)
            try:
                answer = connection.recv(1 << 10)
            except (TimeoutError, ConnectionError):
                return None
        return int(answer[9:12]) if answer else None

    def serves(self) -> bool:
        url = f"http://127.0.0.1:{self.port}{self.path}"
        headers = {"Authorization": f"Bearer {self.key}"}
        return httpx.request(self.method, url, json=self.body, headers=headers).status_code == 200


@contextmanager
def serving(name: str) -> Iterator[Target]:
    with http_server.listen("127.0.0.1", 0) as listening:
        server = make_server(SERVERS[name][0]())
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            yield Target(name, listening.getsockname()[1])
        finally:
            server.should_exit = server.force_exit = True
            thread.join()


@pytest.fixture(params=SERVERS)
def target(request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture) -> Iterator[Target]:
    """Each server; afterwards it still serves, has not grown, and has logged no error."""
    with serving(request.param) as target:
        assert target.serves()
        before = psutil.Process().memory_info().rss
        yield target
        assert target.serves()
        assert psutil.Process().memory_info().rss - before < MAX_GROWTH
    records = [*caplog.get_records("call"), *caplog.records]
    assert not [record for record in records if record.levelno >= logging.ERROR]


def hostile_requests(target: Target) -> dict[str, bytes]:
    first = f"{target.method} {target.path} HTTP/1.1\r\nHost: here\r\n".encode()
    chunked, right = target.head("Transfer-Encoding: chunked"), target.request()
    deep = b"[" * 100_000
    return {
        "length too small": target.head("Content-Length: 3") + b"{}" * 50,
        "length without a body": target.head("Content-Length: 99999999999"),
        "negative length": target.head("Content-Length: -1") + b"{}",
        "no number as length": target.head("Content-Length: 0x10") + b"{}",
        "huge length": target.head(f"Content-Length: {'9' * 5000}") + b"{}",
        "two lengths": target.head("Content-Length: 2", "Content-Length: 3") + b"{} ",
        "length and chunks": target.head("Content-Length: 2", "Transfer-Encoding: chunked") + b"0",
        "unknown encoding": target.head("Transfer-Encoding: gzip, chunked") + b"0\r\n\r\n",
        "chunk of 2^64 bytes": chunked + b"FFFFFFFFFFFFFFFF\r\n{",
        "chunk of no size": chunked + b"zz\r\n{}\r\n0\r\n\r\n",
        "endless chunk extension": chunked + b"1;" + b"x" * 300_000,
        "many small chunks": chunked + b"1\r\n \r\n" * 20_000 + b"0\r\n\r\n",
        "endless trailers": chunked + b"0\r\n" + b"a: b\r\n" * 50_000,
        "huge header": target.head(f"X: {'x' * 1_000_000}"),
        "many headers": target.head(*(f"X{number}: 1" for number in range(100_000))),
        "endless header": first + b"X: " + b"x" * 1_000_000,
        "endless target": b"GET /" + b"a" * 1_000_000,
        "deep JSON": target.request(deep),
        "deep JSON in a known field": target.request(b'{"messages": ' + deep),
        "deep objects": target.request(b'{"samples":' * 50_000),
        "unknown method": right.replace(target.method.encode(), b"BREW", 1),
        "trace": right.replace(target.method.encode(), b"TRACE", 1),
        "connect": b"CONNECT here:80 HTTP/1.1\r\nHost: here\r\n\r\n",
        "path traversal": right.replace(target.path.encode(), b"/../../../../etc/passwd", 1),
        "escaped path": right.replace(target.path.encode(), b"/%2e%2e/%2e%2e/etc/passwd", 1),
        "null in the path": right.replace(target.path.encode(), b"/%00/etc/passwd", 1),
        "backslashes": right.replace(target.path.encode(), b"/..\\..\\etc\\passwd", 1),
        "whole address": right.replace(target.path.encode(), b"http://other/etc/passwd", 1),
        "bytes in the path": right.replace(target.path.encode(), b"/\xff\xfe\x80", 1),
        "bytes in a header": target.head("X: \udcff\udc80") + b"",
        "bytes in the key": target.request(key="\udcff\udc80"),
        "unicode in the key": target.request(key="ключ\U0001f511"),
        "unicode in the query": right.replace(b" HTTP", b"?token=%ff%ed%a0%80&a=%00 HTTP", 1),
        "surrogates": target.request(b'{"samples": [{"prompt": "\\ud800", "response": ""}]}'),
        "invalid UTF-8": target.request(b'{"messages": [{"role": "\xff\xfe"}]}'),
        "UTF-16": target.request(json.dumps(SAMPLES).encode("utf-16")),
        "not finite": target.request(b'{"samples": NaN, "messages": Infinity}'),
        "huge number": target.request(b'{"n": ' + b"9" * 100_000 + b', "messages": [{}]}'),
        "no JSON": target.request(b"\x00\x1b[2J"),
        "websocket": target.head(
            "Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Key: a"
        ),
        "HTTP/0.9": f"{target.method} {target.path}\r\n\r\n".encode(),
        "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00" * 100,
        "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 500,
        "line feeds only": right.replace(b"\r\n", b"\n"),
        "folded header": first + b"X: a\r\n b\r\n\tc\r\n\r\n",
        "split header": target.head("X: a\r\n\r\nGET / HTTP/1.1"),
        "many in a row": target.request(b"{") * 200,
    }


def is_fine(name: str, target: Target) -> bool:
    """Return True if a request is odd but right. The page reads no body."""
    if name in ("bytes in the key", "unicode in the key"):
        return "open" in target.name
    return target.name == "page" or name in ("line feeds only", "unicode in the query")


def test_hostile_requests_get_an_error_and_leave_the_server_whole(target: Target):
    for name, content in hostile_requests(target).items():
        status = target.status(content)
        is_refused = status is None or 400 <= status < 500
        assert is_refused or (status == 200 and is_fine(name, target)), (name, status)


def test_mutated_requests_are_answered_or_refused(target: Target):
    generator, right = random.Random(SEED), target.request()
    for _ in range(NUM_MUTATED):
        content = bytearray(right)
        for _ in range(generator.randint(1, 8)):
            first = generator.randrange(len(content))
            last = first + generator.randint(0, 5)
            content[first:last] = generator.randbytes(generator.randint(0, 5))
        status = target.status(bytes(content), timeout_s=0.02)
        assert status is None or status < 500, bytes(content)


@pytest.mark.parametrize("target", [name for name in SERVERS if "open" not in name], indirect=True)
def test_no_request_without_the_key_is_answered(target: Target):
    wrong = ["", "x", KEY[:-1], KEY + "x", KEY.upper(), "null", "\u212aey", f"{KEY}\x00"]
    for key in wrong:
        assert target.status(target.request(key=key)) in (400, 401), key
    without = target.request().replace(b"Authorization", b"X-Authorization")
    assert target.status(without) == 401
    in_the_path = without.replace(target.path.encode(), f"{target.path}?key={KEY}".encode(), 1)
    assert target.status(in_the_path) == 401


def test_bytes_that_trickle_in_end_the_connection(target: Target, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(http_server, "HEAD_S", 0.3)
    monkeypatch.setattr(http_server, "BODY_S", 0.3)
    beginnings = {
        "nothing": b"",
        "head": b"GET / HTTP/1.1\r\nX: ",
        "later head": target.request() + b"GET / HTTP/1.1\r\nX: ",
        "body": target.head("Content-Length: 99999"),
        "body of a refused request": target.head("Content-Length: 99999", key="wrong"),
        "chunks": target.head("Transfer-Encoding: chunked") + b"FFFF\r\n",
    }
    for name, beginning in beginnings.items():
        with socket.create_connection(("127.0.0.1", target.port), timeout=0.05) as connection:
            connection.sendall(beginning)
            deadline, received, is_open = time.monotonic() + 3, b"", True
            while is_open and time.monotonic() < deadline:
                try:
                    if name != "nothing":
                        connection.sendall(b"x")
                    part = connection.recv(1 << 16)
                    received += part
                    is_open = part != b""
                except TimeoutError:
                    continue
                except ConnectionError:
                    is_open = False
        assert not is_open, (name, received)


def test_a_client_that_hangs_up_in_its_body_is_no_error(target: Target):
    for _ in range(5):
        with socket.create_connection(("127.0.0.1", target.port)) as connection:
            connection.sendall(target.head("Content-Length: 99") + b"{")
            time.sleep(0.02)


@pytest.mark.parametrize("target", ["reward", "endpoint"], indirect=True)
def test_a_body_of_many_errors_costs_little(target: Target):
    """A validator that collects all errors would take minutes and many GB for the largest body."""
    count = 300_000
    bodies = [
        {"samples": [1] * count},
        {"samples": [{"prompt": "", "response": "", "prompt_ids": ["a"] * count}]},
        {"messages": [1] * count},
        {"prompt": [[[]]] * count},
        {f"x{number}": 1 for number in range(count)},
    ]
    for body in bodies:
        content = target.request(json.dumps(body).encode())
        begin = sum(psutil.Process().cpu_times()[:2])
        status = target.status(content, timeout_s=60)
        assert status is not None
        assert 400 <= status < 500
        assert sum(psutil.Process().cpu_times()[:2]) - begin < 4
