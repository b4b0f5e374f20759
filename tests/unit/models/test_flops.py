from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from raypo.models.flops import Groups, Lengths, forward_flops
from raypo.models.model_shape import ModelShape
from tests.tiny import tiny_policy


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_policy(tmp_path_factory.mktemp("policy"), tied=False)


@pytest.mark.parametrize("response", [1, 5])
def test_a_forward_pass_takes_what_torch_counts(folder: Path, response: int):
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    ids = torch.randint(4, 90, (3, 12))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(ids, logits_to_keep=response)
    lengths = Lengths.of([(12 - response, response)] * 3)
    assert forward_flops(ModelShape.read(str(folder)), lengths) == counter.get_total_flops()


SHAPE = ModelShape(
    parameters=0,
    largest_tensor=0,
    layers=1,
    hidden=1,
    heads=1,
    kv_heads=1,
    head_dim=2,
    intermediate=2,
    vocabulary=5,
    tied=True,
    gated=False,
    is_exact=True,
)
"""8 weights of attention, 4 of the MLP."""


def test_by_hand():
    shape = SHAPE
    lengths = Lengths.of([(1, 2)])
    assert lengths == Lengths(3, 2, 9)
    assert forward_flops(shape, lengths) == 2 * (12 * 3 + 5 * 2) + 4 * 2 * 9
    assert forward_flops(shape, lengths, with_logits=False) == 2 * 12 * 3 + 4 * 2 * 9
    gated = replace(shape, gated=True)
    assert forward_flops(gated, lengths) - forward_flops(shape, lengths) == 2 * 2 * 3


def test_a_prompt_is_read_once_for_all_its_responses():
    """Two prompts of 4 tokens with 3 responses of 5 each: 38 tokens, 30 of them responses."""
    groups = Groups(2, samples=3, prompt_tokens=4, response_tokens=5)
    assert groups.tokens == 38
    pairs = 6 * 9**2 - 4 * 4**2
    assert groups.forward_flops(SHAPE) == 2 * (12 * 38 + 5 * 30) + 4 * 2 * pairs
    assert groups.forward_flops(SHAPE, with_logits=False) == 2 * 12 * 38 + 4 * 2 * pairs
