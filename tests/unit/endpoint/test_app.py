"""The endpoint's answers, with a policy that says what it is told to say."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
import pytest
from transformers import AutoTokenizer

from raypo.endpoint.app import Endpoint, Wanted, app_of
from raypo.endpoint.protocol import ChatRequest, template_messages
from raypo.serving.requests import Completion, SamplingRequest
from tests.tiny import tiny_tokenizer

EOS = 2
CHAT = {"messages": [{"role": "user", "content": "hi"}]}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


@dataclass
class Says:
    """A policy that answers every request with the same ids."""

    tokenizer: Any
    ids: Sequence[int]
    finish_reason: str = "stop"
    wait_s: float = 0.0
    error: Exception | None = None
    name: str = "tiny"
    max_model_len: int = 64
    sampled: list[SamplingRequest] = field(default_factory=list)
    taken_back: int = 0

    async def asked(self, wanted: Wanted) -> tuple[list[list[int]], list[SamplingRequest]]:
        if isinstance(wanted, ChatRequest):
            messages: Any = template_messages(wanted.messages)
            text = self.tokenizer.apply_chat_template(
                messages, tools=wanted.told_tools, add_generation_prompt=True, tokenize=False
            )
            prompts: list[Any] = [self.tokenizer.encode(text)]
        else:
            prompts = [
                self.tokenizer.encode(each) if isinstance(each, str) else each
                for each in wanted.prompts
            ]
        requests = [
            SamplingRequest(np.array(ids), wanted.most_tokens or 9, 1.0, stop_token_ids=(EOS,))
            for ids in prompts
            for _ in range(wanted.n)
        ]
        return prompts, requests

    async def sample(self, request: SamplingRequest) -> Completion:
        self.sampled.append(request)
        if self.error:
            raise self.error
        try:
            await asyncio.sleep(self.wait_s)
        except asyncio.CancelledError:
            self.taken_back += 1
            raise
        log_probs = np.full(len(self.ids), -0.5, dtype=np.float32)
        return Completion(np.array(self.ids, np.int32), log_probs, self.finish_reason, 0)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return AutoTokenizer.from_pretrained(tiny_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture
def says(tokenizer):
    def text(text: str, **changes: Any) -> Says:
        return Says(tokenizer, [*tokenizer.encode(text), EOS], **changes)

    return text


def app(policy: Says) -> Any:
    endpoint = Endpoint(policy)
    is_known = {"Bearer right": endpoint}
    return app_of(lambda request: is_known.get(request.headers.get("Authorization", "")))


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


def test_a_chat_comes_back_as_a_message(says):
    policy = says("yes")
    answer = post(policy, "/chat/completions", CHAT | {"max_tokens": 5}).json()
    (asked,) = policy.sampled
    assert asked.max_new_tokens == 5
    assert (answer["object"], answer["model"]) == ("chat.completion", "tiny")
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "yes"}
    assert choice["finish_reason"] == "stop"
    assert answer["usage"] == {"prompt_tokens": 20, "completion_tokens": 4, "total_tokens": 24}


def test_token_ids_and_log_probs_are_told_where_they_are_wanted(says):
    policy = says("yes")
    body = CHAT | {"return_token_ids": True, "logprobs": True}
    answer = post(policy, "/chat/completions", body).json()
    (choice,) = answer["choices"]
    assert answer["prompt_token_ids"] == policy.sampled[0].prompt_ids.tolist()
    assert choice["token_ids"] == policy.ids
    told = choice["logprobs"]["content"]
    assert [each["token"] for each in told] == ["y", "e", "s", "<eos>"]
    assert {each["logprob"] for each in told} == {-0.5}


def test_a_stream_tells_each_response_as_a_whole(says):
    body = CHAT | {
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "logprobs": True,
        "n": 2,
    }
    policy = says("yes")
    response = post(policy, "/chat/completions", body)
    assert response.headers["content-type"].startswith("text/event-stream")
    *told, usage = events(response)
    assert {each["object"] for each in told} == {"chat.completion.chunk"}
    assert [each["choices"][0]["index"] for each in told] == [0, 1]
    for each in told:
        (choice,) = each["choices"]
        assert choice["delta"] == {"role": "assistant", "content": "yes"}
        assert (choice["token_ids"], choice["finish_reason"]) == (policy.ids, "stop")
    assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], 8)


def test_completions_take_texts_and_token_ids_and_tell_which_prompt_is_whose(tokenizer, says):
    body = {"prompt": ["a", "bc"], "n": 2, "return_token_ids": True, "logprobs": 1}
    answer = post(says("ok"), "/completions", body).json()
    assert answer["object"] == "text_completion"
    assert [each["text"] for each in answer["choices"]] == ["ok"] * 4
    asked = [tokenizer.decode(each["prompt_token_ids"]) for each in answer["choices"]]
    assert asked == ["a", "a", "bc", "bc"]
    assert answer["choices"][0]["logprobs"]["token_logprobs"] == [-0.5] * 3
    policy = says("ok")
    (event,) = events(post(policy, "/completions", {"prompt": [7], "stream": True}))
    assert (event["object"], event["choices"][0]["text"]) == ("text_completion", "ok")
    post(policy, "/completions", {"prompt": [[5, 6], [7]]})
    assert [each.prompt_ids.tolist() for each in policy.sampled] == [[7], [5, 6], [7]]


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_call_is_told_as_one(says, stream):
    body = CHAT | {"tools": TOOLS, "stream": stream}
    response = post(says(f"see {CALL}"), "/chat/completions", body)
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


def test_tools_reach_the_template_with_calls_and_results_of_earlier_turns(tokenizer, says):
    template = (
        "{{ tools | map(attribute='function.name') | join }}|{% for m in messages %}"
        "{{ m.role }}{{ m.content }}{% for c in m.tool_calls %}{{ c.function.arguments.a }}"
        "{% endfor %}/{% endfor %}"
    )
    changed = AutoTokenizer.from_pretrained(tokenizer.name_or_path)
    changed.chat_template = template
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 41}'}}
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "42"},
    ]
    policy = Says(changed, [5, EOS])
    post(policy, "/chat/completions", {"messages": turns, "tools": TOOLS})
    assert tokenizer.decode(policy.sampled[0].prompt_ids) == "add|userhi/assistant41/tool42/"


@pytest.mark.parametrize(
    ("path", "body", "told"),
    [
        ("/completions", {}, "prompt: Field required"),
        ("/completions", {"prompt": []}, "at least 1"),
        ("/completions", {"prompt": [[]]}, "prompt."),
        ("/completions", {"prompt": [2**80]}, "less than 2147483648"),
        ("/completions", {"prompt": [-1]}, "greater than or equal to 0"),
        ("/chat/completions", {"messages": []}, "messages: List should have at least 1"),
        ("/chat/completions", {"messages": [{}]}, "messages.0.role"),
        (
            "/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "only texts are served",
        ),
        ("/chat/completions", CHAT | {"temperature": -1}, "temperature"),
        ("/chat/completions", CHAT | {"top_logprobs": 5}, "top_logprobs"),
        ("/chat/completions", CHAT | {"temprature": 1}, "temprature: Extra inputs"),
        ("/chat/completions", CHAT | {"frequency_penalty": 0.5}, "frequency_penalty"),
        ("/chat/completions", CHAT | {"tool_choice": "required"}, "tool_choice"),
        ("/completions", [1], "body: "),
    ],
)
def test_what_is_not_served_is_refused_by_name(says, path, body, told):
    policy = says("x")
    response = post(policy, path, body)
    assert response.status_code == 400
    assert told in response.json()["error"]["message"]
    assert policy.sampled == []


def test_a_body_that_is_no_json_is_refused(says):
    async def answer() -> httpx.Response:
        async with client(says("x")) as asking:
            return await asking.post("/completions", content=b"{")

    response = asyncio.run(answer())
    assert response.status_code == 400
    assert "Invalid JSON" in response.json()["error"]["message"]


def test_nobody_asks_without_the_key(says):
    response = post(says("x"), "/chat/completions", CHAT, key="wrong")
    assert response.status_code == 401
    assert response.json()["error"]["message"] == "the API key is missing or wrong"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status"), [(RuntimeError("the engine is gone"), 500), (ValueError("too much"), 400)]
)
def test_errors_of_the_engine_are_told(says, stream, error, status):
    response = post(says("x", error=error), "/chat/completions", CHAT | {"stream": stream})
    assert response.status_code == status
    assert response.json()["error"]["message"] == str(error)


def test_a_response_that_was_given_back_is_no_answer(says):
    response = post(says("x", finish_reason="paused"), "/chat/completions", CHAT)
    assert response.status_code == 503


def test_a_client_that_closes_has_all_its_responses_taken_back(says):
    policy = says("x", wait_s=100)

    async def leave() -> None:
        body = json.dumps(CHAT | {"n": 3}).encode()
        arrived = iter([{"type": "http.request", "body": body}])

        async def receive() -> Any:
            if (more := next(arrived, None)) is not None:
                return more
            while len(policy.sampled) < 3:
                await asyncio.sleep(0.001)
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            return None

        headers = [(b"authorization", b"Bearer right")]
        scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions"}
        await app(policy)(scope | {"headers": headers, "query_string": b""}, receive, send)

    asyncio.run(asyncio.wait_for(leave(), 10))
    assert policy.taken_back == 3


def test_the_model_is_listed(says):
    async def answer() -> Any:
        async with client(says("x")) as asking:
            return (await asking.get("/models")).json()

    (card,) = asyncio.run(answer())["data"]
    assert (card["id"], card["max_model_len"]) == ("tiny", 64)
