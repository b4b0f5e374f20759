"""OpenAI-compatible HTTP endpoints of the policies: chat completions, completions, models."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Protocol, TypeVar

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from raypo.endpoint.protocol import (
    Answered,
    ChatRequest,
    CompletionRequest,
    RequestError,
    Wanted,
    answer_of,
    read,
)

T = TypeVar("T")


class Session(Protocol):
    """A policy, selected by an API key."""

    name: str
    """Model name in `GET /v1/models`."""

    @property
    def max_model_len(self) -> int:
        """Maximum number of prompt and response tokens together."""
        ...

    async def answer(self, wanted: Wanted) -> tuple[list[list[int]], list[Answered]]:
        """Return the ids of a request's prompts, and `n` responses to each, in order.

        If the caller is cancelled, the request is aborted.
        """
        ...


def app_of(session_of: Callable[[Request], Session | None]) -> Starlette:
    """Return the application: POST /v1/chat/completions and /v1/completions, GET /v1/models.

    Args:
        session_of: Returns the session for the API key of a request, or None for a wrong key.
    """

    def guarded(handle: Callable[[Request, Session], Awaitable[Response]]) -> Any:
        async def checked(request: Request) -> Response:
            if (session := session_of(request)) is None:
                return _refused(request, RequestError("the API key is missing or wrong", 401))
            return await handle(request, session)

        return checked

    def answering(kind: type[ChatRequest] | type[CompletionRequest]) -> Any:
        async def answered(request: Request, session: Session) -> Response:
            return await _answer(request, session, read(kind, await request.body()))

        return guarded(answered)

    return Starlette(
        routes=[
            Route("/v1/chat/completions", answering(ChatRequest), methods=["POST"]),
            Route("/v1/completions", answering(CompletionRequest), methods=["POST"]),
            Route("/v1/models", guarded(_models)),
        ],
        exception_handlers={ValueError: _refused, RuntimeError: _refused},
    )


def _refused(_: Request, error: Exception) -> Response:
    """Return an error in the format of OpenAI's API."""
    if not isinstance(error, RequestError):
        error = RequestError(str(error), 400 if isinstance(error, ValueError) else 500)
    kind = "server_error" if error.status >= 500 else "invalid_request_error"
    body = {"message": str(error), "type": kind, "param": None, "code": error.code}
    return JSONResponse({"error": body}, status_code=error.status)


async def _models(_: Request, session: Session) -> Response:
    card = {"id": session.name, "object": "model", "created": 0, "owned_by": "raypo"}
    card["max_model_len"] = session.max_model_len
    return JSONResponse({"object": "list", "data": [card]})


async def _answer(request: Request, session: Session, wanted: Wanted) -> Response:
    prompts_ids, answered = await _unless_gone(request, session.answer(wanted))
    answer = {"id": secrets.token_hex(12), "created": int(time.time()), "model": session.name}
    answer |= answer_of(wanted, prompts_ids, answered)
    if not wanted.stream:
        return JSONResponse(answer)
    events = _events(answer, with_usage=wanted.wants_usage)
    return StreamingResponse(events, media_type="text/event-stream")


def _events(answer: dict[str, Any], *, with_usage: bool) -> Iterator[str]:
    """Yield an answer as server-sent events, one per response, since responses arrive whole."""
    choices, usage = answer.pop("choices"), answer.pop("usage")
    answer["object"] = answer["object"].replace("chat.completion", "chat.completion.chunk")
    for choice in choices:
        if "message" in choice:
            choice["delta"] = choice.pop("message")
            for number, call in enumerate(choice["delta"].get("tool_calls", ())):
                call["index"] = number
        yield _event(answer | {"choices": [choice]})
    if with_usage:
        yield _event(answer | {"choices": [], "usage": usage})
    yield "data: [DONE]\n\n"


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body)}\n\n"


async def _unless_gone(request: Request, work: Awaitable[T]) -> T:
    """Await some work, and cancel it if the client disconnects."""
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_until_gone(request))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise RequestError("the client has gone", 499)
        return working.result()
    finally:
        for task in (working, gone):
            task.cancel()


async def _until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
