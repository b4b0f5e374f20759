from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from raypo.serving.frozen import ReferenceModel
from raypo.types import Rollout
from tests.rollouts import plain_rollout
from tests.tiny import tiny_policy

TEMPERATURE = 0.8
SIZES = [(5, 7), (1, 1), (12, 3), (3, 12), (40, 2), (2, 0), (5, 7)]
"""Prompt and response tokens of each rollout."""


def rollouts() -> list[Rollout]:
    random = np.random.default_rng(0)
    return [
        plain_rollout(
            num_response=response,
            prompt_ids=random.integers(3, 90, prompt, dtype=np.int32),
            response_ids=random.integers(3, 90, response, dtype=np.int32),
            prompt_index=number,
            finish_reason="length",
            weight_version=1,
        )
        for number, (prompt, response) in enumerate(SIZES)
    ]


@pytest.mark.parametrize("max_batch_tokens", [1, 45, 10_000])
def test_log_probs_equal_the_policys_own_whatever_the_batches(tmp_path, max_batch_tokens) -> None:
    folder = str(tiny_policy(tmp_path))
    policy = AutoModelForCausalLM.from_pretrained(folder).eval()
    reference = ReferenceModel(
        folder, dtype="float32", temperature=TEMPERATURE, max_batch_tokens=max_batch_tokens
    )
    assert repr(reference) == f"ReferenceModel({'/'.join(folder.split('/')[-2:])}, frozen, ready)"

    answers = reference.log_probs(rollouts())

    for rollout, answer in zip(rollouts(), answers, strict=True):
        ids = torch.from_numpy(np.concatenate([rollout.prompt_ids, rollout.response_ids])).long()
        with torch.no_grad():
            logits = policy(ids[None]).logits[0, len(rollout.prompt_ids) - 1 : -1]
        expected = (logits / TEMPERATURE).log_softmax(-1)
        expected = expected.gather(-1, ids[len(rollout.prompt_ids) :, None])[:, 0]
        assert answer.dtype == np.float32
        np.testing.assert_allclose(answer, expected.numpy(), atol=1e-5)


def test_nothing_in_nothing_out(tmp_path) -> None:
    reference = ReferenceModel(
        str(tiny_policy(tmp_path)), dtype="float32", temperature=1.0, max_batch_tokens=64
    )
    assert reference.log_probs([]) == []
