"""Requests and HTTP responses of the supported part of OpenAI's API.

Unsupported fields are rejected by name. As in vLLM, `return_token_ids` requests the token ids of
prompt and response, which OpenAI's API does not return.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from raypo.data.stop_tokens import without_end
from raypo.serving.requests import Completion
from raypo.tools.calls import ToolCall, ToolError, Tools, split_tool_calls

# fail_fast, because a body of 64 MB can have millions of errors, which would take all memory.
Ids = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(min_length=1, fail_fast=True)]
Stop = str | Annotated[list[str], Field(max_length=16)] | None


class RequestError(ValueError):
    """A request that cannot be served, with its HTTP status."""

    def __init__(self, message: str, status: int = 400, *, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code = status, code


class _Wanted(BaseModel):
    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    n: int = Field(default=1, ge=1, le=128)
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0.0)
    top_p: float | None = Field(default=None, gt=0.0, le=1.0)
    seed: int | None = None
    stop: Stop = None
    stream: bool = False
    stream_options: dict[Literal["include_usage"], bool] | None = None
    return_token_ids: bool = False
    # Accepted because clients send them; they have no effect.
    user: str | None = None
    frequency_penalty: Literal[0] | None = None
    presence_penalty: Literal[0] | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None

    @property
    def stops(self) -> list[str]:
        """Stop strings, which end a response and are not part of it."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [stop for stop in stops if stop]

    @property
    def wants_usage(self) -> bool:
        """True if the client asks for token counts at the end of a stream."""
        return bool(self.stream_options and self.stream_options.get("include_usage"))


class CompletionRequest(_Wanted):
    """Body of POST /v1/completions."""

    prompt: (
        str
        | Annotated[list[str], Field(min_length=1, fail_fast=True)]
        | Ids
        | Annotated[list[Ids], Field(min_length=1, fail_fast=True)]
    )
    logprobs: Literal[0, 1] | None = None
    echo: Literal[False] = False
    best_of: Literal[1] | None = None

    @property
    def wants_log_probs(self) -> bool:
        """True if log-probs of the response's tokens are requested, even by `logprobs: 0`."""
        return self.logprobs is not None

    @property
    def most_tokens(self) -> int | None:
        """Maximum number of response tokens. None means as many as fit."""
        return self.max_tokens

    @property
    def prompts(self) -> list[Any]:
        """The prompts, each as text or token ids."""
        is_one = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return [self.prompt] if is_one else list(self.prompt)


class ChatRequest(_Wanted):
    """Body of POST /v1/chat/completions."""

    messages: list[dict[str, Any]] = Field(min_length=1, fail_fast=True)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: Literal[0] | None = None
    tools: list[dict[Literal["type", "function"], Any]] | None = Field(None, fail_fast=True)
    tool_choice: Literal["auto", "none"] | None = None
    parallel_tool_calls: Literal[True] | None = None
    response_format: dict[Literal["type"], Literal["text"]] | None = None
    store: Literal[False] | None = None
    metadata: dict[str, str] | None = None

    @property
    def wants_log_probs(self) -> bool:
        """True if log-probs of the response's tokens are requested."""
        return bool(self.logprobs)

    @property
    def most_tokens(self) -> int | None:
        """Maximum number of response tokens. None means as many as fit."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def offered_tools(self) -> list[dict[Any, Any]] | None:
        """Tools for the chat template. None means that no tool may be called."""
        return self.tools if self.tools and self.tool_choice != "none" else None


Wanted = ChatRequest | CompletionRequest


def read(kind: type[ChatRequest] | type[CompletionRequest], body: bytes) -> Wanted:
    """Parse a request from JSON.

    Raises:
        RequestError: a field is missing or unknown, or its value is not supported.
    """
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        problems = {
            ".".join(str(part) for part in problem["loc"] if isinstance(part, str | int)): problem[
                "msg"
            ]
            for problem in error.errors()
        }
        wrong = "; ".join(
            f"{where or 'body'}: {what}" for where, what in list(problems.items())[:3]
        )
        raise RequestError(f"{wrong}. See docs/environments.md for what is served.") from None


@dataclass(frozen=True)
class Answered:
    """A sampled response, which becomes one choice of the HTTP response."""

    text: str
    """Text of the response, as the client sees it."""
    completion: Completion
    tokens: list[str]
    """Text of each token by itself. The list is empty unless log-probs are requested."""
    tool_calls: list[ToolCall]


Answer = tuple[list[list[int]], list[Answered]]
"""Result of a request: token ids of each prompt, and sampled responses, `n` to each prompt in
order."""
Answering = Callable[[Wanted], Coroutine[Any, Any, Answer]]
"""Coroutine function that computes the result of a request of one episode. Cancelling the coroutine
aborts the request."""


def text_and_calls(
    tokenizer: Any,
    token_ids: Sequence[int] | np.ndarray,
    *,
    stop: Sequence[str] = (),
    stop_token_ids: Sequence[int] = (),
    tools: Tools | None = None,
) -> tuple[str, list[ToolCall]]:
    """Split a response into its text and its tool calls. A malformed call stays in the text.

    Args:
        tokenizer: A Hugging Face tokenizer.
        token_ids: Token ids of the response.
        stop: Stop strings. The text ends before the first of them.
        stop_token_ids: Stop tokens, which are not part of the text.
        tools: Tools that may be called. If set, the text keeps special tokens, because the marks
            of a call are special tokens for some models. None means no tool calls.
    """
    response_ids = without_end(np.asarray(token_ids, np.int64), stop_token_ids)
    text = tokenizer.decode(response_ids.tolist(), skip_special_tokens=tools is None)
    text = text[: min((text.find(ending) for ending in stop if ending in text), default=len(text))]
    if tools is not None:
        with suppress(ToolError):
            said, calls = split_tool_calls(text, tools)
            return (said, calls) if calls else (text, [])
    return text, []


def answer_of(
    request: Wanted, prompts_ids: Sequence[list[int]], answered: Sequence[Answered]
) -> dict[str, Any]:
    """Return the JSON body of an HTTP response. The caller adds id, time and name of the model.

    Args:
        request: The request.
        prompts_ids: Token ids of each prompt.
        answered: All responses. The `n` responses to a prompt are consecutive.
    """
    is_chat, choices = isinstance(request, ChatRequest), []
    for index, response in enumerate(answered):
        reason = response.completion.finish_reason
        choice: dict[str, Any] = {
            "index": index,
            "finish_reason": "tool_calls" if response.tool_calls and reason == "stop" else reason,
            "logprobs": _log_probs(response, is_chat) if request.wants_log_probs else None,
        } | ({"message": _message(response)} if is_chat else {"text": response.text})
        if request.return_token_ids:
            choice["token_ids"] = response.completion.token_ids.tolist()
            if not is_chat:
                choice["prompt_token_ids"] = prompts_ids[index // request.n]
        choices.append(choice)
    body = {"object": "chat.completion" if is_chat else "text_completion", "choices": choices}
    if request.return_token_ids and is_chat:
        body["prompt_token_ids"] = prompts_ids[0]
    prompt_tokens = sum(map(len, prompts_ids))
    sampled = sum(len(response.completion.token_ids) for response in answered)
    usage = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": sampled,
        "total_tokens": prompt_tokens + sampled,
    }
    return body | {"usage": usage}


def _message(answered: Answered) -> dict[str, Any]:
    if not answered.tool_calls:
        return {"role": "assistant", "content": answered.text}
    calls = [
        {
            "id": f"call_{secrets.token_hex(12)}",
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(dict(call.arguments))},
        }
        for call in answered.tool_calls
    ]
    return {"role": "assistant", "content": answered.text or None, "tool_calls": calls}


def _log_probs(answered: Answered, is_chat: bool) -> dict[str, Any]:
    tokens, log_probs = answered.tokens, answered.completion.log_probs.tolist()
    if not is_chat:
        return {"tokens": tokens, "token_logprobs": log_probs}
    return {
        "content": [
            {"token": token, "logprob": log_prob, "bytes": list(token.encode()), "top_logprobs": []}
            for token, log_prob in zip(tokens, log_probs, strict=True)
        ]
    }
