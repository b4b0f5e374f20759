"""`model.head_dtype: float32`: logits from a body in bfloat16, without rounding them to it."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM

from raypo.config import ConfigError, ModelSection
from raypo.models import chunk_sizes
from raypo.models.linear import Float32Head, with_float32_logits
from raypo.models.lora import load_policy
from raypo.models.packed_attention import hidden_states, use_packed_attention
from raypo.models.packing import pack
from raypo.models.token_log_probs import head_log_probs, over_logits, packed_log_probs
from tests.tiny import tiny_policy
from tests.unit.models.test_token_log_probs import PROMPTS, RESPONSES, SIZES, TEMPERATURE


def llama() -> Any:
    return LlamaForCausalLM(LlamaConfig(**SIZES))


def capped() -> Any:
    """Its logits are not the head's output: they are capped after it."""
    return Gemma2ForCausalLM(Gemma2Config(**SIZES, head_dim=8, sliding_window=64))


@pytest.mark.parametrize("make", [llama, capped])
def test_log_probs_are_those_of_exact_logits_of_the_same_states(make):
    torch.manual_seed(0)
    model = make().eval()
    model.get_output_embeddings().weight.data.normal_(std=1.0)
    model = model.bfloat16()
    use_packed_attention(model)
    packed = pack([*map(np.array, PROMPTS)], [*map(np.array, RESPONSES)], device="cpu")
    states = hidden_states(model.base_model, packed).detach()
    weight = model.get_output_embeddings().weight.detach().double()
    logits = states.double() @ weight.t()
    if cap := getattr(model.config, "final_logit_softcapping", None):
        logits = cap * (logits / cap).tanh()
    log_p = (logits / TEMPERATURE).log_softmax(-1)
    expected = log_p.gather(-1, packed.response_ids[:, None])[:, 0]

    def normaliser(logits: Tensor) -> tuple[Tensor]:
        return ((logits.float() / TEMPERATURE).logsumexp(-1),)

    def gap() -> float:
        with torch.no_grad():
            log_probs, entropy = packed_log_probs(
                model, packed, temperature=TEMPERATURE, with_entropy=True
            )
            (own,) = over_logits(model, packed, normaliser)
        assert entropy is not None
        gaps = (
            log_probs - expected,
            entropy + (log_p.exp() * log_p).sum(-1),
            own - (logits / TEMPERATURE).logsumexp(-1),
        )
        return max(float(each.abs().max()) for each in gaps)

    assert gap() > 3e-3
    assert with_float32_logits(model) is model
    assert gap() < 1e-5


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("chunk_elements", [60, 1 << 24])
def test_gradients_are_exact_but_for_their_dtype(monkeypatch, bias: bool, chunk_elements: int):
    monkeypatch.setattr(chunk_sizes, "CHUNK_ELEMENTS", {"cpu": chunk_elements})
    torch.manual_seed(0)
    head = nn.Linear(16, 30, bias=bias).bfloat16()
    states, ids = torch.randn(7, 16).bfloat16(), torch.randint(0, 30, (7,))
    factors = torch.randn(7)
    exact = [p.detach().double().requires_grad_() for p in (states, *head.parameters())]
    logits = nn.functional.linear(exact[0], exact[1], exact[2] if bias else None)
    log_p = (logits / TEMPERATURE).log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    wanted = (factors.double() * (log_p.gather(-1, ids[:, None])[:, 0] + entropy)).sum()
    expected = torch.autograd.grad(wanted, exact)

    head.__class__ = Float32Head
    inputs: list[Tensor] = [states.requires_grad_(), *head.parameters()]
    log_probs, entropies = head_log_probs(head, states, ids, TEMPERATURE, with_entropy=True)
    found = (factors * (log_probs + entropies)).sum()

    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)
    for grad, exactly in zip(torch.autograd.grad(found, inputs), expected, strict=True):
        assert grad.dtype == torch.bfloat16
        torch.testing.assert_close(
            grad.double(), exactly, rtol=0, atol=0.01 * float(exactly.abs().max())
        )


@pytest.mark.parametrize("lora", [None, {}])
def test_the_policy_to_train_has_such_a_head_and_the_same_weights(tmp_path, lora):
    folder = str(tiny_policy(tmp_path))
    section = {"policy": folder, "dtype": "bfloat16", "head_dtype": "float32", "lora": lora}
    model = load_policy(ModelSection.model_validate(section))

    assert isinstance(model.get_output_embeddings(), Float32Head)
    assert model.get_output_embeddings().weight.dtype == torch.bfloat16
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert not isinstance(
        load_policy(ModelSection(policy=folder, dtype="bfloat16")).lm_head, Float32Head
    )


def test_a_head_that_is_not_linear_is_refused():
    model = llama()
    model.lm_head = nn.Identity()
    with pytest.raises(ConfigError, match=r"model.head_dtype \(float32\): the head of Llama"):
        with_float32_logits(model)
