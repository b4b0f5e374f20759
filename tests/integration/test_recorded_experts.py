"""Experts that vLLM records, against those that the learner's routers choose, in float32."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from raypo.config import EngineSection, InFlight
from raypo.models.model_files import REPLAYED
from raypo.models.routers import routers_of
from raypo.serving.engine import Engine
from raypo.serving.requests import Completion, SamplingRequest
from tests.engine_contract import Pair, results, runs, until
from tests.integration.test_engine import learner_log_probs
from tests.stand_ins import generate, versions_of
from tests.tiny import tiny_experts

MAX_MODEL_LEN = 400
BLOCK = 32
LONG = np.arange(300, dtype=np.int32) % 90 + 3
"""A prompt of several blocks of the prefix cache, without a repeated block."""
DIFFERENT = 0.002
"""Share of choices in which rounding may lead to another expert, in float32."""


@pytest.fixture
def pair_of(tmp_path) -> Iterator[Callable[..., Pair]]:
    made: list[Pair] = []

    def start(architecture: str = "qwen3_moe", **extra: Any) -> Pair:
        folder = str(tiny_experts(tmp_path, architecture))
        tensor_parallel = extra.pop("tensor_parallel", 1)
        extra = {"max_num_seqs": 4, "block_size": BLOCK} | extra
        section = EngineSection(kv_cache_gb=0.1, extra=extra, tensor_parallel=tensor_parallel)
        model = AutoModelForCausalLM.from_pretrained(folder).eval()
        engine = Engine(
            folder,
            section=section,
            dtype="float32",
            max_model_len=MAX_MODEL_LEN,
            records_experts=True,
        )
        made.append(Pair(engine, model, learner_log_probs))
        engine.load_weights(made[0].push())
        return made[0]

    yield start
    for pair in made:
        pair.engine.shutdown()


def ask(prompt: np.ndarray, tokens: int, seed: int | None = 0) -> SamplingRequest:
    return SamplingRequest(prompt, tokens, 1.0, seed=seed, with_experts=True)


def chosen_by(model: Any, ids: np.ndarray) -> np.ndarray:
    """Experts [tokens, layers, k] that a transformers model chooses, sorted."""
    chosen: list[torch.Tensor] = []
    hooks = [
        router.register_forward_hook(lambda _m, _i, output: chosen.append(output[2]))
        for router in routers_of(model)
    ]
    with torch.no_grad():
        model(input_ids=torch.from_numpy(ids.astype(np.int64))[None])
    for hook in hooks:
        hook.remove()
    return torch.stack(chosen, 1).sort(-1).values.numpy()


def difference(pair: Pair, request: SamplingRequest, completion: Completion) -> float:
    """Share of choices in which the engine's experts are not those of the weights that read them.

    Tokens before a push have the experts of the old weights, also where they are read again.
    """
    ids = np.concatenate([request.prompt_ids, completion.token_ids[:-1]])
    assert completion.experts is not None
    assert completion.experts.dtype == np.uint8
    assert completion.experts.shape == (len(ids), 2, 2)
    versions = versions_of(completion)
    # The token that a version sampled last is read by the next version.
    readers = np.concatenate([np.repeat(versions[:1], len(request.prompt_ids)), versions[1:]])
    recorded = np.sort(completion.experts, -1)
    of_versions = {version: chosen_by(pair.models[version], ids) for version in set(versions)}
    expected = np.stack([of_versions[version][at] for at, version in enumerate(readers)])
    return float((recorded != expected).mean())


@pytest.mark.parametrize(
    ("architecture", "scheduler"), [*((each, "raypo's") for each in REPLAYED), ("olmoe", "vLLM's")]
)
def test_the_experts_are_the_learners_with_a_cached_prefix_and_without(
    pair_of: Callable[..., Pair], architecture: str, scheduler: str
):
    extra = {} if scheduler == "raypo's" else {"scheduler_cls": None}
    pair = pair_of(architecture, **extra)
    asked = [ask(LONG, 40, seed) for seed in range(6)] + [
        ask(LONG[:7], 40, seed) for seed in (7, 8)
    ]
    once = generate(pair.engine, asked)
    again = generate(pair.engine, asked)
    for request, *both in zip(asked, once, again, strict=True):
        for completion in both:
            assert difference(pair, request, completion) <= DIFFERENT
    # Tokens that were cached have the very experts of the pass that read them.
    cached = len(LONG) // BLOCK * BLOCK
    first = once[0].experts
    assert first is not None
    for completion in (*once[1:6], *again[:6]):
        assert completion.experts is not None
        assert (completion.experts[:cached] == first[:cached]).all()

    stopped = replace(ask(LONG[:9], 40), stop_token_ids=(int(once[-1].token_ids[3]),))
    (completion,) = generate(pair.engine, [stopped])
    assert difference(pair, stopped, completion) <= DIFFERENT
    (without,) = generate(pair.engine, [replace(asked[0], with_experts=False)])
    assert without.experts is None


def test_chunks_of_prompts_and_preempted_requests_keep_their_experts(
    pair_of: Callable[..., Pair],
):
    """The cache has room for the prompts of all requests, and not for their responses."""
    pair = pair_of(
        enable_chunked_prefill=True,
        max_num_batched_tokens=48,
        num_gpu_blocks_override=15,
    )
    # Chunks need requests without a seed on CPU.
    asked = [ask((LONG + 7 * n) % 90 + 3, 90, None) for n in range(4)]
    asked = [replace(each, prompt_ids=each.prompt_ids[: 90 + n]) for n, each in enumerate(asked)]
    before = pair.engine.load_summary()[0].preemptions
    for request, completion in zip(asked, generate(pair.engine, asked), strict=True):
        assert len(completion.token_ids) == 90
        assert difference(pair, request, completion) <= DIFFERENT
    assert pair.engine.load_summary()[0].preemptions > before


@pytest.mark.parametrize("in_flight", ["keep", "recompute"])
def test_tokens_keep_the_experts_of_the_weights_that_read_them_first(
    pair_of: Callable[..., Pair], in_flight: InFlight
):
    pair = pair_of()
    asked = [ask(LONG[: 40 + seed], 80, seed) for seed in range(3)]
    answers = pair.engine.submit(asked)
    until(runs(pair.engine, 3, 20))
    pair.engine.pause(in_flight)
    with torch.no_grad():
        for router in routers_of(pair.model):  # the new weights choose other experts
            router.weight.copy_(router.weight.flip(0))
    pair.engine.load_weights(pair.push())
    pair.engine.resume()
    for request, completion in zip(asked, results(answers), strict=True):
        assert len(set(versions_of(completion))) == 2
        if in_flight == "recompute":
            assert difference(pair, request, completion) <= DIFFERENT
            continue
        # Those who were read by old weights; the new ones attend to keys and values of the old.
        assert old_difference(pair, request, completion) <= DIFFERENT


def old_difference(pair: Pair, request: SamplingRequest, done: Completion) -> float:
    """The same share among the tokens that the first version has read."""
    ids = np.concatenate([request.prompt_ids, done.token_ids[:-1]])
    versions = versions_of(done)
    old = len(request.prompt_ids) - 1 + int((versions == versions[0]).sum())
    assert done.experts is not None
    recorded = np.sort(done.experts, -1)[:old]
    return float((recorded != chosen_by(pair.models[versions[0]], ids)[:old]).mean())


def test_an_aborted_request_has_the_experts_of_its_tokens(pair_of: Callable[..., Pair]):
    pair = pair_of()
    request = ask(LONG[:50], 300)
    (answer,) = pair.engine.submit([request])
    until(runs(pair.engine, 1, 10))
    answer.cancel()
    (completion,) = results([answer])
    assert completion.finish_reason == "cancelled"
    assert 10 <= len(completion.token_ids) < 300
    assert difference(pair, request, completion) <= DIFFERENT


def test_several_processes_of_an_engine_record_the_same(pair_of: Callable[..., Pair]):
    pair = pair_of(tensor_parallel=2)
    asked = [ask(LONG[: 50 + n], 30, n) for n in range(6)]
    for request, completion in zip(asked, generate(pair.engine, asked), strict=True):
        assert difference(pair, request, completion) <= DIFFERENT
