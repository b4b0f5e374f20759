"""OpenAI's requests and answers, as far as they are served; what is not served is refused by name.

Beyond OpenAI's own, as vLLM has it: `return_token_ids` asks for the ids of prompt and response.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from raypo.data.chat_messages import MessageError, chat_messages
from raypo.tools.calls import ToolCall

Ids = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(min_length=1)]
Stop = str | Annotated[list[str], Field(max_length=16)] | None


class RequestError(ValueError):
    """A request that cannot be served."""

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
    # What clients send though it changes nothing.
    user: str | None = None
    frequency_penalty: Literal[0] | None = None
    presence_penalty: Literal[0] | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None

    @property
    def stops(self) -> list[str]:
        """Texts that end a response, and are no part of it."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [each for each in stops if each]

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with the count of tokens."""
        return bool(self.stream_options and self.stream_options.get("include_usage"))


class CompletionRequest(_Wanted):
    """POST /v1/completions."""

    prompt: (
        str
        | Annotated[list[str], Field(min_length=1)]
        | Ids
        | Annotated[list[Ids], Field(min_length=1)]
    )
    logprobs: Literal[0, 1] | None = None
    echo: Literal[False] = False
    best_of: Literal[1] | None = None

    @property
    def wants_log_probs(self) -> bool:
        """Whether the log-probs of the response's tokens are wanted; 0 asks for them too."""
        return self.logprobs is not None

    @property
    def most_tokens(self) -> int | None:
        """Most tokens of a response; None: as many as there is room for."""
        return self.max_tokens

    @property
    def prompts(self) -> list[Any]:
        """The prompts, each a text or token ids."""
        is_one = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return [self.prompt] if is_one else list(self.prompt)


class ChatRequest(_Wanted):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: Literal[0] | None = None
    tools: list[dict[Literal["type", "function"], Any]] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    parallel_tool_calls: Literal[True] | None = None
    response_format: dict[Literal["type"], Literal["text"]] | None = None
    store: Literal[False] | None = None
    metadata: dict[str, str] | None = None

    @property
    def wants_log_probs(self) -> bool:
        """Whether the log-probs of the response's tokens are wanted."""
        return bool(self.logprobs)

    @property
    def most_tokens(self) -> int | None:
        """Most tokens of a response; None: as many as there is room for."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def offered_tools(self) -> list[dict[Any, Any]] | None:
        """Tools as a chat template takes them; None where none may be called."""
        return self.tools if self.tools and self.tool_choice != "none" else None


Wanted = ChatRequest | CompletionRequest


def read(kind: type[ChatRequest] | type[CompletionRequest], body: bytes) -> Wanted:
    """Reads a request from JSON.

    Raises:
        RequestError: a field is missing, unknown, or has a value that is not served.
    """
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        problems = {
            ".".join(str(part) for part in each["loc"] if isinstance(part, str | int)): each["msg"]
            for each in error.errors()
        }
        wrong = "; ".join(
            f"{where or 'body'}: {what}" for where, what in list(problems.items())[:3]
        )
        raise RequestError(f"{wrong}. See docs/environments.md for what is served.") from None


def template_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages as chat templates take them: contents are texts, arguments objects.

    Raises:
        RequestError: a message has no role, or what is no text.
    """
    try:
        return chat_messages(messages)
    except MessageError as error:
        raise RequestError(f"{error}.") from None


@dataclass(frozen=True)
class Answered:
    """A response as it is answered."""

    text: str
    """What the client reads."""
    token_ids: list[int]
    log_probs: list[float]
    tokens: list[str]
    """The text of each token by itself, where log-probs are wanted."""
    tool_calls: list[ToolCall]
    finish_reason: str


def answer_of(
    request: Wanted,
    prompts_ids: Sequence[list[int]],
    answered: Sequence[Answered],
) -> dict[str, Any]:
    """The body of an answer, but for its id and the model's name.

    Args:
        request: What was asked.
        prompts_ids: Of each prompt; its `n` responses come one after the other.
        answered: All responses.
    """
    is_chat = isinstance(request, ChatRequest)
    choices = []
    for index, each in enumerate(answered):
        called = each.tool_calls and each.finish_reason == "stop"
        choice: dict[str, Any] = {
            "index": index,
            "finish_reason": "tool_calls" if called else each.finish_reason,
            "logprobs": _log_probs(each, is_chat) if request.wants_log_probs else None,
        } | ({"message": _message(each)} if is_chat else {"text": each.text})
        if request.return_token_ids:
            choice["token_ids"] = each.token_ids
            if not is_chat:
                choice["prompt_token_ids"] = prompts_ids[index // request.n]
        choices.append(choice)
    body = {"object": "chat.completion" if is_chat else "text_completion", "choices": choices}
    if request.return_token_ids and is_chat:
        body["prompt_token_ids"] = prompts_ids[0]
    given, sampled = sum(map(len, prompts_ids)), sum(len(each.token_ids) for each in answered)
    usage = {"prompt_tokens": given, "completion_tokens": sampled, "total_tokens": given + sampled}
    return body | {"usage": usage}


def _message(said: Answered) -> dict[str, Any]:
    if not said.tool_calls:
        return {"role": "assistant", "content": said.text}
    calls = [
        {
            "id": f"call_{secrets.token_hex(12)}",
            "type": "function",
            "function": {"name": each.name, "arguments": json.dumps(dict(each.arguments))},
        }
        for each in said.tool_calls
    ]
    return {"role": "assistant", "content": said.text or None, "tool_calls": calls}


def _log_probs(said: Answered, is_chat: bool) -> dict[str, Any]:
    if not is_chat:
        return {"tokens": said.tokens, "token_logprobs": said.log_probs}
    at = zip(said.tokens, said.log_probs, strict=True)
    return {
        "content": [
            {"token": token, "logprob": each, "bytes": list(token.encode()), "top_logprobs": []}
            for token, each in at
        ]
    }
