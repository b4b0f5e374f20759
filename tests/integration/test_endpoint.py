"""`raypo serve` with a real engine, asked by OpenAI's own client."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import openai
import pytest
import uvicorn

from raypo import Rollout
from raypo.config import EngineSection
from raypo.endpoint.app import Served, make_app
from raypo.endpoint.local import served_model
from raypo.serving.engine import Engine
from raypo.serving.requests import SamplingRequest
from tests.tiny import tiny_policy

MESSAGES: Any = [{"role": "user", "content": "Say something."}]
KEY = "a-key"


@dataclass
class Asked:
    served: Served
    engine: Engine
    base_url: str

    @property
    def client(self) -> Any:
        """OpenAI's own; its types know none of the ids."""
        return openai.OpenAI(base_url=self.base_url, api_key=KEY, max_retries=0)

    def until_idle(self) -> int:
        """Waits until nothing is sampled; tokens that were sampled so far."""
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            load = self.engine.load()
            if not load.running and not load.queued:
                return load.tokens
            time.sleep(0.05)
        raise AssertionError(self.engine.load())


@pytest.fixture(scope="module")
def asked(tmp_path_factory) -> Iterator[Asked]:
    folder = str(tiny_policy(tmp_path_factory.mktemp("policy"), max_position_embeddings=2048))
    section = EngineSection(kv_cache_gb=0.1)
    with (
        served_model(folder, name="tiny", section=section, dtype="float32", max_model_len=None) as (
            served,
            engine,
        ),
        socket.create_server(("127.0.0.1", 0)) as listening,
    ):
        server = uvicorn.Server(
            uvicorn.Config(
                make_app(served, token=KEY, check=engine.check_health), log_level="warning"
            )
        )
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        address = f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
        yield Asked(served, engine, address)
        server.should_exit = True
        thread.join()


def test_the_answer_is_what_the_engine_samples_token_by_token(asked: Asked):
    answer = asked.client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        max_tokens=24,
        temperature=0.7,
        top_p=0.9,
        seed=5,
        logprobs=True,
        extra_body={"return_token_ids": True},
    )
    tokenizer = asked.served.tokenizer
    text = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=False)
    prompt_ids = tokenizer.encode(text, add_special_tokens=False)
    request = SamplingRequest(
        np.array(prompt_ids), 24, 0.7, 0.9, seed=5, stop_token_ids=asked.served.stop_token_ids
    )
    (sampled,) = asked.engine.generate([request])
    (choice,) = answer.choices
    assert answer.prompt_token_ids == prompt_ids
    assert choice.token_ids == sampled.token_ids.tolist()
    told = [each.logprob for each in choice.logprobs.content]
    np.testing.assert_allclose(told, sampled.log_probs, atol=1e-5)
    expected = tokenizer.decode(sampled.token_ids, skip_special_tokens=True)
    assert choice.message.content == expected
    assert choice.finish_reason == sampled.finish_reason
    assert answer.usage.completion_tokens == len(sampled.token_ids)


def test_a_stream_is_the_same_answer_piece_by_piece(asked: Asked):
    how = {"model": "tiny", "messages": MESSAGES, "max_tokens": 40, "seed": 8, "logprobs": True}
    how["extra_body"] = {"return_token_ids": True}
    (whole,) = asked.client.chat.completions.create(**how).choices
    stream = asked.client.chat.completions.create(
        **how, stream=True, stream_options={"include_usage": True}
    )
    *pieces, usage = list(stream)
    choices = [each.choices[0] for each in pieces]
    assert len(choices) > 3
    assert "".join(each.delta.content for each in choices) == whole.message.content
    assert [i for each in choices for i in each.token_ids] == whole.token_ids
    log_probs = [at.logprob for each in choices for at in each.logprobs.content]
    np.testing.assert_allclose(log_probs, [at.logprob for at in whole.logprobs.content], atol=1e-5)
    assert choices[-1].finish_reason == whole.finish_reason
    assert usage.usage.completion_tokens == len(whole.token_ids)


def test_samples_of_a_prompt_are_those_of_their_seeds(asked: Asked):
    def ids(seed: int, n: int) -> list[list[int]]:
        answer = asked.client.completions.create(
            model="tiny",
            prompt="abc",
            n=n,
            seed=seed,
            max_tokens=8,
            extra_body={"return_token_ids": True},
        )
        return [each.token_ids for each in answer.choices]

    assert ids(3, n=3) == ids(3, n=1) + ids(4, n=1) + ids(5, n=1)


def test_a_stop_string_ends_the_response_in_the_engine_too(asked: Asked):
    how = {"model": "tiny", "prompt": "abc", "seed": 11, "max_tokens": 1500, "temperature": 1.5}
    text = asked.client.completions.create(**how | {"max_tokens": 30}).choices[0].text
    before = asked.until_idle()
    (cut,) = asked.client.completions.create(**how, stop=text[4:7]).choices
    assert cut.text == text[: text.index(text[4:7])]
    assert cut.finish_reason == "stop"
    assert asked.until_idle() - before < 300


@pytest.mark.parametrize("pieces", [1, 5])
def test_closing_while_streaming_cancels_in_the_engine(asked: Asked, pieces: int):
    before = asked.until_idle()
    stream = asked.client.completions.create(
        model="tiny", prompt="abc", n=4, seed=1, max_tokens=1500, stream=True, stop="no such text"
    )
    for _ in range(pieces):
        next(iter(stream))
    stream.close()
    assert asked.until_idle() - before < 2000


def test_a_client_that_stops_waiting_cancels_in_the_engine(asked: Asked):
    before = asked.until_idle()
    with pytest.raises(openai.APITimeoutError):
        asked.client.with_options(timeout=0.3).completions.create(
            model="tiny", prompt="abc", n=4, seed=2, max_tokens=1500
        )
    assert asked.until_idle() - before < 2000


def test_many_clients_are_answered_at_the_same_time(asked: Asked):
    async def answers() -> list[str]:
        client: Any = openai.AsyncOpenAI(base_url=asked.base_url, api_key=KEY)

        async def one(seed: int) -> str:
            answer = await client.chat.completions.create(
                model="tiny", messages=MESSAGES, seed=seed % 8, max_tokens=16, temperature=0.7
            )
            return answer.choices[0].message.content

        return await asyncio.gather(*map(one, range(64)))

    texts = asyncio.run(answers())
    assert texts == texts[:8] * 8
    assert len(set(texts)) > 4


def test_the_examples_judge_asks_it_for_grades(asked: Asked, monkeypatch: pytest.MonkeyPatch):
    from examples.smollm2_judge import reward

    monkeypatch.setattr(reward, "URL", asked.base_url)
    monkeypatch.setattr(reward, "MODEL", "tiny")
    monkeypatch.setenv("RAYPO_API_KEY", KEY)
    blank = np.zeros(1, np.int32)
    rollouts = [
        Rollout("Greet.", text, blank, blank, blank, blank, None, 0, 0, "stop", 0)
        for text in ("Hello!", "Go away.")
    ]
    before = asked.until_idle()
    grades = asyncio.run(reward.grade(rollouts))
    assert asked.until_idle() > before
    assert all(each is None or each in (0.0, 0.25, 0.5, 0.75, 1.0) for each in grades)

    monkeypatch.setattr(reward, "MODEL", "another")
    refused = asyncio.run(reward.grade(rollouts))
    assert len(grades) == len(refused) == 2
    assert all(isinstance(each, openai.NotFoundError) for each in refused)


def test_the_clients_exceptions_are_those_of_openai(asked: Asked):
    create = asked.client.chat.completions.create
    with pytest.raises(openai.NotFoundError, match="served is tiny"):
        create(model="other", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError, match="more than the 2048") as refused:
        create(model="tiny", messages=[{"role": "user", "content": "x" * 3000}])
    assert refused.value.code == "context_length_exceeded"
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=asked.base_url, api_key="wrong", max_retries=0).models.list()
    assert [each.id for each in asked.client.models.list()] == ["tiny"]
