"""OpenAI's requests and answers, as far as they are served; what is not served is refused by name.

Beyond OpenAI's own, as vLLM has it: `return_token_ids` asks for the ids of prompt and response.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from raypo.tools.calls import ToolCall

Ids = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(min_length=1)]
Stop = str | Annotated[list[str], Field(max_length=16)] | None


class RequestError(ValueError):
    """A request that cannot be served."""

    def __init__(self, message: str, *, status: int = 400, code: str | None = None) -> None:
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
    def tells_usage(self) -> bool:
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
    def tells_log_probs(self) -> bool:
        """Whether the log-probs of the response's tokens are told."""
        return self.logprobs is not None

    @property
    def most_tokens(self) -> int | None:
        """Of a response; None: as many as there is room for."""
        return self.max_tokens

    @property
    def num_prompts(self) -> int:
        """How many there are."""
        return len(self.prompts)

    @property
    def prompts(self) -> list[str | list[int]]:
        """One or several, each a text or token ids."""
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]  # pyright: ignore[reportReturnType]
        return list(self.prompt)  # pyright: ignore[reportReturnType]


class _Function(BaseModel):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolDescription(BaseModel):
    """A tool as a client describes it."""

    type: Literal["function"] = "function"
    function: _Function


class ChatRequest(_Wanted):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: Literal[0] | None = None
    tools: list[ToolDescription] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    parallel_tool_calls: Literal[True] | None = None
    response_format: dict[Literal["type"], Literal["text"]] | None = None
    store: Literal[False] | None = None
    metadata: dict[str, str] | None = None

    @property
    def tells_log_probs(self) -> bool:
        """Whether the log-probs of the response's tokens are told."""
        return bool(self.logprobs)

    @property
    def most_tokens(self) -> int | None:
        """Of a response; None: as many as there is room for."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def num_prompts(self) -> int:
        """A chat is one."""
        return 1

    @property
    def told_tools(self) -> list[dict[str, Any]] | None:
        """Tools as a chat template takes them."""
        if not self.tools or self.tool_choice == "none":
            return None
        return [each.model_dump(exclude_none=True) for each in self.tools]


def read(kind: type[ChatRequest] | type[CompletionRequest], body: Any) -> Any:
    """A request from JSON.

    Raises:
        RequestError: a field is missing, unknown, or has a value that is not served.
    """
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        problems = {
            ".".join(str(part) for part in each["loc"] if isinstance(part, str | int)): each["msg"]
            for each in error.errors()
        }
        told = "; ".join(f"{where or 'body'}: {what}" for where, what in list(problems.items())[:3])
        raise RequestError(f"{told}. See docs/serving.md for what is served.") from None


def template_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages as chat templates take them: contents are texts, arguments of tool calls objects.

    Raises:
        RequestError: a message has no role, or what is no text.
    """
    return [_template_message(place, message) for place, message in enumerate(messages)]


def _template_message(place: int, message: Mapping[str, Any]) -> dict[str, Any]:
    where, content = f"messages.{place}", message.get("content")
    if not isinstance(message.get("role"), str):
        raise RequestError(f"{where}.role: a message has a role.")
    if isinstance(content, list):
        if not all(isinstance(part, dict) and part.get("type") == "text" for part in content):
            raise RequestError(f"{where}.content: only texts are served.")
        content = "".join(str(part.get("text", "")) for part in content)
    if not isinstance(content, str | None):
        raise RequestError(f"{where}.content: must be a text.")
    plain = {k: v for k, v in message.items() if v is not None} | {"content": content or ""}
    if calls := message.get("tool_calls"):
        try:
            plain["tool_calls"] = [_template_call(call) for call in calls]
        except (TypeError, KeyError, ValueError):
            raise RequestError(f"{where}.tool_calls: these are no tool calls.") from None
    return plain


def _template_call(call: Mapping[str, Any]) -> dict[str, Any]:
    arguments = call["function"]["arguments"]
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    return {**call, "function": {"name": call["function"]["name"], "arguments": arguments}}


@dataclass
class Answered:
    """One response, as far as it is there."""

    text: str = ""
    """That was told."""
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)
    """The text of each token by itself."""
    tool_calls: list[ToolCall] = field(default_factory=list)
    finish_reason: str | None = None
    """None: it goes on."""


@dataclass(frozen=True)
class Answer:
    """How responses to one request are told."""

    model: str
    request: ChatRequest | CompletionRequest
    prompts_ids: list[list[int]]
    """Of each prompt; its `n` responses come one after the other."""
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def is_chat(self) -> bool:
        """Whether it is told in messages."""
        return isinstance(self.request, ChatRequest)

    def whole(self, answered: Sequence[Answered]) -> dict[str, Any]:
        """The answer to a request without `stream`."""
        body = self._head("chat.completion" if self.is_chat else "text_completion")
        body["choices"] = [self._choice(i, each, "message") for i, each in enumerate(answered)]
        if self.request.return_token_ids and len(self.prompts_ids) == 1:
            body["prompt_token_ids"] = self.prompts_ids[0]
        return body | {"usage": self._usage(sum(len(each.token_ids) for each in answered))}

    def piece(self, index: int, news: Answered) -> dict[str, Any]:
        """One event of a stream."""
        body = self._head("chat.completion.chunk" if self.is_chat else "text_completion")
        return body | {"choices": [self._choice(index, news, "delta")]}

    def usage_event(self, num_tokens: int) -> dict[str, Any]:
        """The last event of a stream, where the client wants it."""
        body = self._head("chat.completion.chunk" if self.is_chat else "text_completion")
        return body | {"choices": [], "usage": self._usage(num_tokens)}

    def _usage(self, num_tokens: int) -> dict[str, int]:
        asked = sum(map(len, self.prompts_ids))
        told = {"prompt_tokens": asked, "completion_tokens": num_tokens}
        return told | {"total_tokens": asked + num_tokens}

    def _head(self, kind: str) -> dict[str, Any]:
        prefix = "chatcmpl" if self.is_chat else "cmpl"
        head = {"id": f"{prefix}-{self.id}", "object": kind, "created": self.created}
        return head | {"model": self.model}

    def _choice(self, index: int, said: Answered, key: Literal["message", "delta"]) -> Any:
        choice: dict[str, Any] = {"index": index}
        if self.is_chat:
            choice[key] = self._message(said, is_delta=key == "delta")
        else:
            choice["text"] = said.text
        called = said.tool_calls and said.finish_reason == "stop"
        choice["finish_reason"] = "tool_calls" if called else said.finish_reason
        choice["logprobs"] = self._log_probs(said) if self.request.tells_log_probs else None
        if self.request.return_token_ids:
            choice["token_ids"] = said.token_ids
            if not self.is_chat:
                choice["prompt_token_ids"] = self.prompts_ids[index // self.request.n]
        return choice

    def _message(self, said: Answered, *, is_delta: bool) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": said.text}
        if said.tool_calls:
            message["content"] = said.text or None
            message["tool_calls"] = [
                {
                    **({"index": number} if is_delta else {}),
                    "id": f"call_{self.id}_{number}",
                    "type": "function",
                    "function": {"name": each.name, "arguments": json.dumps(dict(each.arguments))},
                }
                for number, each in enumerate(said.tool_calls)
            ]
        return message

    def _log_probs(self, said: Answered) -> dict[str, Any]:
        if not self.is_chat:
            return {"tokens": said.tokens, "token_logprobs": said.log_probs}
        told = zip(said.tokens, said.log_probs, strict=True)
        return {
            "content": [
                {
                    "token": token,
                    "logprob": log_prob,
                    "bytes": list(token.encode()),
                    "top_logprobs": [],
                }
                for token, log_prob in told
            ]
        }
