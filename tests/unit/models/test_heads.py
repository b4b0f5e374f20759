"""Heads in float32 on a body in bfloat16, read, trained and written."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    LlamaConfig,
    LlamaModel,
    PretrainedConfig,
    RobertaConfig,
)

from raypo.models.critic import Critic
from raypo.models.heads import Float32Linear
from raypo.models.loading import load_reward_model
from raypo.models.packed_attention import hidden_states
from raypo.models.packing import pack_padded
from raypo.models.scores import sequence_scores
from raypo.types import Experience

SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "num_labels": 1,
}
LLAMA = LlamaConfig(**SIZES)
CONFIGS = {
    "llama": LLAMA,
    "bert": BertConfig(**SIZES),
    "roberta": RobertaConfig(**SIZES, pad_token_id=0),
}
IDS = torch.arange(2, 32).view(3, 10)
MASK = torch.ones_like(IDS, dtype=torch.bool)
ROWS, NOTHING = list(IDS.numpy()), [np.zeros(0, np.int64)] * 3


def saved(folder: Path, config: PretrainedConfig, scale: float = 1.0) -> str:
    """A float32 classifier in a folder, its head's last layer scaled."""
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(config)
    for name in ("score", "classifier"):
        for parameter in getattr(model, name, nn.Identity()).parameters():
            parameter.data = parameter.data * scale + 1e-4
    model.save_pretrained(folder)
    return str(folder)


def batch() -> Experience:
    """Three prompts of four tokens with responses of six."""
    rows = len(IDS)
    return Experience(
        prompt_ids=IDS[:, :4],
        prompt_mask=MASK[:, :4],
        response_ids=IDS[:, 4:],
        attention_mask=MASK[:, 4:],
        response_mask=MASK[:, 4:],
        rollout_log_probs=torch.zeros(rows, 6),
        scores=torch.zeros(rows),
        group_index=torch.zeros(rows, dtype=torch.int64),
        minibatch=torch.zeros(rows, dtype=torch.int64),
        truncated=torch.zeros(rows, dtype=torch.bool),
        weight_version=torch.zeros(rows, dtype=torch.int64),
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_a_reward_model_in_bfloat16_has_the_head_of_its_folder_to_the_last_digit(
    tmp_path: Path, name: str
):
    folder = saved(tmp_path, CONFIGS[name])
    model = load_reward_model(folder, dtype="bfloat16")
    held = load_file(tmp_path / "model.safetensors")

    heads = [m for m in model.modules() if isinstance(m, Float32Linear)]
    assert len(heads) == {"llama": 1, "bert": 1, "roberta": 2}[name]
    exact = {n for n, p in model.named_parameters() if p.dtype == torch.float32}
    assert exact == {n for n in held if n.split(".")[0] in ("score", "classifier")}
    assert exact < set(held)
    for parameter in exact:
        assert torch.equal(model.get_parameter(parameter), held[parameter])
    assert sequence_scores(model, ROWS, NOTHING).isfinite().all()

    model.save_pretrained(tmp_path / "again")
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert {n for n, tensor in again.items() if tensor.dtype == torch.float32} == exact
    assert torch.equal(
        sequence_scores(
            load_reward_model(str(tmp_path / "again"), dtype="bfloat16"), ROWS, NOTHING
        ),
        sequence_scores(model, ROWS, NOTHING),
    )


def test_scores_are_those_of_a_float32_head_on_the_same_states(tmp_path: Path):
    model = load_reward_model(saved(tmp_path, LLAMA, scale=100.0), dtype="bfloat16")
    with torch.no_grad():
        hidden = model.base_model(input_ids=IDS).last_hidden_state[:, -1]
        assert hidden.dtype == torch.bfloat16
        exact = hidden.double() @ model.score.weight.double().T
        torch.testing.assert_close(
            sequence_scores(model, ROWS, NOTHING).double(),
            exact.squeeze(-1),
            rtol=1e-6,
            atol=1e-6,
        )


def test_values_about_ten_are_told_apart_on_a_body_in_bfloat16():
    torch.manual_seed(0)
    critic = Critic(LlamaModel(LLAMA).bfloat16())
    weight, bias = critic.value_head.weight, critic.value_head.bias
    assert (weight.dtype, bias.dtype) == (torch.float32, torch.float32)
    with torch.no_grad():
        weight.copy_(torch.randn(weight.shape))
        spread = critic(batch()).std()
        weight.mul_(0.05 / spread)
        bias.fill_(10.0)
        values = critic(batch())  # [3, 6]
        states = batch()
        packed = pack_padded(
            states.prompt_ids,
            states.prompt_mask,
            states.response_ids,
            states.attention_mask,
        )
        hidden = hidden_states(critic.backbone, packed)
        exact = packed.unpacked((hidden.double() @ weight.double().T + bias.double()).squeeze(-1))

    assert float(values.std()) == pytest.approx(0.05, rel=1e-3)
    assert len(values.unique()) == values.numel()
    assert len(values.bfloat16().unique()) < 7
    torch.testing.assert_close(values.double(), exact, rtol=1e-6, atol=0.0)


def test_master_weights_are_multiplied_with_and_the_gradient_goes_to_the_rounded_ones():
    layer = Float32Linear(2, 1, like=torch.zeros(1))
    master = {"weight": torch.tensor([[1.001, 2.0]]), "bias": torch.tensor([10.03])}
    for name, parameter in layer.named_parameters():
        parameter.data = master[name].bfloat16()  # as DeepSpeed does
    layer.masters = master

    out = layer(torch.tensor([[1.0, 3.0]], dtype=torch.bfloat16))
    out.sum().backward()

    torch.testing.assert_close(out, torch.tensor([[1.001 + 6.0 + 10.03]]))
    assert layer.weight.grad is not None
    assert layer.weight.grad.tolist() == [[1.0, 3.0]]
    assert layer.bias.grad is not None
    assert layer.bias.grad.dtype == torch.bfloat16
