"""OpenAI-compatible HTTP endpoint of the policy: chat completions, completions, models."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from raypo.endpoint.protocol import (
    Answer,
    Answering,
    ChatRequest,
    CompletionRequest,
    RequestError,
    answer_of,
    read,
)
from raypo.http_server import BodyError, body_of

NAME = "policy"
"""Model name that the endpoint reports."""


def app_of(episode: Callable[[str], Answering | None], max_model_len: int) -> Starlette:
    """Return the application: POST /v1/chat/completions and /v1/completions, GET /v1/models.

    Args:
        episode: Function that looks up an API key. It returns the function that handles requests of
            the key's episode, or None if the key is wrong.
        max_model_len: Maximum number of prompt and response tokens together.
    """

    def answering_of(request: Request) -> Answering:
        answering = episode(request.headers.get("Authorization", "").removeprefix("Bearer "))
        if answering is None:
            raise RequestError("the API key is missing or wrong", 401)
        return answering

    async def models(request: Request) -> Response:
        answering_of(request)
        card = {"id": NAME, "object": "model", "created": 0, "owned_by": "raypo"}
        return JSONResponse({"object": "list", "data": [card | {"max_model_len": max_model_len}]})

    def endpoint_of(kind: type[ChatRequest] | type[CompletionRequest]) -> Any:
        async def endpoint(request: Request) -> Response:
            answering = answering_of(request)
            wanted = read(kind, await body_of(request))
            prompts_ids, answered = await _unless_gone(request, answering(wanted))
            head = {"id": secrets.token_hex(12), "created": int(time.time()), "model": NAME}
            answer = head | answer_of(wanted, prompts_ids, answered)
            if not wanted.stream:
                return JSONResponse(answer)
            events = _events(answer, with_usage=wanted.wants_usage)
            return StreamingResponse(events, media_type="text/event-stream")

        return endpoint

    return Starlette(
        routes=[
            Route("/v1/chat/completions", endpoint_of(ChatRequest), methods=["POST"]),
            Route("/v1/completions", endpoint_of(CompletionRequest), methods=["POST"]),
            Route("/v1/models", models),
        ],
        exception_handlers={ValueError: _refused, RuntimeError: _refused},
    )


def _refused(_: Request, error: Exception) -> Response:
    """Return an error in the format of OpenAI's API."""
    if not isinstance(error, RequestError):
        status = 400 if isinstance(error, ValueError) else 500
        error = RequestError(str(error), error.status if isinstance(error, BodyError) else status)
    kind = "server_error" if error.status >= 500 else "invalid_request_error"
    body = {"message": str(error), "type": kind, "param": None, "code": error.code}
    return JSONResponse({"error": body}, status_code=error.status)


def _events(answer: dict[str, Any], *, with_usage: bool) -> Iterator[str]:
    """Yield the body of a response as server-sent events.

    Each choice is a single event, because it was sampled completely before.
    """
    choices, usage = answer.pop("choices"), answer.pop("usage")
    answer["object"] = answer["object"].replace("chat.completion", "chat.completion.chunk")
    for choice in choices:
        if "message" in choice:
            choice["delta"] = choice.pop("message")
            for number, call in enumerate(choice["delta"].get("tool_calls", ())):
                call["index"] = number
    bodies = [{"choices": [choice]} for choice in choices]
    for body in bodies + [{"choices": [], "usage": usage}] * with_usage:
        yield f"data: {json.dumps(answer | body)}\n\n"
    yield "data: [DONE]\n\n"


async def _unless_gone(request: Request, work: Coroutine[Any, Any, Answer]) -> Answer:
    """Await some work, and cancel it if the client disconnects."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.create_task(work), asyncio.create_task(gone())
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise RequestError("the client has gone", 499)
        if working.cancelled():
            raise RequestError("the episode is over", 401)
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
