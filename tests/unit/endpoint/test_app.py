"""The endpoint's answers, with a session that says what it is told to say."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
import pytest

from raypo.endpoint.app import app_of
from raypo.endpoint.protocol import (
    Answered,
    ChatRequest,
    Wanted,
)
from raypo.serving.requests import Completion
from raypo.tools.calls import ToolCall

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


@dataclass
class Says:
    """A session that answers every request with the same text."""

    text: str
    calls: list[ToolCall] = field(default_factory=list)
    wait_s: float = 0.0
    error: Exception | None = None
    asked: list[Wanted] = field(default_factory=list)
    taken_back: int = 0

    async def answer(self, wanted: Wanted) -> tuple[list[list[int]], list[Answered]]:
        self.asked.append(wanted)
        if self.error:
            raise self.error
        try:
            await asyncio.sleep(self.wait_s)
        except asyncio.CancelledError:
            self.taken_back += 1
            raise
        is_chat = isinstance(wanted, ChatRequest)
        prompts_ids = [[1, 2]] if is_chat else [[place] for place in range(len(wanted.prompts))]
        ids = np.array(list(map(ord, self.text)))
        completion = Completion(ids, np.full(len(ids), -0.5), "stop", 1)
        tokens = list(self.text) if wanted.wants_log_probs else []
        answered = Answered(self.text, completion, tokens, self.calls)
        return prompts_ids, [answered] * (len(prompts_ids) * wanted.n)


def app(session: Says) -> Any:
    return app_of({"right": session.answer}.get, 64)


@asynccontextmanager
async def client(policy: Says, key: str = "right") -> AsyncIterator[httpx.AsyncClient]:
    headers = {"Authorization": f"Bearer {key}"}
    transport = httpx.ASGITransport(app(policy))
    async with httpx.AsyncClient(
        transport=transport, base_url="http://test/v1", headers=headers
    ) as asking:
        yield asking


def post(policy: Says, path: str, body: Any, **how: Any) -> httpx.Response:
    async def answer() -> httpx.Response:
        async with client(policy, **how) as asking:
            return await asking.post(path, json=body)

    return asyncio.run(answer())


def events(response: httpx.Response) -> list[Any]:
    lines = [line for line in response.text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def test_a_chat_comes_back_as_a_message():
    answer = post(Says("yes"), "/chat/completions", CHAT).json()
    assert (answer["object"], answer["model"]) == ("chat.completion", "policy")
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "yes"}
    assert (choice["finish_reason"], choice["logprobs"]) == ("stop", None)
    assert answer["usage"] == {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}


def test_token_ids_and_log_probs_are_told_where_they_are_wanted():
    body = CHAT | {"return_token_ids": True, "logprobs": True}
    answer = post(Says("yes"), "/chat/completions", body).json()
    (choice,) = answer["choices"]
    assert answer["prompt_token_ids"] == [1, 2]
    assert choice["token_ids"] == list(map(ord, "yes"))
    told = choice["logprobs"]["content"]
    assert [each["token"] for each in told] == ["y", "e", "s"]
    assert {each["logprob"] for each in told} == {-0.5}


def test_a_stream_tells_each_response_as_a_whole():
    body = CHAT | {
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "logprobs": True,
        "n": 2,
    }
    response = post(Says("yes"), "/chat/completions", body)
    assert response.headers["content-type"].startswith("text/event-stream")
    *told, usage = events(response)
    assert {each["object"] for each in told} == {"chat.completion.chunk"}
    assert [each["choices"][0]["index"] for each in told] == [0, 1]
    for each in told:
        (choice,) = each["choices"]
        assert choice["delta"] == {"role": "assistant", "content": "yes"}
        assert (choice["token_ids"], choice["finish_reason"]) == (list(map(ord, "yes")), "stop")
    assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], 6)


def test_completions_take_texts_and_token_ids_and_tell_which_prompt_is_whose():
    body = {"prompt": ["a", "bc"], "n": 2, "return_token_ids": True, "logprobs": 0}
    answer = post(Says("ok"), "/completions", body).json()
    assert answer["object"] == "text_completion"
    assert [each["text"] for each in answer["choices"]] == ["ok"] * 4
    assert [each["prompt_token_ids"] for each in answer["choices"]] == [[0], [0], [1], [1]]
    assert answer["choices"][0]["logprobs"]["token_logprobs"] == [-0.5] * 2
    session = Says("ok")
    (event,) = events(post(session, "/completions", {"prompt": [7], "stream": True}))
    assert (event["object"], event["choices"][0]["text"]) == ("text_completion", "ok")
    post(session, "/completions", {"prompt": [[5, 6], [7]]})
    assert [vars(each)["prompt"] for each in session.asked] == [[7], [[5, 6], [7]]]


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_call_is_told_as_one(stream):
    session = Says("see ", [ToolCall("add", {"a": 1})])
    response = post(session, "/chat/completions", CHAT | {"tools": TOOLS, "stream": stream})
    if stream:
        ((choice,),) = [each["choices"] for each in events(response)]
        message = choice["delta"]
        assert message["tool_calls"][0]["index"] == 0
    else:
        (choice,) = response.json()["choices"]
        message = choice["message"]
    assert message["content"] == "see "
    assert choice["finish_reason"] == "tool_calls"
    (called,) = message["tool_calls"]
    assert called["function"] == {"name": "add", "arguments": '{"a": 1}'}
    (asked,) = session.asked
    assert isinstance(asked, ChatRequest)
    assert asked.offered_tools == TOOLS


@pytest.mark.parametrize(
    ("path", "body", "told"),
    [
        ("/completions", {}, "prompt: Field required"),
        ("/completions", {"prompt": []}, "at least 1"),
        ("/completions", {"prompt": [[]]}, "prompt."),
        ("/completions", {"prompt": [2**80]}, "less than 2147483648"),
        ("/completions", {"prompt": [-1]}, "greater than or equal to 0"),
        ("/chat/completions", {"messages": []}, "messages: List should have at least 1"),
        ("/chat/completions", CHAT | {"temperature": -1}, "temperature"),
        ("/chat/completions", CHAT | {"top_logprobs": 5}, "top_logprobs"),
        ("/chat/completions", CHAT | {"temprature": 1}, "temprature: Extra inputs"),
        ("/chat/completions", CHAT | {"frequency_penalty": 0.5}, "frequency_penalty"),
        ("/chat/completions", CHAT | {"tool_choice": "required"}, "tool_choice"),
        ("/completions", [1], "body: "),
    ],
)
def test_what_is_not_served_is_refused_by_name(path, body, told):
    policy = Says("x")
    response = post(policy, path, body)
    assert response.status_code == 400
    assert told in response.json()["error"]["message"]
    assert policy.asked == []


def test_a_body_that_is_no_json_is_refused():
    async def answer() -> httpx.Response:
        async with client(Says("x")) as asking:
            return await asking.post("/completions", content=b"{")

    response = asyncio.run(answer())
    assert response.status_code == 400
    assert "Invalid JSON" in response.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/completions", "/chat/completions"])
def test_a_body_that_is_too_large_is_refused_before_it_is_read(monkeypatch, path):
    monkeypatch.setattr("raypo.http_server.MAX_BODY_BYTES", 1000)
    sent = 0

    async def parts() -> AsyncIterator[bytes]:
        nonlocal sent
        for _ in range(100):
            sent += 500
            yield b" " * 500

    async def answer() -> httpx.Response:
        async with client(Says("x")) as asking:
            return await asking.post(path, content=parts())

    response = asyncio.run(answer())
    assert response.status_code == 413
    assert response.json()["error"]["message"] == "the body of a request has at most 1000 bytes"
    assert sent == 1500


def test_nobody_asks_without_the_key():
    response = post(Says("x"), "/chat/completions", CHAT, key="wrong")
    assert response.status_code == 401
    assert response.json()["error"]["message"] == "the API key is missing or wrong"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status"), [(RuntimeError("the engine is gone"), 500), (ValueError("too much"), 400)]
)
def test_errors_of_the_engine_are_told(stream, error, status):
    response = post(Says("x", error=error), "/chat/completions", CHAT | {"stream": stream})
    assert response.status_code == status
    assert response.json()["error"]["message"] == str(error)


def test_a_client_that_closes_has_its_request_taken_back():
    policy = Says("x", wait_s=100)

    async def leave() -> None:
        body = json.dumps(CHAT).encode()
        arrived = iter([{"type": "http.request", "body": body}])

        async def receive() -> Any:
            if (more := next(arrived, None)) is not None:
                return more
            while not policy.asked:
                await asyncio.sleep(0.001)
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            return None

        headers = [(b"authorization", b"Bearer right")]
        scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions"}
        await app(policy)(scope | {"headers": headers, "query_string": b""}, receive, send)

    asyncio.run(asyncio.wait_for(leave(), 10))
    assert policy.taken_back == 1


def test_the_model_is_listed():
    async def answer() -> Any:
        async with client(Says("x")) as asking:
            return (await asking.get("/models")).json()

    (card,) = asyncio.run(answer())["data"]
    assert (card["id"], card["max_model_len"]) == ("policy", 64)
