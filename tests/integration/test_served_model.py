"""`raypo serve-reward` with a sequence classifier, asked over its port."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, LlamaConfig

from raypo.rewards.remote import JsonServers, RemoteReward
from raypo.rewards.scoring import score
from raypo.types import Rollout
from tests.integration.task import raypo
from tests.rollouts import plain_rollout
from tests.tiny import tiny_tokenizer


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A random Llama with a score head on the tests' characters."""
    folder = tiny_tokenizer(tmp_path / "reward")
    config = LlamaConfig(
        vocab_size=len(AutoTokenizer.from_pretrained(folder)),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        pad_token_id=0,
    )
    config.num_labels = 1
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    return folder


def rollout(prompt: str, response: str) -> Rollout:
    # The ids are of another vocabulary: texts are what counts.
    return plain_rollout(prompt=prompt, response=response, finish_reason="length")


def test_a_served_model_scores_texts_as_transformers_does(model: Path) -> None:
    rollouts = [rollout("2+2=", "4"), rollout("a", "longer than the others"), rollout("1", "22")]
    server = raypo("serve-reward", model, "--port", "0", "--max-batch-tokens", "64")
    try:
        assert server.stdout is not None
        line = server.stdout.readline()
        assert "set reward.url to " in line, server.communicate()[1]
        url = line.split("set reward.url to ")[1].strip()
        limits: dict[str, Any] = {"max_concurrent": 2, "timeout_s": 60, "max_attempts": 2}
        reward = RemoteReward(JsonServers([url], token=None, **limits), batch_size=2)
        scores = score(reward, rollouts)
    finally:
        server.kill()
        server.communicate()

    tokenizer = AutoTokenizer.from_pretrained(model)
    plain = AutoModelForSequenceClassification.from_pretrained(model).eval()
    for each, found in zip(rollouts, scores, strict=True):
        ids = tokenizer(each.prompt + each.response, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            expected = plain(input_ids=ids).logits.item()
        assert found == pytest.approx(expected, abs=1e-5)
