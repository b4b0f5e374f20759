from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from raypo.models import chunk_sizes
from raypo.models import token_log_probs as module
from raypo.models.chunk_sizes import CHUNK_ELEMENTS, chunk_rows
from raypo.models.packed_attention import hidden_states
from raypo.models.packing import pack
from raypo.models.token_log_probs import (
    has_plain_head,
    over_logits,
    response_log_probs,
    token_log_probs,
)

TEMPERATURE = 0.7
PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13]]
RESPONSES = [[14, 15], [16, 17, 18, 19], [20]]
SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():  # far from uniform, so that mistakes are large
        parameter.data.mul_(8.0 if parameter.dim() == 2 else 1.0)
    return model


def padded(extra_prompt: int = 0, extra_response: int = 0, pad_id: int = 0) -> list[Tensor]:
    """prompt_ids, prompt_mask, response_ids, attention_mask of PROMPTS and RESPONSES."""
    longest_prompt = max(map(len, PROMPTS)) + extra_prompt
    longest_response = max(map(len, RESPONSES)) + extra_response
    prompt_ids = torch.full((3, longest_prompt), pad_id)
    response_ids = torch.full((3, longest_response), pad_id)
    prompt_mask = torch.zeros_like(prompt_ids, dtype=torch.bool)
    response_mask = torch.zeros_like(response_ids, dtype=torch.bool)
    for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        prompt_ids[row, longest_prompt - len(prompt) :] = torch.tensor(prompt)
        prompt_mask[row, longest_prompt - len(prompt) :] = True
        response_ids[row, : len(response)] = torch.tensor(response)
        response_mask[row, : len(response)] = True
    return [prompt_ids, prompt_mask, response_ids, response_mask]


def naive(model: Any) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies of all response tokens in a row, each response on its own."""
    log_probs, entropies = [], []
    for prompt, response in zip(PROMPTS, RESPONSES, strict=True):
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        log_p = (logits / TEMPERATURE).log_softmax(-1)
        log_probs.append(log_p.gather(-1, torch.tensor(response)[:, None])[:, 0])
        entropies.append(-(log_p.exp() * log_p).sum(-1))
    return torch.cat(log_probs), torch.cat(entropies)


@pytest.mark.parametrize(("extra_prompt", "extra_response"), [(0, 0), (4, 0), (0, 3), (2, 1)])
def test_equals_the_unpadded_computation(model, extra_prompt: int, extra_response: int) -> None:
    batch = padded(extra_prompt, extra_response, pad_id=3)

    log_probs, entropy = response_log_probs(
        model, *batch, temperature=TEMPERATURE, with_entropy=True
    )

    expected_log_probs, expected_entropy = naive(model)
    assert log_probs.shape == batch[3].shape
    torch.testing.assert_close(log_probs[batch[3]], expected_log_probs, atol=1e-5, rtol=0)
    assert entropy is not None
    torch.testing.assert_close(entropy[batch[3]], expected_entropy, atol=1e-5, rtol=0)
    assert not entropy.requires_grad


def test_padding_takes_no_place_in_the_sequence() -> None:
    """Of a model with absolute positions, where it would show."""
    torch.manual_seed(0)
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_embd=16, n_layer=1, n_head=2)).eval()
    gpt2.transformer.wpe.weight.data.mul_(50.0)

    log_probs, _ = response_log_probs(gpt2, *padded(4, 2), temperature=TEMPERATURE)

    torch.testing.assert_close(log_probs[padded(4, 2)[3]], naive(gpt2)[0], atol=1e-5, rtol=0)


def test_padding_is_finite_and_no_entropy_unless_asked(model) -> None:
    log_probs, entropy = response_log_probs(model, *padded(3, 3), temperature=TEMPERATURE)

    assert entropy is None
    assert log_probs.isfinite().all()


@pytest.mark.parametrize("chunk_elements", [1, 100, 1 << 24])
def test_gradient_equals_the_unpadded_computation(model, monkeypatch, chunk_elements: int) -> None:
    monkeypatch.setattr(chunk_sizes, "CHUNK_ELEMENTS", {"cpu": chunk_elements})
    monkeypatch.setattr(module, "SCRATCH_ELEMENTS", {"cpu": chunk_elements})
    weights = torch.linspace(-1.0, 2.0, 7)
    expected_log_probs, expected_entropy = naive(model)
    expected_loss = (weights * expected_log_probs).sum() + 0.3 * expected_entropy.sum()
    expected = torch.autograd.grad(expected_loss, list(model.parameters()))

    batch = padded(2, 2)
    log_probs, entropy = response_log_probs(
        model, *batch, temperature=TEMPERATURE, with_entropy=True, entropy_grad=True
    )
    assert entropy is not None
    loss = (weights * log_probs[batch[3]]).sum() + 0.3 * entropy[batch[3]].sum()
    grads = torch.autograd.grad(loss, list(model.parameters()))

    for grad, expected_grad in zip(grads, expected, strict=True):
        scale = expected_grad.abs().max()
        torch.testing.assert_close(grad, expected_grad, atol=1e-5 * float(scale), rtol=1e-4)


def test_gradient_by_finite_differences() -> None:
    torch.manual_seed(0)
    logits = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    ids = torch.randint(0, 5, (2, 3))

    def both(logits: Tensor) -> tuple[Tensor, Tensor]:
        log_probs, entropy = token_log_probs(
            logits, ids, temperature=TEMPERATURE, with_entropy=True
        )
        assert entropy is not None
        return log_probs, entropy

    assert torch.autograd.gradcheck(both, (logits,))


def test_a_token_that_cannot_be_sampled_spoils_neither_entropy_nor_gradient() -> None:
    logits = torch.tensor([[0.0, 1.0, -torch.inf]], requires_grad=True)
    possible = logits.detach()[:, :2].clone().requires_grad_()
    ids = torch.tensor([1])

    for x in (logits, possible):
        log_probs, entropy = token_log_probs(x, ids, temperature=TEMPERATURE, with_entropy=True)
        assert entropy is not None
        (log_probs + entropy).sum().backward()

    assert logits.grad is not None
    assert possible.grad is not None
    torch.testing.assert_close(logits.grad[:, :2], possible.grad)
    assert logits.grad[0, 2] == 0.0


def test_bfloat16_logits_are_judged_in_float32() -> None:
    torch.manual_seed(0)
    logits = torch.randn(4, 9).bfloat16().requires_grad_()
    ids = torch.arange(4)

    log_probs, _ = token_log_probs(logits, ids, temperature=2.0)
    log_probs.sum().backward()

    expected = (logits.float() / 2.0).log_softmax(-1).gather(-1, ids[:, None])[:, 0]
    torch.testing.assert_close(log_probs, expected)
    assert logits.grad is not None
    assert logits.grad.dtype == torch.bfloat16


def test_logits_are_left_as_they_are() -> None:
    logits = torch.randn(2, 5)
    before = logits.clone()
    token_log_probs(logits, torch.tensor([0, 1]), temperature=0.5, with_entropy=True)
    assert torch.equal(logits, before)


def test_temperature_is_positive(model) -> None:
    with pytest.raises(ValueError, match=r"temperature \(0.0\)"):
        response_log_probs(model, *padded(), temperature=0.0)


def chosen(logits: Tensor, ids: Tensor) -> Tensor:
    """Log-probs of tokens by their logits."""
    return logits.log_softmax(-1).gather(-1, ids[:, None])[:, 0]


def test_gradient_of_a_rounded_head_is_added_up_in_float32(model, monkeypatch) -> None:
    """Many chunks in bfloat16: a sum that was rounded at each of them would drift."""
    monkeypatch.setattr(chunk_sizes, "CHUNK_ELEMENTS", {"cpu": 32})  # a token a chunk
    rounded = copy.deepcopy(model).to(torch.bfloat16)
    tokens = 400
    states = torch.randn(tokens, rounded.config.hidden_size, dtype=torch.bfloat16)
    ids = torch.randint(0, 32, (tokens,))
    head = rounded.get_output_embeddings()

    log_probs, _ = module._HeadLogProbs.apply(states, head.weight, None, ids, head, 1.0, False)
    (grad,) = torch.autograd.grad(log_probs.sum(), head.weight)

    exact = head.weight.detach().double().requires_grad_()
    (expected,) = torch.autograd.grad(chosen(states.double() @ exact.t(), ids).sum(), exact)
    error = (grad.double() - expected).norm() / expected.norm()
    assert error < 0.004  # one rounding to bfloat16; a sum in bfloat16 comes to 0.02


def test_over_logits_adds_up_the_gradient_of_a_rounded_head_in_float32(model, monkeypatch) -> None:
    monkeypatch.setattr(chunk_sizes, "CHUNK_ELEMENTS", {"cpu": 32})  # a token a chunk
    rounded = copy.deepcopy(model).to(torch.bfloat16)
    ids = torch.randint(0, 32, (400,))
    packed = pack([np.array([5])], [ids.numpy()])
    head = rounded.get_output_embeddings()

    def of_chunk(logits: Tensor, ids: Tensor) -> tuple[Tensor]:
        return (chosen(logits.float(), ids),)

    (log_probs,) = over_logits(rounded, packed, of_chunk, ids)
    (grad,) = torch.autograd.grad(log_probs.sum(), head.weight)

    states = hidden_states(rounded.base_model, packed).detach()
    exact = head.weight.detach().double().requires_grad_()
    (expected,) = torch.autograd.grad(chosen(states.double() @ exact.t(), ids).sum(), exact)
    error = (grad.double() - expected).norm() / expected.norm()
    assert error < 0.004


def test_a_head_is_looked_at_when_its_weight_has_been_gathered(model) -> None:
    """At ZeRO stage 3 it is empty but within a call of the head."""
    sharded = copy.deepcopy(model)
    packed = pack([np.array(PROMPTS[0])], [np.array(RESPONSES[0])])

    def largest(logits: Tensor) -> tuple[Tensor, ...]:
        return (logits.amax(-1),)

    with torch.no_grad():
        expected = (
            over_logits(sharded, packed, largest),
            response_log_probs(sharded, *padded(), temperature=1.0),
        )
        head = sharded.get_output_embeddings()
        whole = head.weight.data

        def gather(*_: Any) -> None:
            head.weight.data = whole

        def release(*_: Any) -> None:
            head.weight.data = torch.empty(0)

        head.register_forward_pre_hook(gather)
        head.register_forward_hook(release)
        release()
        del sharded.raypo_has_plain_head
        assert has_plain_head(sharded)
        assert torch.equal(over_logits(sharded, packed, largest)[0], expected[0][0])
        again, _ = response_log_probs(sharded, *padded(), temperature=1.0)
    assert torch.equal(again, expected[1][0])


@pytest.mark.parametrize("factor", [0.0, 1e-6], ids=["zero head", "small head"])
@pytest.mark.parametrize(
    ("network", "config"),
    [
        (Gemma2ForCausalLM, Gemma2Config(**SIZES, head_dim=8, final_logit_softcapping=2.0)),
        (CohereForCausalLM, CohereConfig(**SIZES, logit_scale=0.25)),
    ],
    ids=["cap", "scale"],
)
def test_a_cap_or_scale_that_does_not_show_at_first_is_applied(
    network: Any, config: Any, factor: float
) -> None:
    """Caps and scales keep zeros as they are, and caps small numbers, too."""
    torch.manual_seed(0)
    model = network(config).eval()
    head = model.get_output_embeddings()
    with torch.no_grad():
        head.weight.mul_(factor)
        response_log_probs(model, *padded(), temperature=TEMPERATURE)
        head.weight.normal_()  # as after many updates

        log_probs, _ = response_log_probs(model, *padded(), temperature=TEMPERATURE)

        torch.testing.assert_close(log_probs[padded()[3]], naive(model)[0], atol=1e-5, rtol=0)


def test_a_token_that_cannot_be_sampled_has_no_gradient_however_much_the_entropy_weighs() -> None:
    logits = torch.tensor([[1.0, 2.0, -torch.inf]], requires_grad=True)
    log_probs, entropy = token_log_probs(
        logits, torch.tensor([0]), temperature=1.0, with_entropy=True
    )
    assert entropy is not None
    (gradient,) = torch.autograd.grad((log_probs + 1000.0 * entropy).sum(), logits)

    alone = logits.detach()[:, :2].requires_grad_()
    log_p = alone.log_softmax(-1)
    total = log_p[0, 0] - 1000.0 * (log_p.exp() * log_p).sum()
    (wanted,) = torch.autograd.grad(total, alone)
    torch.testing.assert_close(gradient[:, :2], wanted, atol=1e-3, rtol=0)
    assert gradient[0, 2] == 0.0


def test_a_rounded_gradient_is_added_to_its_float32_sum_in_one_kernel_of_a_gpu() -> None:
    """torch has the kernel on CUDA alone; a meta tensor goes the same way, and checks the types."""
    seen: list[str] = []

    class Sees(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    total = torch.empty(9, 4, device="meta")
    left, right = (torch.empty(5, n, device="meta", dtype=torch.bfloat16) for n in (9, 4))
    with Sees():
        module._add_product(total, left.t(), right, torch.nn.Linear(4, 9))
    assert "aten.addmm.dtype_out" in seen
    assert "aten.linear.default" not in seen


@pytest.mark.parametrize(
    ("vocabulary", "device", "rows"),
    [
        (151_936, "cuda", 2_048),
        (32_000, "cuda", 4_096),
        (500_000, "cuda", 2_048),
        (151_936, "cpu", 110),
    ],
)
def test_chunks_of_a_gpu_have_whole_tiles(vocabulary: int, device: str, rows: int) -> None:
    assert chunk_rows(vocabulary, device) == rows
    assert chunk_rows(vocabulary, device, is_fused=False) == max(
        1, CHUNK_ELEMENTS[device] // vocabulary
    )
