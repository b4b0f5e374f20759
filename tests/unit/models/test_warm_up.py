"""The first pass over made-up responses: it reaches every kernel, and changes nothing."""

import copy
from typing import Any

import torch

from raypo.models.warm_up import warm_up
from tests.unit.learner.plain import tiny_llama


def test_gradients_pass_through_the_attention_and_stay_off_the_weights():
    model: Any = copy.deepcopy(tiny_llama())
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    passed: list[torch.Tensor] = []

    def note(_module: Any, _arguments: Any, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(passed.append)

    model.model.layers[0].self_attn.q_proj.register_forward_hook(note)
    reached: list[torch.Tensor] = []
    for parameter in model.parameters():
        parameter.register_hook(reached.append)
    warm_up(model, temperature=0.7)
    assert len(passed) == 1
    assert passed[0].abs().sum() > 0
    assert reached == [], "DeepSpeed reduces gradients in such hooks"
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(random, torch.get_rng_state())
    assert not model.get_input_embeddings()._forward_hooks


def test_shards_are_left_alone():
    model: Any = copy.deepcopy(tiny_llama())
    model.lm_head.weight.ds_id = 0
    model.forward = model.model.forward = None  # any pass would fail
    warm_up(model, temperature=1.0)
