"""One engine behind a handle, asked by many threads and processes at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from transformers import AutoModelForCausalLM

from raypo.config import EngineSection
from raypo.deployment.deployment import Deployment, Placement, start_deployment
from raypo.serving.client import EngineClient
from raypo.serving.engine import Engine
from raypo.serving.requests import Load, SamplingRequest
from raypo.weights.store import WeightSnapshot, WeightStore
from tests.integration.test_engine import weights
from tests.stand_ins import local_push, pack
from tests.tiny import tiny_policy

pytestmark = pytest.mark.usefixtures("local_ray")

THREADS = 12
PROMPT = np.array([5, 6, 7], dtype=np.int32)


def ask(tokens: int, seed: int, id: str = "") -> SamplingRequest:
    return SamplingRequest(PROMPT, tokens, 1.0, seed=seed, id=id)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def engines(policy: Path, local_ray: None) -> Iterator[EngineClient]:
    kwargs: dict[str, Any] = {
        "model": str(policy),
        "section": EngineSection(kv_cache_gb=0.1),
        "dtype": "float32",
        "max_model_len": 512,
        "reads_weights": True,
    }
    deployment = Deployment(
        "raypo:callers:engine", Engine, kwargs, max_ongoing_requests=4, start_timeout_s=120.0
    )
    handle = start_deployment(deployment, [Placement()])
    handle.wait(120.0)
    yield EngineClient(handle)
    handle.shutdown(0.0)


@ray.remote(num_cpus=0)
def from_another_process(engines: EngineClient, seed: int) -> list[int]:
    return engines.submit([ask(20, seed)]).result()[0].token_ids.tolist()


def test_many_callers_share_the_steps_of_one_engine(engines: EngineClient):
    """More calls than the replica has threads: those wait for responses in none."""
    alone = [engines.generate([ask(60, seed)]).result()[0] for seed in range(THREADS)]
    before = engines.handle.call(Engine.load_summary).result()[0]

    def call(seed: int) -> list[int]:
        return engines.submit([ask(60, seed)]).result()[0].token_ids.tolist()

    elsewhere = from_another_process.remote(engines, 0)
    with ThreadPoolExecutor(THREADS) as threads:
        answers = list(threads.map(call, range(THREADS)))

    assert answers == [each.token_ids.tolist() for each in alone]
    assert ray.get(elsewhere) == alone[0].token_ids[:20].tolist()
    steps = engines.handle.call(Engine.load_summary).result()[0].steps - before.steps
    assert steps < 60 * THREADS / 2, "they did not share"


def test_callers_are_not_in_the_way_of_a_pause(engines: EngineClient):
    under_way = [engines.submit([ask(400, seed)]) for seed in range(THREADS)]
    [each.result() for each in engines.handle.control(Engine.pause, "keep")]
    whole = engines.generate([ask(3, 0)])  # a batch waits for the pause to end too
    [each.result() for each in engines.handle.control(Engine.resume)]
    answers = [each.result()[0] for each in under_way]
    assert all(len(each.token_ids) == 400 for each in answers)
    assert len(whole.result()[0].token_ids) == 3


def test_an_engine_gives_back_what_nobody_waits_for_any_more(engines: EngineClient):
    def load() -> Load:
        return engines.handle.control(Engine.load_summary)[0].result()[0]

    async def leave() -> None:
        left = asyncio.wrap_future(engines.submit([ask(400, 0)]))
        stays = asyncio.wrap_future(engines.submit([ask(400, 1)]))
        before = load().tokens
        while load().tokens < before + 20:
            await asyncio.sleep(0.01)
        left.cancel()
        assert len((await stays)[0].token_ids) == 400
        with pytest.raises(asyncio.CancelledError):
            await left
        while load().running:
            await asyncio.sleep(0.01)
        assert before + 400 < load().tokens < before + 790

    asyncio.run(leave())


def test_what_requires_a_push_that_was_replaced_is_served_by_the_newer_one(
    engines: EngineClient, policy: Path
):
    """It was on its way meanwhile; of what it requires nothing is kept any more."""
    model, weight_store = AutoModelForCausalLM.from_pretrained(policy), WeightStore()

    def keep(version: int) -> WeightSnapshot:
        push = local_push(pack(weights(model).items(), bucket_bytes=20_000), version=version)
        return weight_store.keep(replace(push, id=f"push {version}"), id=f"push {version}")

    older = keep(7)
    engines.require(older)
    assert engines.generate([ask(1, 0)]).result()[0].weight_version == 7
    engines.require(keep(8))
    assert engines.generate([ask(1, 0)]).result()[0].weight_version == 8
    engines.require(older)
    assert engines.submit([ask(1, 0)]).result()[0].weight_version == 8
