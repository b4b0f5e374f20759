"""Bugs that trainers of this field have had; formulas: ppo/test_field_bugs.py."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from raypo.collectives import Workers
from raypo.config import PPOConfig
from raypo.data.batching import batches_by_tokens
from raypo.deployment.handle import local_handle
from raypo.rollout.batch_scoring import Scorer
from raypo.rollout.collect import Sampler, Sampling
from raypo.serving.client import EngineClient
from raypo.serving.requests import Completion, SamplingRequest
from raypo.types import Experience, Prompt, Rollout
from raypo.weight_sync.probe import Probe, try_probe
from raypo.weights.manifest import WeightError
from tests.stand_ins import Engine, Lossy, Reference
from tests.unit.config.test_run_config import with_keys

PROMPT = np.array([5, 6], np.int32)
SAMPLED = np.array([7, 8, 9], np.int32)
SAMPLING = Sampling(
    samples_per_prompt=2, max_new_tokens=3, temperature=1.0, top_p=1.0, stop_token_ids=(), seed=0
)


def completion(log_prob: float = -1.0) -> Completion:
    return Completion(
        token_ids=SAMPLED,
        log_probs=np.full(3, log_prob, np.float32),
        finish_reason="length",
        weight_version=1,
    )


ALIKE = Engine(lambda requests: [completion() for _ in requests])
"""Answers every request alike."""


@dataclass
class Learner:
    """Has an opinion of its own on every sampled token."""

    log_prob: float

    def log_probs(self, experience: Experience) -> torch.Tensor:
        return torch.where(experience.response_mask, self.log_prob, 0.0)


def sampled(num_draws: int) -> list[Rollout]:
    draws = [Prompt(0, "same text", PROMPT, group_index=index) for index in range(num_draws)]
    return Sampler(ALIKE, Lossy(), SAMPLING).sample(draws)


class Served:
    """An engine in its process."""

    def submit(self, requests: Sequence[SamplingRequest], *, alone: bool) -> list[Completion]:
        return [completion() for _ in requests]


def push_to_an_engine_that_says_minus_one(log_prob: float, dtype: str) -> dict[str, float]:
    probe = Probe([PROMPT], max_new_tokens=3, temperature=1.0, dtype=dtype, seed=0)
    return try_probe(Learner(log_prob), EngineClient(local_handle(Served())), probe, 1, Workers())


def test_bug_8_an_engine_that_kept_its_old_weights_stops_the_run():
    assert push_to_an_engine_that_says_minus_one(-1.0, "float32")["mismatch/probe_gap_max"] == 0.0
    with pytest.raises(WeightError, match="other log-probs to the same"):
        push_to_an_engine_that_says_minus_one(-1.01, "float32")


@pytest.mark.parametrize(
    ("dtype", "on_gpu", "rounding"),
    [
        ("float32", False, 1e-5),
        ("float32", True, 3.5e-3),  # TF32 on an H100, as measured
        ("bfloat16", True, 0.068),  # as measured there
        ("bfloat16", False, 0.068),
    ],
)
def test_a_push_allows_for_the_rounding_of_its_device_and_for_no_other_weights(
    monkeypatch: pytest.MonkeyPatch, dtype: str, on_gpu: bool, rounding: float
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: on_gpu)
    found = push_to_an_engine_that_says_minus_one(-1.0 - rounding, dtype)
    assert found["mismatch/probe_gap_mean"] == pytest.approx(rounding, rel=1e-2)
    for wrong in (0.7, float("nan")):
        with pytest.raises(WeightError, match=f"is allowed in {dtype}"):
            push_to_an_engine_that_says_minus_one(-1.0 - wrong, dtype)


def test_float32_on_a_cpu_is_held_to_more_than_a_gpu_can_keep():
    with pytest.raises(WeightError, match=r"0\.0035 nats apart, at most 0\.001"):
        push_to_an_engine_that_says_minus_one(-1.0035, "float32")


def test_bug_10_the_token_budget_is_used_to_its_last_token():
    assert batches_by_tokens("abcd", [1, 1, 1, 1], [3, 3, 3, 3], 16) == [[0, 1, 2, 3]]
    assert batches_by_tokens("abcd", [1, 1, 1, 1], [3, 3, 3, 3], 15) == [[0, 1, 2], [3]]
    # and the longest sequence that the config admits is exactly the budget
    PPOConfig.parse(with_keys(learner__max_tokens_per_microbatch=256 + 64))


def test_bug_15_frozen_models_get_the_policys_ids_and_functions_the_text():
    """Only models of the policy's own vocabulary are handed ids; a reward is given the text."""
    seen: dict[str, list[list[int]] | list[str]] = {}

    def log_probs(rollouts: list[Rollout]) -> list[np.ndarray]:
        seen["reference"] = [r.response_ids.tolist() for r in rollouts]
        return [np.zeros(3, np.float32)] * len(rollouts)

    def reward(rollouts: list[Rollout]) -> list[float]:
        seen["reward"] = [r.response for r in rollouts]
        return [0.0] * len(rollouts)

    scorer = Scorer(reward, (), {"function": 1.0}, reference=Reference(log_probs))
    scorer.score(sampled(1))

    assert seen == {"reference": [SAMPLED.tolist()] * 2, "reward": ["?", "?"]}
