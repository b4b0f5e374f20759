"""HTTP server that answers as a test says."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@contextmanager
def scripted(
    answer: Callable[[dict[str, Any], int], tuple[int, Any]],
    headers: dict[str, str] | None = None,
) -> Iterator[tuple[str, list]]:
    """A server that does what `answer(body, number of the request)` says: status and JSON."""
    requests: list[dict[str, Any]] = []
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                requests.append(body)
                number = len(requests)
            status, content = answer(body, number)
            if status == 0:  # hang up without an answer
                self.close_connection = True
                return
            data = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            with suppress(BrokenPipeError, ConnectionResetError):  # the client gave up
                self.wfile.write(data)

        def log_message(self, format: str, *_: Any) -> None:
            pass

    with served(Handler) as url:
        yield f"{url}/score", requests


@contextmanager
def served(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """URL of a server of this process with this handler."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
