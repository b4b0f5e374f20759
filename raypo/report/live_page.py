"""Server of a single report page that updates itself, for `raypo monitor`.

The page's script requests a newer version every few seconds (`templates/page.js`). The server
renders the page in a thread, if the run's files have changed since the last time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from anyio.to_thread import run_sync
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from raypo.http_server import has_token, is_secret
from raypo.report.page import Page

_HEADERS = {"Cache-Control": "no-store", "Referrer-Policy": "no-referrer"}


def make_app(make_page: Callable[[], Page], version: Callable[[], str], *, token: str) -> Starlette:
    """Return the application. It is read-only, and GET / returns the page.

    Args:
        make_page: Function that builds the page from the run's files.
        version: Function that returns a string, which differs after the files have changed.
        token: Token that a request must have, as `?token=...` in the address or as bearer token.
    """
    lock = threading.Lock()
    made: dict[str, Page] = {}

    def current(known_version: str | None) -> str | None:
        with lock:  # concurrent requests share one page
            newest = version()
            if newest == known_version:
                return None
            if newest not in made:
                page = make_page()
                page.version = newest
                made.clear()
                made[newest] = page
            # A browser that knows a version has plotly.js already, the largest part of the page.
            return made[newest].html(with_plotly=known_version is None)

    async def answer(request: Request) -> Response:
        sent = request.query_params.get("token", "")
        if not (is_secret(sent, token) or has_token(request.headers, token)):
            return PlainTextResponse(
                "The token is missing or wrong: open the address that raypo monitor has printed.\n",
                401,
            )
        html = await run_sync(current, request.headers.get("If-None-Match"))
        if html is None:
            return Response(status_code=304, headers=_HEADERS)
        return Response(html, media_type="text/html", headers=_HEADERS)

    return Starlette(routes=[Route("/", answer, methods=["GET"])])
