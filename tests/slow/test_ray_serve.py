"""A run's policy on Ray Serve LLM; skipped without the packages of `ray[serve]`."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import ray
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.integration.ray_cluster import free_port
from tests.integration.task import raypo
from tests.tiny import tiny_policy

for package in ("grpc_reflection", "mmh3"):
    pytest.importorskip(package)

PROMPTS = ["12+3=", "a quick brown", "0"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "trained"
    tiny_policy(folder / "policy", tied=False)
    (folder / "config.yaml").write_text(
        f"name: trained\nrecipe: sft\nnum_steps: 1\nmodel: {{policy: {folder}/policy, "
        f"dtype: float32}}\ndata: {{prompts: nowhere.jsonl}}\n"
    )
    return folder


def greedy(run: Path, prompt: str) -> list[int]:
    model: Any = AutoModelForCausalLM.from_pretrained(run / "policy")
    ids = AutoTokenizer.from_pretrained(run / "policy")(prompt, return_tensors="pt").input_ids
    with torch.no_grad():
        whole = model.generate(ids, max_new_tokens=6, do_sample=False)
    return whole[0, ids.shape[1] :].tolist()


def ask(client: Any, prompt: str, model: str) -> list[int]:
    answer = client.completions.create(
        model=model,
        prompt=prompt,
        max_tokens=6,
        temperature=0,
        extra_body={"return_token_ids": True},
    )
    return answer.choices[0].token_ids


def client_at(url: str) -> Any:
    return openai.OpenAI(base_url=url, api_key="none", max_retries=0)


def test_the_command_serves_the_runs_policy_and_leaves_nothing(run: Path):
    server = raypo("serve", run, "--ray", "--port", str(free_port()), "--kv-cache-gb", "0.1")
    try:
        assert server.stdout is not None
        lines = iter(server.stdout.readline, "")
        line = next(each for each in lines if each.startswith("raypo: serves trained at "))
        client = client_at(line.split(" at ")[1].strip())
        assert [each.id for each in client.models.list()] == ["trained"]
        for prompt in PROMPTS:
            assert ask(client, prompt, "trained") == greedy(run, prompt)
        with pytest.raises(openai.NotFoundError):
            ask(client, "1", "another")
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0
    finally:
        server.kill()
        server.communicate()


@pytest.fixture
def own_ray() -> Iterator[None]:
    ray.init(address="local", include_dashboard=False, num_cpus=3, log_to_driver=False)
    yield
    from ray import serve

    serve.shutdown()
    ray.shutdown()


@pytest.mark.usefixtures("own_ray")
def test_a_script_adds_the_policy_to_an_application_of_its_own(run: Path):
    from ray import serve
    from ray.serve.llm import build_openai_app

    from raypo import llm_config

    config = llm_config(
        run, name="mine", engine_kwargs={"max_model_len": 64, "kv_cache_memory_bytes": 10**8}
    )
    port = free_port()
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(build_openai_app({"llm_configs": [config]}), route_prefix="/policy", name="policy")
    client = client_at(f"http://127.0.0.1:{port}/policy/v1")
    assert ask(client, PROMPTS[0], "mine") == greedy(run, PROMPTS[0])
    assert os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") is None, "the script's own engines"
