"""Frozen models in vLLM say what they say in torch."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaConfig,
)

from raypo.config import ConfigError, FrozenSection
from raypo.config.placement_section import JudgeModelSection
from raypo.serving.frozen import ReferenceModel, RewardModel
from raypo.serving.vllm_frozen import VllmJudge, VllmModel, VllmReference, VllmRewardModel
from tests.integration.test_reference import rollouts
from tests.tiny import tiny_policy, tiny_tokenizer

SECTION = FrozenSection(backend="vllm")
TOKENS, PADDING = 100, 12
"""Tokens of the tokenizer, and further rows of the embedding; their logits are as large."""
TOLERANCE = 1e-4
"""Nats, and units of the score: float32 in another order."""


def tiny_reward_model(folder: Path, policy: Path) -> Path:
    """A random classifier with the policy's tokenizer, head_dim 32 for vLLM."""
    tiny_tokenizer(folder)
    config = LlamaConfig.from_pretrained(policy, num_labels=1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    return folder


def test_reference_and_reward_model_agree_with_torch(tmp_path: Path):
    policy = str(tiny_policy(tmp_path / "policy"))
    padded = AutoModelForCausalLM.from_pretrained(policy)
    padded.resize_token_embeddings(TOKENS + PADDING, mean_resizing=False)
    padded.save_pretrained(policy)
    given = rollouts()
    ours = ReferenceModel(policy, dtype="float32", temperature=1.0, max_batch_tokens=64)
    reference = VllmReference(policy, section=SECTION, dtype="float32", max_model_len=64)
    try:
        assert repr(reference).startswith("VllmReference(")
        answers = reference.log_probs(given)
        assert reference.log_probs([]) == []
        for rollout, answer, expected in zip(given, answers, ours.log_probs(given), strict=True):
            assert answer.dtype == np.float32
            assert answer.shape == rollout.response_ids.shape
            np.testing.assert_allclose(answer, expected, atol=TOLERANCE)
        assert_a_teacher_tells_the_same(reference, ours)
    finally:
        reference.shutdown()

    model = str(tiny_reward_model(tmp_path / "reward", Path(policy)))
    kept = RewardModel(model, policy=policy, dtype="float32", max_batch_tokens=64)
    reward = VllmRewardModel(
        model, policy=policy, section=SECTION, dtype="float32", max_model_len=64
    )
    try:
        scores = reward.score(given)
        assert len(set(scores)) > 1
        np.testing.assert_allclose(scores, kept.score(given), atol=TOLERANCE)
        assert_too_long_is_told(reward)
    finally:
        reward.shutdown()


def test_a_judge_answers_as_greedy_decoding_does(tmp_path: Path):
    model = str(tiny_policy(tmp_path / "judge"))
    values: dict[str, Any] = {"section": JudgeModelSection(), "dtype": "float32"}
    values |= {"max_model_len": 64, "chat": True}
    with pytest.raises(ConfigError, match=r"reward\.judge\.sampling: vLLM's SamplingParams"):
        VllmJudge(model, sampling={"no_such": 1}, **values)
    judge = VllmJudge(model, sampling={"temperature": 0.0, "max_tokens": 8}, **values)
    try:
        answers = judge.answers(["Grade 1+1=2.", "x" * 64, "Grade it."])
        assert judge.answers([]) == []
    finally:
        judge.shutdown()
    tokenizer = AutoTokenizer.from_pretrained(model)
    network: Any = AutoModelForCausalLM.from_pretrained(model)
    for prompt, answer in (("Grade 1+1=2.", answers[0]), ("Grade it.", answers[2])):
        ids = tokenizer(f"user: {prompt}\nassistant: ", return_tensors="pt").input_ids
        greedy = network.generate(ids, do_sample=False, max_new_tokens=8)[0, ids.shape[1] :]
        assert answer == tokenizer.decode(greedy, skip_special_tokens=True)
    assert isinstance(answers[1], ValueError)
    assert "reward.judge.max_model_len (64): leaves room for a prompt of 56" in str(answers[1])


def assert_a_teacher_tells_the_same(reference: VllmReference, ours: ReferenceModel) -> None:
    sequences = [(rollout.prompt_ids, rollout.response_ids) for rollout in rollouts()]
    for count in (1, 5, TOKENS):
        told = reference.top_log_probs(sequences, count, TOKENS)
        for one, other in zip(told, ours.top_log_probs(sequences, count, TOKENS), strict=True):
            assert one[1].tolist() == other[1].tolist()
            missing = (other[0] - one[0]).max(1, keepdims=True)  # vLLM also counts padding
            np.testing.assert_allclose(one[0] + missing, other[0], atol=TOLERANCE)
            assert (np.abs(missing) < (TOLERANCE if count == TOKENS else 0.2)).all()
    whole = np.exp(ours.top_log_probs(sequences, TOKENS, TOKENS)[0][0]).sum(-1)
    np.testing.assert_allclose(whole, 1.0, atol=1e-5)


def assert_too_long_is_told(model: VllmModel) -> None:
    with pytest.raises(ValueError, match=r"has 65 tokens, and the model takes at most 64"):
        model._prompt(np.zeros(65, dtype=np.int32))
