"""Speculative decoding: samples and log-probs are the policy's own, also after pushes.

pytest collects this file by its name only, from `test_speculation.py`: once vLLM (0.32) has drafted
by n-grams, no second engine starts in the process, because vLLM's search for its kernels stumbles
over numba.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from raypo.config import EngineSection, SpeculationSection
from raypo.serving.engine import Engine
from raypo.serving.requests import Completion, SamplingRequest
from tests.stand_ins import generate, local_push, pack
from tests.tiny import tiny_policy

PROMPT = np.array([*range(10, 15)] * 4, dtype=np.int32)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_policy(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module", params=["ngram", "model"])
def engine(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("draft")
    drafter = str(tiny_policy(folder, layers=1)) if request.param == "model" else None
    speculation = SpeculationSection(kind=request.param, num_tokens=3, model=drafter)
    section = EngineSection(speculation=speculation)
    engine = Engine(str(model), section=section, dtype="float32", max_model_len=128, num_threads=1)
    yield engine
    engine.shutdown()


def pushed(engine: Engine, policy: nn.Module, version: int) -> None:
    named = policy.named_parameters(remove_duplicate=False)
    engine.load_weights(local_push(pack(named, bucket_bytes=20_000), version=version))


def requests(count: int, tokens: int, top_k: int | None = None) -> list[SamplingRequest]:
    seeds = np.random.default_rng(0).integers(0, 2**31, count)
    return [
        SamplingRequest(PROMPT, max_new_tokens=tokens, temperature=0.7, seed=int(seed), top_k=top_k)
        for seed in seeds
    ]


def log_probs_of(policy: nn.Module, completions: list[Completion]) -> Tensor:
    """Log-probs of all tokens at each position of the responses, [B, T, V]."""
    responses = torch.stack([torch.from_numpy(c.token_ids) for c in completions]).long()
    prompts = torch.from_numpy(PROMPT).long().expand(len(responses), -1)
    with torch.no_grad():
        logits = policy(torch.cat([prompts, responses], 1)).logits[:, len(PROMPT) - 1 : -1]
    return torch.log_softmax(logits.float() / 0.7, -1)


def test_log_probs_are_those_of_the_pushed_policy(model: Path, engine: Engine):
    for version, seed in enumerate((1, 2), start=1):
        torch.manual_seed(seed)
        policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.add_(0.02 * torch.randn_like(parameter))
        pushed(engine, policy, version)
        before = engine.load_summary()[0]
        completions = generate(engine, requests(16, 40))
        long = [c for c in completions if len(c.token_ids) == 40]
        assert len(long) > 8
        tokens = torch.stack([torch.from_numpy(c.token_ids) for c in long]).long()
        own = log_probs_of(policy, long).gather(-1, tokens[..., None])[..., 0]
        torch.testing.assert_close(
            torch.stack([torch.from_numpy(c.log_probs) for c in long]), own, atol=1e-4, rtol=0
        )
        after = engine.load_summary()[0]
        assert 0 < after.accepted - before.accepted < after.drafted - before.drafted


def test_greedy_responses_are_the_most_likely_tokens(model: Path, engine: Engine):
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    pushed(engine, policy, 3)
    greedy = SamplingRequest(PROMPT, max_new_tokens=30, temperature=0.0)
    response = generate(engine, [*requests(4, 30), greedy])[-1]
    best = log_probs_of(policy, [response])[0].argmax(-1)
    assert response.token_ids.tolist() == best.tolist()


def test_truncation_is_refused(engine: Engine):
    with pytest.raises(ValueError, match=r"top_k \(5\).*cannot truncate"):
        generate(engine, requests(1, 4, top_k=5))


def test_a_sample_does_not_depend_on_its_batch(model: Path, engine: Engine):
    pushed(engine, AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), 4)
    batch = requests(8, 40)
    together = [c.token_ids.tolist() for c in generate(engine, batch)]
    assert together == [c.token_ids.tolist() for c in generate(engine, batch)]
    assert together[5:6] == [c.token_ids.tolist() for c in generate(engine, batch[5:6])]


def test_tokens_have_the_policys_distribution(model: Path, engine: Engine):
    """Accepted and replaced tokens together: counts beside the exact sums of probabilities."""
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    pushed(engine, policy, 5)
    completions = [c for c in generate(engine, requests(1500, 4)) if len(c.token_ids) == 4]
    tokens = torch.stack([torch.from_numpy(c.token_ids) for c in completions]).long()
    probabilities = log_probs_of(policy, completions).exp()
    counts = nn.functional.one_hot(tokens, probabilities.shape[-1]).sum(0)
    # Responses that an early end of sequence made shorter are left out, and their tokens with them.
    expected, variance = probabilities.sum(0), (probabilities * (1 - probabilities)).sum(0)
    deviation = ((counts - expected) ** 2 / variance)[:, 4:]
    assert deviation[expected[:, 4:] > 5].mean() < 1.4
