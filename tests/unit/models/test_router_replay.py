"""Replayed experts of packed rows against a float64 pass of each row that forces its experts."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from raypo.models import packing
from raypo.models.loading import load_causal_lm
from raypo.models.model_files import REPLAYED
from raypo.models.packed_attention import reads_packed
from raypo.models.packing import in_whole_blocks, pack
from raypo.models.router_replay import replay
from raypo.models.routers import recorded, routers_of
from raypo.models.token_log_probs import packed_log_probs
from tests.every_model import CAUSAL, SPECIAL, build

pytestmark = pytest.mark.filterwarnings("ignore")
PROMPTS = [np.arange(5, 12), np.arange(5, 12), np.arange(40, 42)]
RESPONSES = [np.arange(20, 29), np.arange(30, 34), np.array([50])]
"""Two of them share a prompt."""
OTHERS = ("deepseek_v3", "glm4_moe")
"""Architectures whose routers choose by sigmoid scores, with a bias and in groups."""
NORMALISED = {"norm_topk_prob": True}


def load(folder: Path, architecture: str, dtype: str = "float32", **values: Any) -> Any:
    special = SPECIAL | {architecture: SPECIAL.get(architecture, {}) | values}
    build(CAUSAL, architecture, folder, special=special)
    model = load_causal_lm(str(folder), dtype="float32")
    if dtype == "float64":
        model.double().set_experts_implementation("eager")  # the others lack float64
    return model


def drawn(model: Any, *, seed: int = 0) -> list[tuple[np.ndarray, np.ndarray]]:
    """Random experts of each row, in which the rows of a prompt agree about it."""
    generator = np.random.default_rng(seed)
    count, layers = model.config.num_experts_per_tok, len(routers_of(model))
    num_experts = routers_of(model)[0].num_experts

    def of_tokens(length: int) -> np.ndarray:
        orders = generator.random((length, layers, num_experts)).argsort(-1)
        return orders[..., :count].astype(np.uint8)

    of_prompts = {prompt.tobytes(): of_tokens(len(prompt)) for prompt in PROMPTS}
    return [
        (of_prompts[prompt.tobytes()], of_tokens(len(response)))
        for prompt, response in zip(PROMPTS, RESPONSES, strict=True)
    ]


def weights_of(router: Any, logits: Tensor, experts: Tensor) -> Tensor:
    """Weights [N, k] of given experts by the papers' formulas."""
    is_sigmoid = hasattr(router, "e_score_correction_bias")
    scores = logits.sigmoid() if is_sigmoid else logits.softmax(-1)
    weights = scores.gather(1, experts)
    # Mixtral always normalises.
    if getattr(router, "norm_topk_prob", True):
        weights = weights / weights.sum(-1, keepdim=True)
    return weights * getattr(router, "routed_scaling_factor", 1.0)


@contextmanager
def forced(model: Any, experts: Tensor) -> Iterator[None]:
    """Let the routers of a transformers model return given experts [N, L, k]."""

    def force(layer: int):
        def hook(router: Any, _: Any, output: tuple[Tensor, ...]):
            chosen = experts[:, layer].long()
            return output[0], weights_of(router, output[0], chosen), chosen

        return hook

    hooks = [r.register_forward_hook(force(i)) for i, r in enumerate(routers_of(model))]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def row_by_row(model: Any, experts: list[tuple[np.ndarray, np.ndarray]]) -> Tensor:
    """Log-probs of all response tokens, of one padding-free pass for each row."""
    results = []
    for prompt, response, parts in zip(PROMPTS, RESPONSES, experts, strict=True):
        ids = torch.from_numpy(np.concatenate([prompt, response]))[None]
        with forced(model, torch.from_numpy(np.concatenate(parts))):
            logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
        results.append(logits.log_softmax(-1).gather(-1, ids[0, len(prompt) :, None])[:, 0])
    return torch.cat(results)


def gradients(model: Any, log_probs: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    (log_probs * torch.arange(1, len(log_probs) + 1)).sum().backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    ("architecture", "values"),
    [
        *((architecture, {}) for architecture in (*REPLAYED, *OTHERS)),
        ("qwen3_moe", NORMALISED),
        ("olmoe", NORMALISED),
        ("glm4_moe", {"norm_topk_prob": False, "n_group": 2, "topk_group": 1}),
    ],
)
def test_a_replayed_pass_is_the_one_that_forces_the_experts_row_by_row(
    architecture: str, values: dict[str, Any], checkpointing: bool, tmp_path: Path
):
    policy = load(tmp_path, architecture, "float64", **values)
    experts = drawn(policy)
    if checkpointing:
        policy.train().gradient_checkpointing_enable({"use_reentrant": False})
    packed = pack(PROMPTS, RESPONSES, experts=experts)
    assert reads_packed(policy)
    own, _ = packed_log_probs(policy, packed, temperature=1.0)
    mine = gradients(policy, own)

    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    reference.set_experts_implementation("eager")
    expected = row_by_row(reference, experts)
    torch.testing.assert_close(own, expected, rtol=0, atol=1e-5)  # attention is in float32
    theirs = gradients(reference, expected)
    assert mine.keys() == theirs.keys()
    assert any("gate.weight" in name for name in mine)
    for name, gradient in theirs.items():
        assert gradient.norm() > 0, name
        assert (mine[name] - gradient).norm() < 1e-4 * gradient.norm(), name


@pytest.mark.parametrize("architecture", REPLAYED)
def test_replay_of_the_own_choice_changes_no_bit_in_any_order(architecture: str, tmp_path: Path):
    policy = load(tmp_path, architecture)
    chosen: list[Tensor] = []
    hooks = [
        router.register_forward_hook(lambda _m, _i, output: chosen.append(output[2]))
        for router in routers_of(policy)
    ]
    packed = pack(PROMPTS, RESPONSES)
    usual, _ = packed_log_probs(policy, packed, temperature=1.0)
    own = torch.stack(chosen[: len(hooks)], 1)
    expected = gradients(policy, usual)
    for experts in (own, own.flip(-1)):
        again = pack(PROMPTS, RESPONSES)
        object.__setattr__(again, "experts", experts.to(torch.uint8))
        replayed, _ = packed_log_probs(policy, again, temperature=1.0)
        assert torch.equal(replayed, usual)
        for name, gradient in gradients(policy, replayed).items():
            assert torch.equal(gradient, expected[name]), name
    after, _ = packed_log_probs(policy, packed, temperature=1.0)
    assert torch.equal(after, usual)


def test_equal_prompts_with_other_experts_are_read_separately(tmp_path: Path):
    policy = load(tmp_path, "qwen3_moe")
    experts = drawn(policy)
    experts[1] = ((experts[1][0] + 1) % 4, experts[1][1])
    own, _ = packed_log_probs(policy, pack(PROMPTS, RESPONSES, experts=experts), temperature=1.0)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(own, row_by_row(reference, experts), rtol=1e-4, atol=1e-4)


def test_padded_blocks_and_padded_rows_replay_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """As on GPUs, and as of a model that cannot read packed rows."""
    monkeypatch.setattr(packing, "MAX_PADDING", 1.0)
    policy = load(tmp_path, "qwen3_moe")
    experts = drawn(policy)
    packed = pack(PROMPTS, RESPONSES, experts=experts)
    usual, _ = packed_log_probs(policy, packed, temperature=1.0)
    blocks = in_whole_blocks(packed, 4)
    assert blocks.input_ids.shape > packed.input_ids.shape
    padded, _ = packed_log_probs(policy, blocks, temperature=1.0)
    torch.testing.assert_close(padded, usual, rtol=1e-5, atol=1e-5)
    policy.config._attn_implementation = "eager"
    assert not reads_packed(policy)
    rows, _ = packed_log_probs(policy, packed, temperature=1.0)
    torch.testing.assert_close(rows, usual, rtol=1e-4, atol=1e-4)


def test_the_routers_count_the_choices_that_they_would_have_made_differently(tmp_path: Path):
    policy = load(tmp_path, "qwen3_moe")
    experts = drawn(policy)
    packed = pack(PROMPTS, RESPONSES, experts=experts)
    for with_gradient in (False, True):
        with recorded(policy, with_gradient=with_gradient, is_replayed=True) as routing:
            packed_log_probs(policy, packed, temperature=1.0)
        reference = AutoModelForCausalLM.from_pretrained(tmp_path)
        expected = torch.zeros(4)
        for prompt, response, parts in zip(PROMPTS, RESPONSES, experts, strict=True):
            ids = torch.from_numpy(np.concatenate([prompt, response]))[None]
            forced_experts = torch.from_numpy(np.concatenate(parts))
            with forced(reference, forced_experts):
                logits = reference(input_ids=ids, output_router_logits=True).router_logits
            for layer, of_layer in enumerate(logits):
                own = of_layer.topk(2).indices
                hits = (own[:, :, None] == forced_experts[:, layer][:, None]).any(-1)
                expected[layer] += float((~hits)[len(prompt) - 1 : -1].sum())
        assert routing.replaced.tolist() == expected.tolist()
        assert 0.0 < float(routing.replaced.sum()) < float(routing.counts.sum())


def test_wrong_models_are_refused(tmp_path: Path):
    policy = load(tmp_path, "qwen3_moe")
    with pytest.raises(RuntimeError, match=r"experts of 3 layers, but .* has 4 layers"):
        replay(policy, torch.zeros(5, 3, 2, dtype=torch.uint8))
    router = routers_of(policy)[0]
    replay(policy, torch.zeros(1, 4, 2, dtype=torch.uint8))
    router.num_experts = 5  # another width than its scores have
    with pytest.raises(RuntimeError, match=r"did not select its experts with torch\.topk"):
        router(torch.zeros(1, 32))
