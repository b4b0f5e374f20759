"""More of vLLM on several devices, here as many processes; `integration/test_tensor_parallel`."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from raypo.config import FrozenSection
from raypo.serving.frozen import ReferenceModel, RewardModel
from raypo.serving.vllm_frozen import VllmReference, VllmRewardModel
from tests.integration.test_reference import rollouts
from tests.integration.test_tensor_parallel import (
    SIZE,
    assert_every_push_arrives,
    assert_told,
    lose_a_process,
    pair_on_several,
)
from tests.integration.test_vllm_frozen import TOLERANCE, tiny_reward_model
from tests.tiny import tiny_policy


def test_an_untied_head_is_cut_over_the_devices(tmp_path: Path):
    pair = pair_on_several(tiny_policy(tmp_path, tied=False))
    try:
        assert_every_push_arrives(pair)
    finally:
        pair.engine.shutdown()


def test_frozen_models_agree_with_torch(tmp_path: Path):
    policy = str(tiny_policy(tmp_path / "policy"))
    section = FrozenSection(backend="vllm", tensor_parallel=SIZE)
    given = rollouts()
    ours = ReferenceModel(policy, dtype="float32", temperature=1.0, max_batch_tokens=64)
    reference = VllmReference(policy, section=section, dtype="float32", max_model_len=64)
    try:
        answers = reference.log_probs(given)
        for answer, expected in zip(answers, ours.log_probs(given), strict=True):
            np.testing.assert_allclose(answer, expected, atol=TOLERANCE)
    finally:
        reference.shutdown()

    model = str(tiny_reward_model(tmp_path / "reward", Path(policy)))
    kept = RewardModel(model, policy=policy, dtype="float32", max_batch_tokens=64)
    reward = VllmRewardModel(
        model, policy=policy, section=section, dtype="float32", max_model_len=64
    )
    try:
        np.testing.assert_allclose(reward.score(given), kept.score(given), atol=TOLERANCE)
        lose_a_process()
        assert_told(reward)
    finally:
        reward.shutdown()
