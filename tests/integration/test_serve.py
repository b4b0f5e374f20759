"""`raypo serve` as a process of its own, asked by OpenAI's own client."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from raypo import PPOConfig, Rollout
from raypo.config import EngineSection
from raypo.models.loading import load_tokenizer, stop_token_ids
from raypo.rewards.functions import open_servers
from raypo.rewards.scoring import FailedScore, score, texts_of
from raypo.serving.engine import Engine
from raypo.serving.requests import SamplingRequest
from tests.integration.task import raypo
from tests.stand_ins import generate
from tests.tiny import tiny_policy
from tests.unit.test_hostile_requests import Target, hostile_requests, is_fine

MESSAGES: Any = [{"role": "user", "content": "Say something."}]
KEY = "a-key"
EXAMPLE = Path(__file__).parents[2] / "examples/smollm2_judge/ppo.yaml"


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> str:
    return str(tiny_policy(tmp_path_factory.mktemp("policy"), max_position_embeddings=2048))


@pytest.fixture(scope="module")
def base_url(policy: str) -> Iterator[str]:
    os.environ["RAYPO_API_KEY"] = KEY
    server = raypo("serve", policy, "--name", "tiny", "--port", "0", "--kv-cache-gb", "0.1")
    del os.environ["RAYPO_API_KEY"]
    try:
        assert server.stdout is not None
        line = server.stdout.readline()
        assert line.startswith("raypo: serves tiny at http://127.0.0.1:"), server.communicate()[1]
        yield line.split(" at ")[1].strip()
        server.send_signal(signal.SIGINT)
        assert server.wait(30) == 0
    finally:
        server.kill()
        server.communicate()


@pytest.fixture
def client(base_url: str) -> Any:
    """OpenAI's own; its types know none of the ids."""
    return openai.OpenAI(base_url=base_url, api_key=KEY, max_retries=0)


def test_what_is_told_is_what_an_engine_in_training_samples(client: Any, policy: str):
    answer = client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        max_tokens=24,
        temperature=0.7,
        top_p=0.9,
        seed=5,
        logprobs=True,
        extra_body={"return_token_ids": True},
    )
    tokenizer = load_tokenizer(policy)
    text = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=False)
    prompt_ids = tokenizer.encode(text, add_special_tokens=False)
    engine = Engine(
        policy,
        section=EngineSection(kv_cache_gb=0.1),
        dtype="float32",
        max_model_len=2048,
        reads_weights=True,
    )
    stops = stop_token_ids(policy, tokenizer)
    request = SamplingRequest(np.array(prompt_ids), 24, 0.7, 0.9, seed=5, stop_token_ids=stops)
    (sampled,) = generate(engine, [request])
    engine.shutdown()
    (choice,) = answer.choices
    assert answer.prompt_token_ids == prompt_ids
    assert choice.token_ids == sampled.token_ids.tolist()
    told = [each.logprob for each in choice.logprobs.content]
    np.testing.assert_allclose(told, sampled.log_probs, atol=1e-5)
    assert choice.message.content == tokenizer.decode(sampled.token_ids, skip_special_tokens=True)
    assert choice.finish_reason == sampled.finish_reason


def test_it_is_a_judge_of_responses(base_url: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RAYPO_API_KEY", KEY)
    blank = np.zeros(1, np.int32)
    rollouts = [
        Rollout("Greet.", text, blank, blank, blank, blank, None, 0, 0, "stop", 0)
        for text in ("Hello!", "Go away.")
    ]

    def judged(**changes: Any) -> list[float]:
        example = PPOConfig.load(EXAMPLE, ["model.policy=p"]).reward
        assert example.judge is not None
        judge = example.judge.model_copy(update={"url": (base_url,), "model": "tiny", **changes})
        return score(open_servers(example.model_copy(update={"judge": judge}))["judge"], rollouts)

    # A model of random weights names a grade if the engine samples nothing else.
    grades = {"structured_outputs": {"choice": ["1", "2", "3", "4", "5"]}}
    for chat in (False, True):
        scores = judged(chat=chat, sampling=grades)
        assert {each * 4 for each in scores} <= {0.0, 1.0, 2.0, 3.0, 4.0}, scores
        assert [dict(texts_of(each)) for each in scores] == [
            {"judge": f"{each * 4 + 1:.0f}"} for each in scores
        ]
    refused = judged(model="another")
    assert all(isinstance(each, FailedScore) and "status 404" in each.reason for each in refused)


@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/invocations", "/tokenize"])
def test_nothing_is_told_without_the_key(base_url: str, path: str):
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=base_url, api_key="wrong", max_retries=0).models.list()
    assert httpx.get(base_url.replace("/v1", path)).status_code == 401
    assert httpx.get(base_url.replace("/v1", "/health")).status_code == 200


def test_hostile_requests_leave_the_server_whole(base_url: str, client: Any):
    port = int(base_url.rsplit(":", 1)[1].partition("/")[0])
    for name, content in hostile_requests(Target("endpoint", port, KEY)).items():
        status = Target("endpoint", port).status(content)
        assert status is None or status >= 400 or is_fine(name, Target("endpoint", port)), name
    for name, content in hostile_requests(Target("endpoint", port, "wrong")).items():
        status = Target("endpoint", port).status(content)
        assert status is None or status >= 400, (name, status)
    assert [model.id for model in client.models.list()] == ["tiny"]


def test_a_port_that_is_taken_is_refused_at_once(base_url: str, tmp_path: Path):
    tiny_policy(tmp_path / "policy")
    port = base_url.rpartition(":")[2].removesuffix("/v1")
    server = raypo("serve", tmp_path / "policy", "--port", port)
    _, told = server.communicate(timeout=20)
    assert server.returncode == 2
    assert (
        f"--port ({port}): the server cannot listen on this port at 127.0.0.1 (Address already "
        "in use)"
    ) in told
