"""OpenAI's endpoints for the policies of a process: chat completions, completions, models."""

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
    answer_of,
    read,
)
from raypo.endpoint.text import text_and_calls
from raypo.serving.requests import Completion, SamplingRequest

T = TypeVar("T")
Wanted = ChatRequest | CompletionRequest


class AskedPolicy(Protocol):
    """A policy behind the endpoint."""

    name: str
    """What `GET /v1/models` calls it."""
    tokenizer: Any
    """A fast one of transformers."""

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and response together."""
        ...

    async def asked(self, wanted: Wanted) -> tuple[list[list[int]], list[SamplingRequest]]:
        """What a request asks for: its prompts' ids, and `n` responses to each, in order.

        Raises:
            RequestError: it cannot be served.
        """
        ...

    async def sample(self, request: SamplingRequest) -> Completion:
        """One response; where its caller is cancelled, the request is taken back.

        Raises:
            ValueError: the request cannot be served.
        """
        ...


def app_of(endpoint_of: Callable[[Request], Endpoint | None]) -> Starlette:
    """POST /v1/chat/completions and /v1/completions, GET /v1/models.

    Args:
        endpoint_of: Which endpoint the API key of a request names; None: the key is wrong.
    """

    def guarded(handle: Callable[[Endpoint, Request], Awaitable[Response]]) -> Any:
        async def checked(request: Request) -> Response:
            if (endpoint := endpoint_of(request)) is None:
                return _refused(request, RequestError("the API key is missing or wrong", 401))
            return await handle(endpoint, request)

        return checked

    return Starlette(
        routes=[
            Route("/v1/chat/completions", guarded(Endpoint.chat), methods=["POST"]),
            Route("/v1/completions", guarded(Endpoint.complete), methods=["POST"]),
            Route("/v1/models", guarded(Endpoint.models)),
        ],
        exception_handlers={ValueError: _refused, RuntimeError: _refused},
    )


def _refused(_: Request, error: Exception) -> Response:
    """An error as OpenAI's clients understand it."""
    if not isinstance(error, RequestError):
        error = RequestError(str(error), 400 if isinstance(error, ValueError) else 500)
    kind = "server_error" if error.status >= 500 else "invalid_request_error"
    told = {"message": str(error), "type": kind, "param": None, "code": error.code}
    return JSONResponse({"error": told}, status_code=error.status)


class Endpoint:
    """Answers requests for one policy."""

    def __init__(self, policy: AskedPolicy) -> None:
        self._policy = policy

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        return await self._answer(request, read(ChatRequest, await request.body()))

    async def complete(self, request: Request) -> Response:
        """POST /v1/completions."""
        return await self._answer(request, read(CompletionRequest, await request.body()))

    async def models(self, request: Request) -> Response:
        """GET /v1/models."""
        card = {"id": self._policy.name, "object": "model", "created": 0, "owned_by": "raypo"}
        card["max_model_len"] = self._policy.max_model_len
        return JSONResponse({"object": "list", "data": [card]})

    async def _answer(self, request: Request, wanted: Wanted) -> Response:
        prompts_ids, asked = await self._policy.asked(wanted)
        tasks = [asyncio.ensure_future(self._answered(each, wanted)) for each in asked]
        try:
            answered = await _unless_gone(request, asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
        head = {"id": secrets.token_hex(12), "created": int(time.time())}
        head |= {"model": self._policy.name}
        answer = head | answer_of(wanted, prompts_ids, answered)
        if not wanted.stream:
            return JSONResponse(answer)
        events = _events(answer, with_usage=wanted.tells_usage)
        return StreamingResponse(events, media_type="text/event-stream")

    async def _answered(self, request: SamplingRequest, wanted: Wanted) -> Answered:
        sampled = await self._policy.sample(request)
        if sampled.finish_reason not in ("stop", "length"):
            raise RequestError(f"the response was given back: {sampled.finish_reason}", 503)
        ids, tokenizer = sampled.token_ids.tolist(), self._policy.tokenizer
        may_call = isinstance(wanted, ChatRequest) and wanted.told_tools is not None
        text, calls = text_and_calls(
            tokenizer,
            ids,
            stop=wanted.stops,
            stop_token_ids=request.stop_token_ids,
            may_call=may_call,
        )
        tokens = [tokenizer.decode([each]) for each in ids] if wanted.tells_log_probs else []
        log_probs = sampled.log_probs.tolist()
        return Answered(text, ids, log_probs, tokens, calls, sampled.finish_reason)


def _events(answer: dict[str, Any], *, with_usage: bool) -> Iterator[str]:
    """An answer as server-sent events: each response as a whole, for it was sampled so."""
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
    """The result of some work, which is given up where the client closes the connection."""
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
