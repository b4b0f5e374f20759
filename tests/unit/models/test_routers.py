"""Recorded routing of packed rows against transformers' routers and loss, on padded rows."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from raypo.models.loading import load_causal_lm
from raypo.models.model_files import ROUTED
from raypo.models.packing import pack
from raypo.models.routers import recorded, top_k_of
from raypo.models.token_log_probs import packed_log_probs
from tests.every_model import CAUSAL, build
from tests.tiny import tiny_experts

pytestmark = pytest.mark.filterwarnings("ignore")
PROMPTS = [np.arange(5, 12), np.arange(5, 12), np.arange(40, 42)]
RESPONSES = [np.arange(20, 29), np.arange(30, 34), np.array([50])]
"""Two of them share a prompt."""


def record(model, prompts, responses, *, with_gradient: bool = False):
    packed = pack(prompts, responses)
    with recorded(model, with_gradient=with_gradient) as routing:
        packed_log_probs(model, packed, temperature=1.0)
    return routing


def logits_of_transformers(model) -> list[torch.Tensor]:
    """Router logits [26, E] of each layer, where a response token is predicted."""
    of_rows: list[list[torch.Tensor]] = []
    for prompt, response in zip(PROMPTS, RESPONSES, strict=True):
        ids = torch.from_numpy(np.concatenate([prompt, response]))[None]
        output = model(input_ids=ids, output_router_logits=True, use_cache=False)
        of_rows.append([each[len(prompt) - 1 : -1] for each in output.router_logits])
    return [torch.cat(of_layer) for of_layer in zip(*of_rows, strict=True)]


@pytest.mark.parametrize("architecture", sorted(ROUTED))
def test_counts_and_entropies_are_those_of_the_rows_one_by_one(architecture: str, tmp_path: Path):
    model = build(CAUSAL, architecture, tmp_path)
    expected = logits_of_transformers(model)
    policy = load_causal_lm(str(tmp_path), dtype="float32")
    top_k = top_k_of(policy)
    assert top_k
    routing = record(policy, PROMPTS, RESPONSES)
    assert len(routing.counts) == len(expected) > 0
    for counts, entropy, logits in zip(routing.counts, routing.entropy, expected, strict=True):
        chosen = logits.topk(top_k).indices.flatten()
        assert counts.tolist() == torch.bincount(chosen, minlength=len(counts)).tolist()
        p = logits.float().softmax(-1)
        assert float(entropy) == pytest.approx(float(-(p * p.log()).sum()), rel=1e-4)


def test_loss_and_gradients_are_transformers_however_the_rows_are_cut(tmp_path: Path):
    folder = str(tiny_experts(tmp_path, "qwen3_moe"))
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    policy = load_causal_lm(folder, dtype="float32").double()
    for model in (reference, policy):
        model.set_experts_implementation("eager")  # the others do not compute in float64
    layers = logits_of_transformers(reference)
    losses = [torch.as_tensor(load_balancing_loss_func((logits,), 4, 2)) for logits in layers]
    expected = torch.stack(losses).mean()
    expected.backward()
    assert float(expected) > 2.01  # an even load has 2

    counts = record(policy, PROMPTS, RESPONSES).counts
    for cuts in ([slice(0, 3)], [slice(0, 1), slice(1, 3)]):
        policy.zero_grad()
        total = 0.0
        for cut in cuts:
            part = record(policy, PROMPTS[cut], RESPONSES[cut], with_gradient=True)
            loss = part.balance_loss(counts, 2)
            loss.backward()
            total += float(loss)
        assert total == pytest.approx(float(expected), rel=1e-6)
        for (name, own), other in zip(
            policy.named_parameters(), reference.parameters(), strict=True
        ):
            if other.grad is None:  # the last layer's experts, and the head
                assert own.grad is None or not own.grad.any(), name
                continue
            gap = (own.grad - other.grad).norm() / other.grad.norm().clamp(min=1e-12)
            assert gap < 1e-6, name


@pytest.mark.parametrize("architecture", ["mixtral", "olmoe", "qwen2_moe", "qwen3_moe"])
def test_gradients_of_packed_rows_are_those_of_transformers_row_by_row(
    architecture: str, tmp_path: Path
):
    """The test compares every expert and router, in float32, with a prompt of two rows."""
    build(CAUSAL, architecture, tmp_path)
    policy = load_causal_lm(str(tmp_path), dtype="float32")
    log_probs, _ = packed_log_probs(policy, pack(PROMPTS, RESPONSES), temperature=1.0)
    log_probs.sum().backward()

    reference = AutoModelForCausalLM.from_pretrained(tmp_path)
    expected = []
    for prompt, response in zip(PROMPTS, RESPONSES, strict=True):
        ids = torch.from_numpy(np.concatenate([prompt, response]))[None]
        log_p = reference(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
        expected.append(log_p.log_softmax(-1).gather(-1, ids[0, len(prompt) :, None])[:, 0])
    torch.cat(expected).sum().backward()
    torch.testing.assert_close(log_probs, torch.cat(expected), rtol=1e-4, atol=1e-4)
    for (name, own), other in zip(policy.named_parameters(), reference.parameters(), strict=True):
        assert own.grad is not None, name
        assert other.grad is not None, name
        assert (own.grad - other.grad).norm() < 1e-4 * other.grad.norm(), name


@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe"])
def test_a_model_without_experts_has_no_routers(architecture: str, tmp_path: Path):
    """Such as a Qwen3-MoE whose layers are all dense."""
    special = {architecture: {"mlp_only_layers": [0, 1, 2, 3]}}
    build(CAUSAL, architecture, tmp_path, special=special)
    assert top_k_of(load_causal_lm(str(tmp_path), dtype="float32")) is None
