"""The padding that a reward model's folder names: never a token that a response may end with."""

import json
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from raypo.config import RewardModelConfig
from raypo.models.loading import load_tokenizer
from raypo.recipes.reward_model import make_task
from tests.tiny import tiny_policy


@pytest.mark.parametrize(
    ("padding", "is_kept"), [("<pad>", True), ("<eos>", False), ("<bos>", False)]
)
def test_padding_that_is_a_stop_token_is_not_named(tmp_path, padding, is_kept):
    """As in Llama 3, where one stop token pads and another one ends turns: plain transformers would
    look for the last token that is no padding, and pass over an end that the other one is."""
    folder = tiny_policy(tmp_path / "policy", hidden=32, layers=1)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2]}))
    tokenizer = load_tokenizer(str(folder))
    tokenizer.pad_token = padding
    values = {"model": {"policy": str(folder), "dtype": "float32"}, "data": {"prompts": "a.jsonl"}}
    config = RewardModelConfig.parse(
        {"recipe": "reward_model", "name": "a", "num_steps": 1} | values
    )
    model: Any = make_task(config, tokenizer).module.model
    assert model.config.pad_token_id == (tokenizer.pad_token_id if is_kept else None)
    model.save_pretrained(tmp_path / "trained")
    read: Any = AutoModelForSequenceClassification.from_pretrained(tmp_path / "trained")
    ids = torch.tensor([[5, 6, 1]])
    with torch.no_grad():
        states = read.model(ids).last_hidden_state
        torch.testing.assert_close(read(ids).logits, read.score(states[:, -1]))
