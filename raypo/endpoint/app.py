"""OpenAI's endpoints as an ASGI application: chat completions, completions, models."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from raypo.endpoint.protocol import (
    Answer,
    Answered,
    ChatRequest,
    CompletionRequest,
    RequestError,
    read,
    template_messages,
)
from raypo.endpoint.text import ResponseText
from raypo.rewards.server import has_token, json_of
from raypo.rewards.wire import WireError
from raypo.serving.requests import Completion, Heard, SamplingRequest

T = TypeVar("T")
Wanted = ChatRequest | CompletionRequest
Piece = tuple[int, Answered]
"""The number of a response, and what is new of it."""
RETRY_AFTER_S = 1


class Sampler(Protocol):
    """Who samples for the endpoint."""

    async def sample(self, request: SamplingRequest, heard: Heard) -> Completion:
        """One response; where its caller is cancelled, the request is taken back.

        Args:
            request: Its id is its own.
            heard: May be called meanwhile, from whatever thread.

        Raises:
            ValueError: the request cannot be served.
        """
        ...


class Serves(Protocol):
    """A policy behind the endpoint."""

    @property
    def name(self) -> str:
        """That it is told by."""
        ...

    @property
    def tokenizer(self) -> Any:
        """A fast one of transformers."""
        ...

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and response together."""
        ...

    @property
    def sampler(self) -> Sampler:
        """Who samples."""
        ...

    async def asked(self, wanted: Wanted) -> tuple[list[list[int]], list[SamplingRequest]]:
        """What a request asks for: its prompts' ids, and `n` responses to each, in order.

        Raises:
            RequestError: it cannot be served.
        """
        ...


@dataclass(frozen=True)
class Served:
    """A model behind the endpoint."""

    name: str
    tokenizer: Any
    stop_token_ids: tuple[int, ...]
    max_model_len: int
    """Tokens of prompt and response together."""
    sampler: Sampler

    async def asked(self, wanted: Wanted) -> tuple[list[list[int]], list[SamplingRequest]]:
        """The prompts' ids of a request, and what is sampled for it.

        Raises:
            RequestError: another model is meant, or a prompt is empty, too long, or refused.
        """
        if wanted.model not in (None, self.name):
            raise RequestError(
                f"there is no model {wanted.model}; served is {self.name}.",
                status=404,
                code="model_not_found",
            )
        if isinstance(wanted, ChatRequest):
            prompts_ids = [self.chat_ids(wanted)]
        else:
            prompts_ids = [self.text_ids(each) for each in wanted.prompts]
        return prompts_ids, self.requests(wanted, prompts_ids)

    def chat_ids(self, request: ChatRequest) -> list[int]:
        """The prompt of a chat: its messages, through the chat template.

        Raises:
            RequestError: there is no template, or it refuses the messages.
        """
        if not self.tokenizer.chat_template:
            raise RequestError(f"{self.name} has no chat template. Ask /v1/completions.")
        messages = template_messages(request.messages)
        try:
            text = self.tokenizer.apply_chat_template(
                messages, tools=request.told_tools, add_generation_prompt=True, tokenize=False
            )
        except Exception as error:  # templates raise what they like
            raise RequestError(f"messages: the chat template refuses them: {error}") from error
        return self.tokenizer.encode(text, add_special_tokens=False)

    def text_ids(self, prompt: str | list[int]) -> list[int]:
        """The prompt of a completion: a text, or token ids as they are."""
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt

    def requests(self, wanted: Wanted, prompts_ids: Sequence[list[int]]) -> list[SamplingRequest]:
        """What is sampled for a request: `n` responses to each prompt, in order.

        Raises:
            RequestError: a prompt is empty or too long.
        """
        seed = secrets.randbits(31) if wanted.seed is None else wanted.seed
        return [
            SamplingRequest(
                prompt_ids=np.array(ids, dtype=np.int64),
                max_new_tokens=self._room(ids, wanted.most_tokens),
                temperature=1.0 if wanted.temperature is None else wanted.temperature,
                top_p=1.0 if wanted.top_p is None else wanted.top_p,
                seed=(seed + number) % 2**31,
                stop_token_ids=self.stop_token_ids,
                id=secrets.token_hex(12),
            )
            for ids in prompts_ids
            for number in range(wanted.n)
        ]

    def _room(self, prompt_ids: list[int], most: int | None) -> int:
        room = self.max_model_len - len(prompt_ids)
        if not prompt_ids:
            raise RequestError("the prompt has no tokens.")
        if room < (most or 1):
            raise RequestError(
                f"{len(prompt_ids)} tokens of prompt and {most or 1} of response are more than the "
                f"{self.max_model_len} that the model was started with.",
                code="context_length_exceeded",
            )
        return most or room


def make_app(
    served: Served,
    *,
    token: str | None,
    max_requests: int = 1024,
    check: Callable[[], None] = lambda: None,
) -> Starlette:
    """POST /v1/chat/completions and /v1/completions, GET /v1/models and /health.

    Args:
        served: The model.
        token: Clients must bring it as their API key; None: everybody may ask.
        max_requests: Most responses that are under way; who asks for more is told to come again.
        check: Raises RuntimeError where the model can answer no more; /health says so.
    """
    endpoint = Endpoint(served, max_requests)
    return app_of(
        lambda request: None if token and not has_token(request, token) else endpoint, check
    )


def app_of(
    endpoint_of: Callable[[Request], Endpoint | None], check: Callable[[], None] = lambda: None
) -> Starlette:
    """The application, whose API keys say which endpoint is asked; None: the key is wrong."""

    def guarded(handle: Callable[[Endpoint, Request], Awaitable[Response]]) -> Any:
        async def checked(request: Request) -> Response:
            if (endpoint := endpoint_of(request)) is None:
                return error_answer(RequestError("the API key is missing or wrong", status=401))
            return await handle(endpoint, request)

        return checked

    async def health(request: Request) -> Response:
        try:
            check()
        except RuntimeError as error:
            return error_answer(RequestError(str(error), status=503))
        return JSONResponse({"status": "ok"})

    return Starlette(
        routes=[
            Route("/v1/chat/completions", guarded(Endpoint.chat), methods=["POST"]),
            Route("/v1/completions", guarded(Endpoint.complete), methods=["POST"]),
            Route("/v1/models", guarded(Endpoint.models)),
            Route("/health", health),
        ],
        exception_handlers={
            RequestError: _told,
            WireError: _told,
            ValueError: _told,
            RuntimeError: _told,
        },
    )


async def _told(request: Request, error: Exception) -> Response:
    if isinstance(error, RequestError):
        return error_answer(error)
    status = 400 if isinstance(error, ValueError) else 500
    return error_answer(RequestError(str(error), status=status))


def error_answer(error: RequestError) -> JSONResponse:
    """An error as OpenAI's clients understand it."""
    headers = {"Retry-After": str(RETRY_AFTER_S)} if error.status == 503 else None
    return JSONResponse(_error(error), status_code=error.status, headers=headers)


def _error(error: RequestError) -> dict[str, Any]:
    kind = "server_error" if error.status >= 500 else "invalid_request_error"
    return {"error": {"message": str(error), "type": kind, "param": None, "code": error.code}}


class Endpoint:
    """Answers requests for one policy."""

    def __init__(self, served: Serves, max_requests: int) -> None:
        """Only note them."""
        self._served, self._max_requests = served, max_requests
        self._under_way = 0

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        return await self._answer(request, read(ChatRequest, await json_of(request)))

    async def complete(self, request: Request) -> Response:
        """POST /v1/completions."""
        return await self._answer(request, read(CompletionRequest, await json_of(request)))

    async def models(self, request: Request) -> Response:
        """GET /v1/models."""
        card = {"id": self._served.name, "object": "model", "created": 0, "owned_by": "raypo"}
        card["max_model_len"] = self._served.max_model_len
        return JSONResponse({"object": "list", "data": [card]})

    async def _answer(self, request: Request, wanted: Wanted) -> Response:
        count = wanted.num_prompts * wanted.n
        if self._under_way + count > self._max_requests:
            raise RequestError(f"{self._under_way} responses are under way", status=503)
        prompts_ids, asked = await self._served.asked(wanted)
        self._under_way += len(asked)
        sampled = _Sampled(self._served.sampler, asked, self._ended)
        answer = Answer(self._served.name, wanted, prompts_ids)
        pieces = self._pieces(wanted, asked, sampled)
        if not wanted.stream:
            whole = await _unless_gone(request, _joined(pieces, len(asked)))
            return JSONResponse(answer.whole(whole))
        first = await _unless_gone(request, anext(pieces))  # a refusal is told with its status
        return StreamingResponse(_events(answer, first, pieces), media_type="text/event-stream")

    def _ended(self, _: object) -> None:
        self._under_way -= 1

    async def _pieces(
        self, wanted: Wanted, asked: Sequence[SamplingRequest], sampled: _Sampled
    ) -> AsyncGenerator[Piece]:
        """What is new of which response, as it is sampled; the last has its finish reason.

        Left early, it takes back what is still asked for.
        """
        tools = wanted.told_tools if isinstance(wanted, ChatRequest) else None
        texts = [
            ResponseText(
                self._served.tokenizer,
                stop=wanted.stops,
                stop_token_ids=each.stop_token_ids,
                tools=tools,
            )
            for each in asked
        ]
        try:
            num_open = len(asked)
            while num_open:
                index, news = await sampled.news.get()
                text = texts[index]
                if text.is_stopped:
                    continue  # sampled before it was taken back
                if isinstance(news, Exception):
                    raise news
                count = text.add(news.token_ids)
                piece = Answered(
                    token_ids=news.token_ids[:count],
                    log_probs=news.log_probs[:count],
                    finish_reason=news.finish_reason,
                )
                if text.is_stopped:
                    piece.finish_reason = "stop"
                    sampled.take_back(index)
                if wanted.tells_log_probs:
                    piece.tokens = [self._served.tokenizer.decode([i]) for i in piece.token_ids]
                if piece.finish_reason is None:
                    piece.text = text.news()
                else:
                    piece.text, piece.tool_calls = text.finish()
                    num_open -= 1
                yield index, piece
        finally:
            for index in range(len(asked)):
                sampled.take_back(index)


class _Sampled:
    """Responses under way, and what is new of them."""

    def __init__(
        self,
        sampler: Sampler,
        asked: Sequence[SamplingRequest],
        ended: Callable[[object], None],
    ) -> None:
        """Begin; `ended` is called at the end of each."""
        self.news: asyncio.Queue[tuple[int, Answered | Exception]] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._tasks = [
            asyncio.create_task(self._sample(sampler, index, each))
            for index, each in enumerate(asked)
        ]
        for task in self._tasks:
            task.add_done_callback(ended)

    def take_back(self, index: int) -> None:
        """Have a response sampled no further."""
        self._tasks[index].cancel()

    async def _sample(self, sampler: Sampler, index: int, request: SamplingRequest) -> None:
        num_heard = 0

        def heard(_: SamplingRequest, token_ids: Sequence[int], log_probs: Sequence[float]) -> None:
            nonlocal num_heard
            num_heard += len(token_ids)
            news = Answered(token_ids=list(token_ids), log_probs=list(log_probs))
            self._loop.call_soon_threadsafe(self.news.put_nowait, (index, news))

        try:
            whole = await sampler.sample(request, heard)
        except Exception as error:
            self.news.put_nowait((index, error))
            return
        news: Answered | Exception = Answered(
            token_ids=whole.token_ids[num_heard:].tolist(),
            log_probs=whole.log_probs[num_heard:].tolist(),
            finish_reason=whole.finish_reason,
        )
        if whole.finish_reason not in ("stop", "length"):
            news = RequestError(f"the response was given back: {whole.finish_reason}", status=503)
        self.news.put_nowait((index, news))


async def _joined(pieces: AsyncGenerator[Piece], count: int) -> list[Answered]:
    """The whole responses."""
    whole = [Answered() for _ in range(count)]
    async with aclosing(pieces):
        async for index, piece in pieces:
            so_far = whole[index]
            whole[index] = Answered(
                text=so_far.text + piece.text,
                token_ids=so_far.token_ids + piece.token_ids,
                log_probs=so_far.log_probs + piece.log_probs,
                tokens=so_far.tokens + piece.tokens,
                tool_calls=piece.tool_calls,
                finish_reason=piece.finish_reason,
            )
    return whole


async def _events(
    answer: Answer, first: Piece, pieces: AsyncGenerator[Piece]
) -> AsyncGenerator[str]:
    """A response as server-sent events."""
    num_tokens = len(first[1].token_ids)
    async with aclosing(pieces):
        yield _event(answer.piece(*first))
        try:
            async for index, piece in pieces:
                num_tokens += len(piece.token_ids)
                yield _event(answer.piece(index, piece))
        except (RequestError, RuntimeError) as error:  # the status was sent long ago
            yield _event(_error(RequestError(str(error), status=500)))
    if answer.request.tells_usage:
        yield _event(answer.usage_event(num_tokens))
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
            raise RequestError("the client has gone", status=499)
        return working.result()
    finally:
        for task in (working, gone):
            task.cancel()


async def _until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
