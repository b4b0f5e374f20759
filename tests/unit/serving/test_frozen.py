"""Frozen models read one batch's answers when the next one's pass has been started."""

from pathlib import Path

import numpy as np
import pytest

from raypo.serving.frozen import ReferenceModel
from raypo.types import Rollout
from tests.tiny import tiny_policy


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_policy(tmp_path_factory.mktemp("policy"))


def rollout(prompt: list[int], response: list[int]) -> Rollout:
    return Rollout(
        prompt="p",
        response="r",
        prompt_ids=np.array(prompt, np.int32),
        response_ids=np.array(response, np.int32),
        log_probs=np.zeros(len(response), np.float32),
        response_mask=np.ones(len(response), bool),
        label=None,
        prompt_index=0,
        sample_index=0,
        finish_reason="stop",
        weight_version=0,
    )


def reference(policy: Path, max_batch_tokens: int) -> ReferenceModel:
    return ReferenceModel(
        str(policy),
        dtype="float32",
        temperature=0.7,
        max_batch_tokens=max_batch_tokens,
        num_threads=None,
    )


def test_answers_of_many_batches_are_those_of_one_in_the_order_given(policy):
    prompts = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]
    generator = np.random.default_rng(0)
    rollouts = [
        rollout(prompts[n % 3], generator.integers(4, 60, 1 + n % 5).tolist()) for n in range(13)
    ]
    whole, cut = reference(policy, 10_000), reference(policy, 12)
    one, many = whole.log_probs(rollouts), cut.log_probs(rollouts)
    assert [len(each) for each in many] == [len(each.response_ids) for each in rollouts]
    for got, want in zip(many, one, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)
    ids = [(each.prompt_ids, each.response_ids) for each in rollouts]
    for got, want in zip(
        cut.top_log_probs(ids, 2, 60), whole.top_log_probs(ids, 2, 60), strict=True
    ):
        np.testing.assert_allclose(got[0], want[0], atol=1e-5)
        np.testing.assert_array_equal(got[1], want[1])
    assert cut.log_probs([]) == []
    assert cut.stalled_s() == 0.0
