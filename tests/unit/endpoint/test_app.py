"""The endpoint's answers, with a sampler that says what it is told to say."""

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

from raypo.endpoint.app import Served, make_app
from raypo.serving.requests import Completion, Heard, SamplingRequest
from tests.tiny import tiny_tokenizer

EOS = 2
CHAT = {"messages": [{"role": "user", "content": "hi"}]}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


@dataclass
class Says:
    """Answers every request with the same ids, and tells the first `told` of them before."""

    ids: Sequence[int]
    finish_reason: str = "stop"
    told: tuple[int, ...] = (1,)
    waits: bool = False
    """For ever after these."""
    error: Exception | None = None
    asked: list[SamplingRequest] = field(default_factory=list)
    taken_back: list[str] = field(default_factory=list)

    async def sample(self, request: SamplingRequest, heard: Heard) -> Completion:
        self.asked.append(request)
        if self.error:
            raise self.error
        known = 0
        for more in self.told:
            heard(request, self.ids[known : known + more], [-0.5] * more)
            known += more
        try:
            await asyncio.sleep(1000 if self.waits else 0.001)
        except asyncio.CancelledError:
            self.taken_back.append(request.id)
            raise
        log_probs = np.full(len(self.ids), -0.5, dtype=np.float32)
        return Completion(np.array(self.ids, np.int32), log_probs, self.finish_reason, 0)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return AutoTokenizer.from_pretrained(tiny_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture
def says(tokenizer):
    def text(text: str, **changes: Any) -> Says:
        return Says([*tokenizer.encode(text), EOS], **changes)

    return text


@asynccontextmanager
async def client(tokenizer, sampler: Says, **how: Any) -> AsyncIterator[httpx.AsyncClient]:
    served = Served("tiny", tokenizer, (EOS,), 64, sampler)
    transport = httpx.ASGITransport(make_app(served, **{"token": None, **how}))
    async with httpx.AsyncClient(transport=transport, base_url="http://test/v1") as asking:
        yield asking


def post(tokenizer, sampler: Says, path: str, body: Any, headers=None, **how) -> httpx.Response:
    async def answer() -> httpx.Response:
        async with client(tokenizer, sampler, **how) as asking:
            return await asking.post(path, json=body, headers=headers)

    return asyncio.run(answer())


def events(response: httpx.Response) -> list[Any]:
    lines = [line for line in response.text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def test_a_chat_goes_through_the_template_and_comes_back_as_a_message(tokenizer, says):
    sampler = says("yes")
    body = CHAT | {"max_tokens": 5, "temperature": 0.5, "top_p": 0.9, "seed": 7}
    answer = post(tokenizer, sampler, "/chat/completions", body).json()
    (asked,) = sampler.asked
    assert tokenizer.decode(asked.prompt_ids) == "user: hi\nassistant: "
    assert (asked.max_new_tokens, asked.temperature, asked.top_p, asked.seed) == (5, 0.5, 0.9, 7)
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "yes"}
    assert choice["finish_reason"] == "stop"
    assert answer["usage"] == {"prompt_tokens": 20, "completion_tokens": 4, "total_tokens": 24}


def test_token_ids_and_log_probs_are_told_where_they_are_wanted(tokenizer, says):
    sampler = says("yes")
    body = CHAT | {"return_token_ids": True, "logprobs": True}
    answer = post(tokenizer, sampler, "/chat/completions", body).json()
    (choice,) = answer["choices"]
    assert answer["prompt_token_ids"] == sampler.asked[0].prompt_ids.tolist()
    assert choice["token_ids"] == sampler.ids
    told = choice["logprobs"]["content"]
    assert [each["token"] for each in told] == ["y", "e", "s", "<eos>"]
    assert {each["logprob"] for each in told} == {-0.5}


def test_a_response_may_fill_the_rest_of_the_context(tokenizer, says):
    sampler = says("yes")
    post(tokenizer, sampler, "/chat/completions", CHAT)
    assert sampler.asked[0].max_new_tokens == 64 - 20


def test_a_stream_tells_the_same_in_pieces(tokenizer, says):
    body = CHAT | {
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "logprobs": True,
    }
    response = post(tokenizer, says("yes"), "/chat/completions", body)
    assert response.headers["content-type"].startswith("text/event-stream")
    *told, usage = events(response)
    assert [each["choices"][0]["delta"]["content"] for each in told] == ["y", "es"]
    assert [i for each in told for i in each["choices"][0]["token_ids"]] == says("yes").ids
    assert [each["choices"][0]["finish_reason"] for each in told] == [None, "stop"]
    assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], 4)


def test_completions_take_texts_and_token_ids_and_tell_which_prompt_is_whose(tokenizer, says):
    sampler = says("ok")
    body = {"prompt": ["a", "bc"], "n": 2, "return_token_ids": True, "logprobs": 1, "seed": 3}
    answer = post(tokenizer, sampler, "/completions", body).json()
    assert [each["text"] for each in answer["choices"]] == ["ok"] * 4
    asked = [tokenizer.decode(each["prompt_token_ids"]) for each in answer["choices"]]
    assert asked == ["a", "a", "bc", "bc"]
    assert [each.seed for each in sampler.asked] == [3, 4, 3, 4]
    assert answer["choices"][0]["logprobs"]["token_logprobs"] == [-0.5] * 3
    sampler = says("ok")
    post(tokenizer, sampler, "/completions", {"prompt": [[5, 6], [7]]})
    assert [each.prompt_ids.tolist() for each in sampler.asked] == [[5, 6], [7]]


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_call_is_told_as_one(tokenizer, says, stream):
    body = CHAT | {"tools": TOOLS, "stream": stream}
    response = post(tokenizer, says(f"see {CALL}"), "/chat/completions", body)
    if stream:
        told = [each["choices"][0] for each in events(response)]
        assert "".join(each["delta"]["content"] or "" for each in told) == "see "
        last, message = told[-1], told[-1]["delta"]
    else:
        (last,) = response.json()["choices"]
        message = last["message"]
        assert message["content"] == "see "
    assert last["finish_reason"] == "tool_calls"
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
    sampler = says("ok")
    post(changed, sampler, "/chat/completions", {"messages": turns, "tools": TOOLS})
    assert tokenizer.decode(sampler.asked[0].prompt_ids) == "add|userhi/assistant41/tool42/"


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_response_and_takes_the_request_back(tokenizer, says, stream):
    sampler = says("say END and more", told=(6, 4), waits=True)
    body = CHAT | {"stop": "END", "stream": stream, "return_token_ids": True}

    async def answer() -> httpx.Response:
        async with client(tokenizer, sampler) as asking:
            response = await asking.post("/chat/completions", json=body)
            await asyncio.sleep(0.01)
            return response

    response = asyncio.run(answer())
    if stream:
        told = [each["choices"][0] for each in events(response)]
        assert "".join(each["delta"]["content"] for each in told) == "say "
        token_ids = [i for each in told for i in each["token_ids"]]
    else:
        (choice,) = response.json()["choices"]
        assert choice["message"]["content"] == "say "
        token_ids = choice["token_ids"]
    assert tokenizer.decode(token_ids) == "say END"
    assert len(sampler.taken_back) == 1


@pytest.mark.parametrize(
    ("path", "body", "status", "told"),
    [
        ("/chat/completions", CHAT | {"model": "gpt-4"}, 404, "there is no model gpt-4; served"),
        ("/chat/completions", CHAT | {"max_tokens": 60}, 400, "more than the 64"),
        ("/completions", {"prompt": "a" * 64}, 400, "64 tokens of prompt and 1 of response"),
        ("/completions", {"prompt": ""}, 400, "the prompt has no tokens"),
        ("/completions", {}, 400, "prompt: Field required"),
        ("/completions", {"prompt": []}, 400, "at least 1"),
        ("/completions", {"prompt": [[]]}, 400, "prompt."),
        ("/completions", {"prompt": [2**80]}, 400, "less than 2147483648"),
        ("/completions", {"prompt": [-1]}, 400, "greater than or equal to 0"),
        ("/chat/completions", {"messages": []}, 400, "messages: List should have at least 1"),
        ("/chat/completions", {"messages": [{}]}, 400, "messages.0.role"),
        (
            "/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            400,
            "only texts are served",
        ),
        ("/chat/completions", CHAT | {"temperature": -1}, 400, "temperature"),
        ("/chat/completions", CHAT | {"top_logprobs": 5}, 400, "top_logprobs"),
        ("/chat/completions", CHAT | {"temprature": 1}, 400, "temprature: Extra inputs"),
        ("/chat/completions", CHAT | {"frequency_penalty": 0.5}, 400, "frequency_penalty"),
        ("/chat/completions", CHAT | {"tool_choice": "required"}, 400, "tool_choice"),
        ("/completions", [1], 400, "body: "),
    ],
)
def test_what_is_not_served_is_refused_by_name(tokenizer, says, path, body, status, told):
    sampler = says("x")
    response = post(tokenizer, sampler, path, body)
    assert response.status_code == status
    assert told in response.json()["error"]["message"]
    assert sampler.asked == []


def test_a_body_that_is_no_json_is_refused(tokenizer, says):
    async def answer() -> httpx.Response:
        async with client(tokenizer, says("x")) as asking:
            return await asking.post("/completions", content=b"{")

    response = asyncio.run(answer())
    assert response.status_code == 400
    assert "not JSON" in response.json()["error"]["message"]


@pytest.mark.parametrize("header", [None, "Bearer", "Bearer wrong", "wrong"])
def test_nobody_asks_without_the_key(tokenizer, says, header):
    headers = {"Authorization": header} if header else None
    response = post(tokenizer, says("x"), "/chat/completions", CHAT, headers, token="right")
    assert response.status_code == 401
    assert response.json()["error"]["message"] == "the API key is missing or wrong"


def test_the_key_opens(tokenizer, says):
    headers = {"Authorization": "Bearer right"}
    response = post(tokenizer, says("x"), "/chat/completions", CHAT, headers, token="right")
    assert response.status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status"), [(RuntimeError("the engine is gone"), 500), (ValueError("too much"), 400)]
)
def test_errors_of_the_engine_are_told(tokenizer, says, stream, error, status):
    sampler = says("x", error=error)
    response = post(tokenizer, sampler, "/chat/completions", CHAT | {"stream": stream})
    assert response.status_code == status
    assert response.json()["error"]["message"] == str(error)


def test_a_response_that_was_given_back_is_no_answer(tokenizer, says):
    sampler = says("x", finish_reason="paused")
    response = post(tokenizer, sampler, "/chat/completions", CHAT)
    assert response.status_code == 503
    assert response.headers["Retry-After"] == "1"


def test_more_than_may_be_under_way_are_told_to_come_again(tokenizer, says):
    response = post(tokenizer, says("x"), "/chat/completions", CHAT | {"n": 3}, max_requests=2)
    assert response.status_code == 503


def test_what_is_too_much_is_refused_before_its_prompts_are_read(tokenizer, says, monkeypatch):
    read: list[Any] = []
    monkeypatch.setattr(Served, "text_ids", lambda _, prompt: read.append(prompt) or [5])
    body = {"prompt": ["x"] * 100, "n": 100}
    response = post(tokenizer, says("x"), "/completions", body, max_requests=9999)
    assert response.status_code == 503
    assert read == []


def test_requests_that_come_at_the_same_time_count_for_each_other(tokenizer, says):
    async def statuses() -> list[int]:
        async with client(tokenizer, says("x"), max_requests=2) as asking:
            asked = [asking.post("/chat/completions", json=CHAT | {"n": 2}) for _ in range(4)]
            return sorted([each.status_code for each in await asyncio.gather(*asked)])

    assert asyncio.run(statuses()) == [200, 503, 503, 503]


@pytest.mark.parametrize("reason", [None, "this engine cannot go on"])
def test_health_is_the_engines(tokenizer, says, reason):
    def check() -> None:
        if reason:
            raise RuntimeError(reason)

    async def answer() -> httpx.Response:
        async with client(tokenizer, says("x"), check=check) as asking:
            return await asking.get("http://test/health")

    response = asyncio.run(answer())
    assert response.status_code == (503 if reason else 200)
    assert reason is None or response.json()["error"]["message"] == reason


def test_places_are_given_back(tokenizer, says):
    async def statuses() -> list[int]:
        async with client(tokenizer, says("x"), max_requests=2) as asking:
            return [
                (await asking.post("/chat/completions", json=CHAT | {"n": 2})).status_code
                for _ in range(3)
            ]

    assert asyncio.run(statuses()) == [200] * 3


def test_the_model_is_listed(tokenizer, says):
    async def answer() -> Any:
        async with client(tokenizer, says("x")) as asking:
            return (await asking.get("/models")).json()

    (card,) = asyncio.run(answer())["data"]
    assert (card["id"], card["max_model_len"]) == ("tiny", 64)
