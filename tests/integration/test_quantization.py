"""FP8 engines and caches: every push is quantised anew, and a push of other weights is found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from raypo.collectives import Workers
from raypo.config import EngineSection
from raypo.deployment.handle import local_handle
from raypo.serving.client import EngineClient
from raypo.serving.engine import Engine
from raypo.serving.requests import SamplingRequest
from raypo.types import Experience
from raypo.weight_sync.probe import Probe, probe_bound, try_probe
from raypo.weights.manifest import WeightError
from tests.stand_ins import generate, local_push, pack
from tests.tiny import tiny_policy

REQUESTS = [
    SamplingRequest(np.arange(3, 3 + n, dtype=np.int32), max_new_tokens=24, temperature=0.7, seed=n)
    for n in (5, 1, 33, 60)
]


class Plain:
    """A learner that computes with transformers' model."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def log_probs(self, experience: Experience) -> Tensor:
        """Log-probs of the response tokens at temperature 1, [B, T]."""
        log_probs = torch.zeros(experience.response_ids.shape)
        for row, mask in enumerate(experience.response_mask):
            prompt = experience.prompt_ids[row][experience.prompt_mask[row]]
            response = experience.response_ids[row][mask]
            with torch.no_grad():
                logits = self.model(torch.cat([prompt, response])[None]).logits[0].float()
            of_response = torch.log_softmax(logits[len(prompt) - 1 : -1], -1)
            log_probs[row, mask] = of_response.gather(1, response[:, None])[:, 0]
        return log_probs


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_policy(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module", params=["weights", "cache", "both"])
def engine(request: pytest.FixtureRequest, model: Path) -> Engine:
    section = EngineSection(
        quantization=None if request.param == "cache" else "fp8",
        kv_cache_dtype=None if request.param == "weights" else "fp8",
    )
    return Engine(str(model), section=section, dtype="bfloat16", max_model_len=128, num_threads=1)


def pushed(engine: Engine, policy: nn.Module, version: int) -> None:
    named = policy.named_parameters(remove_duplicate=False)
    engine.load_weights(local_push(pack(named, bucket_bytes=20_000), version=version))


def probed(engine: Engine, policy: nn.Module) -> float:
    probe = Probe(
        [request.prompt_ids for request in REQUESTS],
        max_new_tokens=4,
        temperature=1.0,
        dtype="bfloat16",
        seed=0,
        quantized=True,
    )
    client = EngineClient(local_handle(engine))
    return try_probe(Plain(policy), client, probe, 1, Workers())["mismatch/probe_gap_mean"]


def loaded(model: Path) -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)


def scaled(policy: nn.Module, factor: float) -> None:
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(factor)


def test_weights_are_quantised_at_every_push(model: Path, engine: Engine):
    """Weights of another scale need other scales of FP8: stale ones would clip or round them."""
    policy = loaded(model)
    pushed(engine, policy, 1)
    before = generate(engine, REQUESTS)
    gap = probed(engine, policy)
    assert 0.02 < gap < probe_bound("bfloat16", on_gpu=False, quantized=True).nats  # it is FP8
    scaled(policy, 2.0)
    pushed(engine, policy, 2)
    between = generate(engine, REQUESTS)
    scaled(policy, 0.5)
    pushed(engine, policy, 3)
    after = generate(engine, REQUESTS)
    for first, other, last in zip(before, between, after, strict=True):
        assert first.token_ids.tolist() == last.token_ids.tolist()
        assert first.log_probs.tolist() == last.log_probs.tolist()
        assert first.log_probs.tolist() != other.log_probs.tolist()


def swapped_layers(policy: nn.Module) -> None:
    layers = policy.get_submodule("model.layers")
    first, second = layers.get_submodule("0"), layers.get_submodule("1")
    before = {name: value.clone() for name, value in first.state_dict().items()}
    first.load_state_dict(second.state_dict())
    second.load_state_dict(before)


def empty_projection(policy: nn.Module) -> None:
    nn.init.zeros_(policy.get_parameter("model.layers.0.mlp.down_proj.weight"))


@pytest.mark.parametrize("change", [swapped_layers, empty_projection])
def test_a_push_of_other_weights_is_found(
    change: Callable[[nn.Module], None], model: Path, engine: Engine
):
    policy, other = loaded(model), loaded(model)
    change(other)
    pushed(engine, other, 4)
    with pytest.raises(WeightError, match="other log-probs to the same tokens"):
        probed(engine, policy)
