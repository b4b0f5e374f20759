"""The engine's tokens per second against vLLM's own `LLM.generate`, on the same requests.

    pytest -m benchmark tests/benchmarks/test_engine_throughput.py -s

As a whole batch, and from several clients at once whose requests join each other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from statistics import median

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from raypo.config import EngineSection
from raypo.serving.engine import Engine
from raypo.serving.requests import Completion, SamplingRequest
from raypo.serving.vllm_requests import sampling_params
from tests.stand_ins import generate, local_push, pack
from tests.tiny import tiny_policy

CLIENTS, EACH = 8, 8
ROUNDS = 9
LEAST = 0.95


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = str(tiny_policy(tmp_path_factory.mktemp("m"), hidden=512, layers=8, head_dim=64))
    started = Engine(
        folder, section=EngineSection(kv_cache_gb=0.5), dtype="float32", max_model_len=256
    )
    model = AutoModelForCausalLM.from_pretrained(folder)
    named = ((name, p.detach()) for name, p in model.named_parameters(remove_duplicate=False))
    with torch.no_grad():
        started.load_weights(local_push(pack(named, bucket_bytes=10**8), version=1))
    yield started
    started.shutdown()


def requests() -> list[SamplingRequest]:
    """Prompts of 20 to 51 tokens, responses of 30 to 93."""
    return [
        SamplingRequest(np.arange(20 + i % 32, dtype=np.int32) + 3, 30 + i, 1.0, seed=i)
        for i in range(CLIENTS * EACH)
    ]


def as_vllm_itself(engine: Engine) -> None:
    """In the thread that owns vLLM, as all else."""
    prompts = [{"prompt_token_ids": request.prompt_ids.tolist()} for request in requests()]
    parameters = [sampling_params(request) for request in requests()]
    engine._loop.call(lambda: engine._llm.generate(prompts, parameters, use_tqdm=False))


def as_a_batch(engine: Engine) -> None:
    generate(engine, requests())


def by_clients(engine: Engine) -> None:
    every = requests()

    def ask(lot: list[SamplingRequest]) -> list[Completion]:
        return [each.result() for each in engine.submit(lot)]

    with ThreadPoolExecutor(CLIENTS) as pool:
        lots = [every[client::CLIENTS] for client in range(CLIENTS)]
        list(pool.map(ask, lots))


def test_nothing_is_lost_against_vllm_itself(engine: Engine):
    ways: dict[str, Callable[[Engine], None]] = {
        "LLM.generate": as_vllm_itself,
        "a whole batch": as_a_batch,
        f"{CLIENTS} clients": by_clients,
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS + 1):  # in turns, as the machine's load changes; the first warms up
        for name, way in ways.items():
            begin = time.perf_counter()
            way(engine)
            seconds[name].append(time.perf_counter() - begin)
    tokens = sum(request.max_new_tokens for request in requests())
    print()
    shares = {}
    for name, each in seconds.items():
        own = np.array(seconds["LLM.generate"][1:])
        shares[name] = median(own / np.array(each[1:]))  # of neighbours in time
        print(
            f"{name}: {tokens / median(each[1:]):.0f} tokens/s, {shares[name]:.3f} of LLM.generate"
        )
    assert all(share >= LEAST for share in shares.values())
