from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from tests.tiny import tiny_policy, tiny_tokenizer


def test_tokenizer_round_trips_through_its_folder(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(tiny_tokenizer(tmp_path))
    text = "37 + 58 = 095;\nabc, 'Yes'?  two  spaces"

    ids = tokenizer(text).input_ids

    assert len(ids) == len(text)  # one token a character, none added
    assert tokenizer.decode(ids) == text
    assert tokenizer.unk_token_id not in ids
    assert tokenizer("ä").input_ids == [tokenizer.unk_token_id]


def test_special_tokens_are_single_tokens_and_can_be_skipped(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(tiny_tokenizer(tmp_path))

    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)
    ids = [*tokenizer("12").input_ids, tokenizer.eos_token_id]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "12"
    assert tokenizer.decode(ids) == "12<eos>"


def test_chat_template_ends_where_the_assistant_speaks(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(tiny_tokenizer(tmp_path))
    messages = [{"role": "user", "content": "1+1="}]

    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)

    assert text == "user: 1+1=\nassistant: "


@pytest.mark.parametrize("tied", [True, False])
def test_policy_loads_and_ties_its_head_when_asked(tmp_path, tied):
    model: Any = AutoModelForCausalLM.from_pretrained(tiny_policy(tmp_path, tied=tied))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)

    head, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight

    assert (head.data_ptr() == embedding.data_ptr()) is tied
    assert model.dtype == torch.float32
    assert model.config.head_dim == 32
    assert len(tokenizer) == model.config.vocab_size == head.shape[0]
    assert GenerationConfig.from_pretrained(tmp_path).eos_token_id == tokenizer.eos_token_id


def test_policy_is_decided_by_its_seed(tmp_path):
    first, same, other = (
        AutoModelForCausalLM.from_pretrained(tiny_policy(tmp_path / name, seed=seed)).state_dict()
        for name, seed in (("first", 3), ("same", 3), ("other", 4))
    )

    assert all(torch.equal(first[key], same[key]) for key in first)
    assert not torch.equal(first["model.embed_tokens.weight"], other["model.embed_tokens.weight"])


def test_policy_is_not_near_uniform(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(tiny_policy(tmp_path))

    with torch.inference_mode():
        probabilities = model(torch.tensor([[5, 6, 7]])).logits.softmax(-1)

    assert probabilities.max() > 3 / model.config.vocab_size
