"""Packed rows: each prompt once and no padding, and the numbers of separate rows."""

from __future__ import annotations

import warnings
from copy import deepcopy
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import Linear
from torch.nn.attention.flex_attention import create_block_mask, create_mask, flex_attention
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    JambaConfig,
    Lfm2Config,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    NemotronConfig,
    OPTConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    RecurrentGemmaConfig,
)

from raypo.models import packed_attention, packing, shared_prompts
from raypo.models.loading import load_causal_lm
from raypo.models.packed_attention import (
    NAME,
    can_read_packed,
    first_layers,
    hidden_states,
    own_logits,
    reads_packed,
    use_packed_attention,
)
from raypo.models.packing import Packed, in_whole_blocks, pack, pack_padded

SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
GATED: dict[str, Any] = {**SIZES, "intermediate_size": 24, "num_key_value_heads": 2}
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**GATED),
    "qwen2: biases": Qwen2Config(**GATED),
    "qwen3: normalised heads": Qwen3Config(**GATED, head_dim=8),
    "mistral: sliding windows": MistralConfig(**GATED, sliding_window=3),
    "gemma2: capped scores, windows in every other layer": Gemma2Config(
        **GATED, head_dim=8, query_pre_attn_scalar=8, sliding_window=4, attn_logit_softcapping=0.5
    ),
    "gpt2: learned positions": GPT2Config(vocab_size=40, n_embd=32, n_layer=2, n_head=4),
    "opt: learned positions": OPTConfig(**SIZES, ffn_dim=24, word_embed_proj_dim=32, dropout=0.0),
}
PROMPTS = [[5, 6, 7], [8], [5, 6, 7], [9, 10, 11, 12, 13], [5, 6, 7], [8]]
RESPONSES = [[14, 15], [16, 17, 18, 19, 20, 21], [21], [22, 23], [24, 25, 26, 27, 28], [29, 30]]


def rows() -> tuple[list[np.ndarray], list[np.ndarray]]:
    return [np.array(p, np.int32) for p in PROMPTS], [np.array(r, np.int32) for r in RESPONSES]


def model_of(config: PretrainedConfig) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        deepcopy(config), dtype=torch.float64, attn_implementation="eager"
    ).eval()
    for parameter in model.parameters():  # far from uniform, so that mistakes are large
        parameter.data.mul_(8.0 if parameter.dim() == 2 else 1.0)
    return model


def states_of(model: Any, packed: Packed) -> Tensor:
    """[M, H]"""
    assert model.config._attn_implementation == NAME
    return hidden_states(model.base_model, packed)


def separate_states(model: Any, *, with_last: bool) -> Tensor:
    states = []
    for prompt, response in zip(PROMPTS, RESPONSES, strict=True):
        hidden = model.base_model(torch.tensor([prompt + response])).last_hidden_state[0]
        states.append(hidden[len(prompt) - 1 : None if with_last else -1])
    return torch.cat(states)


def gradients(model: Any, states: Tensor) -> list[Tensor]:
    weights = torch.linspace(-1.0, 2.0, states.numel(), dtype=states.dtype).view_as(states)
    parameters = [p for p in model.base_model.parameters() if p.requires_grad]
    return list(torch.autograd.grad((weights * states).sum(), parameters, allow_unused=True))


@pytest.fixture(params=[packing.SHARED_SCORES, -1], ids=["whole rows", "shared prompts"])
def of_cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both kinds of attention on CPUs."""
    monkeypatch.setattr(packing, "SHARED_SCORES", request.param)


@pytest.mark.usefixtures("of_cpu")
@pytest.mark.parametrize("with_last", [False, True])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=list(CONFIGS))
def test_states_and_gradients_are_those_of_separate_rows(config, with_last: bool) -> None:
    model = model_of(config)
    expected = separate_states(model, with_last=with_last)
    expected_gradients = gradients(model, expected)
    assert can_read_packed(model)

    use_packed_attention(model)
    states = states_of(model, pack(*rows(), with_last=with_last))

    torch.testing.assert_close(states, expected, rtol=1e-5, atol=1e-5)  # norms are in float32
    scale = max(float(gradient.abs().max()) for gradient in expected_gradients)
    for mine, theirs in zip(gradients(model, states), expected_gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6 * scale)


def test_long_prompts_are_shared_in_attention_on_cpus_too(monkeypatch) -> None:
    """In checkpoints as well; groups have other lengths, and one has no response that is read."""
    flash = Mock(wraps=shared_prompts._flash)
    monkeypatch.setattr(shared_prompts, "_flash", flash)
    monkeypatch.setattr(packing, "SHARED_SCORES", 10_000)
    model = model_of(CONFIGS["llama"])
    ids = np.arange(10, 34)
    prompts = [*[np.resize(ids, 96)] * 3, *[np.resize(ids, 70)] * 4, ids, ids[:2]]
    responses = [ids[:n] for n in (5, 9, 2, 4, 4, 1, 7, 3, 1)]
    use_packed_attention(model)
    packed = pack(prompts, responses)
    expected = hidden_states(model.base_model, packed)
    expected_gradients = gradients(model, expected)
    assert not flash.called
    monkeypatch.setattr(packing, "SHARED_SCORES", 1_000)
    states = hidden_states(model.base_model, packed)
    assert flash.called
    torch.testing.assert_close(states, expected, rtol=1e-5, atol=1e-5)
    for mine, theirs in zip(gradients(model, states), expected_gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    again = gradients(model.train(), hidden_states(model.base_model, packed))
    for mine, theirs in zip(again, expected_gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


def test_padding_has_no_share_in_gradients_however_large_scores_are(monkeypatch) -> None:
    ids = np.arange(40)
    packed = pack([ids, ids], [ids[:4], ids[:31]])
    torch.manual_seed(0)
    size = packed.input_ids.shape[1]
    q, k, v = (torch.randn(1, 2, size, 8) for _ in range(3))
    given = [q + 1.0, k + 15.0 * torch.arange(size)[:, None], v]  # the later a key, the larger
    made = []
    for most in (10_000, -1):
        monkeypatch.setattr(packing, "SHARED_SCORES", most)
        known = [each.clone().requires_grad_() for each in given]
        q, k, v = known
        mixed, _ = packed_attention.packed_attention(
            Linear(1, 1), q, k, v, None, layout=packed.layout
        )
        made.append(torch.autograd.grad(mixed.square().sum(), known))
    for rows, shared in zip(*made, strict=True):
        torch.testing.assert_close(shared, rows, rtol=1e-3, atol=1e-3 * float(rows.abs().max()))


@pytest.mark.parametrize("with_last", [False, True])
@pytest.mark.parametrize("name", ["llama", "gpt2: learned positions"])
def test_a_model_that_reads_padded_rows_says_the_same(name: str, with_last: bool) -> None:
    model = model_of(CONFIGS[name])
    expected = separate_states(model, with_last=with_last)

    states = hidden_states(model.base_model, pack(*rows(), with_last=with_last))

    torch.testing.assert_close(states, expected, rtol=1e-5, atol=1e-5)


def test_a_model_that_keeps_the_layout_from_its_attention_is_left_as_it_is() -> None:
    model = model_of(NemotronConfig(**GATED))
    assert can_read_packed(model), "its flags say so"
    expected = separate_states(model, with_last=False)

    with pytest.warns(UserWarning, match=r"cannot read packed rows .* model.attention to eager"):
        use_packed_attention(model)

    assert model.config._attn_implementation == "eager"
    states = hidden_states(model.base_model, pack(*rows()))
    torch.testing.assert_close(states, expected, rtol=1e-5, atol=1e-5)


def test_why_a_model_cannot_read_packed_rows_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a compiler says on a GPU, above all."""

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("no kernel of that head size")

    monkeypatch.setattr(packed_attention, "packed_attention", broken)
    model = model_of(LlamaConfig(**GATED))
    with pytest.warns(UserWarning, match=r"\(RuntimeError: no kernel of that head size\)"):
        use_packed_attention(model)
    assert model.config._attn_implementation == "eager"


def test_a_window_that_only_the_mask_knows_is_not_read_packed() -> None:
    sizes: dict[str, Any] = GATED | {
        "moe_intermediate_size": 8,
        "num_experts": 2,
        "num_experts_per_tok": 1,
    }
    with_window = Qwen2MoeConfig(
        **sizes, shared_expert_intermediate_size=8, use_sliding_window=True, sliding_window=3
    )
    with_window.layer_types = ["full_attention"] * 2
    assert not can_read_packed(model_of(with_window))


@pytest.mark.usefixtures("of_cpu")
@pytest.mark.parametrize("with_last", [False, True])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=list(CONFIGS))
def test_padding_to_whole_blocks_changes_no_state_and_no_gradient(
    config, with_last: bool, monkeypatch
) -> None:
    """On GPUs, where blocks have 128 tokens: here, blocks of 4 end in every part of these rows."""
    model = model_of(config)
    expected = separate_states(model, with_last=with_last)
    expected_gradients = gradients(model, expected)
    use_packed_attention(model)
    packed = pack(*rows(), with_last=with_last)
    assert in_whole_blocks(packed, 4) is packed, "too many tokens would be added"
    monkeypatch.setattr(packing, "MAX_PADDING", 2.0)
    padded = in_whole_blocks(packed, 4)
    assert padded.input_ids.shape[1] > packed.input_ids.shape[1]
    starts = padded.layout.segments_on_host[1].diff().nonzero().flatten() + 1
    in_block = {group.first % 4 for group in padded.layout.groups}
    assert in_block == {0}
    of_responses = {place for place in starts.tolist() if place % 4 == 0}
    assert len(of_responses) >= len(RESPONSES) - 3, "each response with tokens begins a block"

    states = states_of(model, padded)

    torch.testing.assert_close(states, expected, rtol=1e-5, atol=1e-5)
    scale = max(float(gradient.abs().max()) for gradient in expected_gradients)
    for mine, theirs in zip(gradients(model, states), expected_gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5 * scale)


def test_padding_halves_the_blocks_that_are_masked_in_part() -> None:
    prompt, responses = np.arange(1, 257), [np.arange(1, 513)] * 8
    packed = pack([prompt] * 8, responses)
    padded = in_whole_blocks(packed)
    assert padded.input_ids.shape[1] - packed.input_ids.shape[1] == 8
    partial = [
        int(((pairs > 0) & (pairs < packed_attention.BLOCK**2)).sum())
        for pairs in (packed_attention.seen_pairs(each.layout, None) for each in (packed, padded))
    ]
    assert partial[1] <= 0.5 * partial[0]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("block", [1, 4])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=list(CONFIGS))
def test_flex_attention_says_the_same(config, block: int, monkeypatch) -> None:
    """As it runs on GPUs, but not compiled."""
    monkeypatch.setattr(packing, "MAX_PADDING", 2.0)
    model = model_of(config)
    model.requires_grad_(False)  # torch has no backward pass of it on CPU
    expected = separate_states(model, with_last=False)

    def by_flex(module, query, key, value, attention_mask, *, layout, scaling=None, **kind):
        attend = lambda *args, **more: flex_attention(*args, scale=scaling, **more)  # noqa: E731
        mixed = packed_attention.flex(
            query, key, value, layout, attend,
            window=kind.get("sliding_window"), softcap=kind.get("softcap"),
        )  # fmt: skip
        return mixed.transpose(1, 2), None

    monkeypatch.setattr(packed_attention, "packed_attention", by_flex)
    use_packed_attention(model)

    states = states_of(model, in_whole_blocks(pack(*rows()), block))

    torch.testing.assert_close(states, expected, rtol=1e-5, atol=1e-5)


def long_rows(seed: int, groups: int) -> Packed:
    """Prompts of 1 to 400 tokens with up to five responses each: blocks of every kind."""
    generator = np.random.default_rng(seed)
    prompts, responses = [], []
    for _ in range(groups):
        prompt = generator.integers(4, 60, int(generator.integers(1, 400)))
        for _ in range(int(generator.integers(1, 6))):
            prompts.append(prompt)
            responses.append(generator.integers(4, 60, int(generator.integers(0, 300))))
    return pack(prompts, responses)


@pytest.mark.parametrize("kind", [{"window": 3}, {"window": 20}, {"softcap": 1.0}])
def test_few_queries_at_a_time_see_what_all_at_once_see(
    kind: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    """No mask and no scores have the size of the whole length squared."""
    torch.manual_seed(0)
    rows = [torch.randn(2, 37, 3, 8) for _ in range(3)]
    shown = {"scale": 0.5, "window": None, "softcap": None, **kind}
    whole = packed_attention._attend(*rows, **shown)
    masks: list[int] = []
    monkeypatch.setattr(packed_attention, "QUERIES", 10)
    attend = packed_attention.scaled_dot_product_attention

    def recorded(*tensors: Any, **more: Any) -> Tensor:
        masks.append(more["attn_mask"].numel())
        return attend(*tensors, **more)

    monkeypatch.setattr(packed_attention, "scaled_dot_product_attention", recorded)
    torch.testing.assert_close(packed_attention._attend(*rows, **shown), whole)
    assert all(size <= 10 * (10 + kind["window"] - 1) for size in masks)


@pytest.mark.parametrize("window", [None, 3, 200])
@pytest.mark.parametrize(("seed", "groups"), [(0, 1), (1, 2), (2, 4), (3, 6)])
def test_the_blocks_of_flex_attention_are_those_that_torch_finds_by_every_pair(
    seed: int, groups: int, window: int | None
) -> None:
    layout = long_rows(seed, groups).layout
    mine = packed_attention._block_mask(layout, window)
    count = layout.segments[0].numel()
    theirs = create_block_mask(mine.mask_mod, None, None, count, count, device="cpu")
    assert mine.shape == theirs.shape
    for name in ("kv", "full_kv", "q", "full_q"):
        found, expected = (getattr(each, f"{name}_num_blocks") for each in (mine, theirs))
        assert torch.equal(found, expected)
        found, expected = (getattr(each, f"{name}_indices") for each in (mine, theirs))
        assert torch.equal(found, expected)
    assert (
        packed_attention.seen_pairs(layout, window).sum()
        == create_mask(mine.mask_mod, None, None, count, count, device="cpu").sum()
    )


def test_each_prompt_is_read_once_and_last_tokens_not_at_all() -> None:
    packed = pack(*rows())

    tokens = 3 + (1 + 0 + 4) + 1 + (5 + 1) + 5 + 1
    assert packed.input_ids.shape == (1, tokens)
    assert packed.input_ids[0, :8].tolist() == [5, 6, 7, 14, 24, 25, 26, 27]
    assert packed.position_ids[0, :8].tolist() == [0, 1, 2, 3, 3, 4, 5, 6]


@pytest.mark.parametrize("read", [hidden_states, own_logits])
@pytest.mark.parametrize("is_packed", [True, False])
def test_threads_add_up_gradients_in_one_order(read: Any, is_packed: bool) -> None:
    """Many responses to a prompt ask for the state of its last token, and more than one thread
    adds their gradients."""
    model = AutoModelForCausalLM.from_config(
        LlamaConfig(**GATED, hidden_act="silu"), attn_implementation="eager"
    )
    if is_packed:
        use_packed_attention(model)
    asked = model if read is own_logits else model.model
    responses = [np.arange(each, each + 3, dtype=np.int32) % 40 for each in range(1200)]
    packed = pack([np.arange(1 + each % 3, 5, dtype=np.int32) for each in range(1200)], responses)
    weights = torch.randn(read(asked, packed).shape)

    def gradient() -> Tensor:
        model.zero_grad()
        (read(asked, packed) * weights).sum().backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        first = gradient()
        assert all(torch.equal(gradient(), first) for _ in range(20))
    finally:
        torch.set_num_threads(threads)


def test_a_row_without_a_response_has_no_answer() -> None:
    prompts, responses = [np.array([3]), np.array([3])], [np.zeros(0, np.int32), np.array([4, 5])]

    packed = pack(prompts, responses)

    assert packed.input_ids.tolist() == [[3, 4]]
    assert packed.states.tolist() == [0, 1]
    assert packed.unpacked(torch.tensor([1.0, 2.0])).tolist() == [[0.0, 0.0], [1.0, 2.0]]


def test_ids_on_the_cpu_are_packed_for_the_device_of_the_model():
    ids = torch.tensor([[5, 6]])
    mask = torch.ones_like(ids, dtype=torch.bool)
    packed = pack_padded(ids, mask, ids, mask, device=torch.device("meta"))
    placed = (packed.input_ids, packed.position_ids, packed.states, packed.places)
    assert {each.device.type for each in (*placed, packed.response_ids)} == {"meta"}


RECURRENT = {
    "recurrent_gemma": RecurrentGemmaConfig(
        **SIZES, lru_width=32, block_types=("recurrent", "attention"), attention_window_size=16
    ),
    "lfm2": Lfm2Config(**GATED, layer_types=["conv", "full_attention"]),
    "mamba": MambaConfig(vocab_size=40, hidden_size=32, num_hidden_layers=2, state_size=4),
    "jamba": JambaConfig(
        **GATED, attn_layer_period=2, attn_layer_offset=1, num_experts=1, num_experts_per_tok=1,
        mamba_d_state=4, mamba_dt_rank=4,
    ),
}  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", RECURRENT)
def test_no_state_runs_from_row_to_row(tmp_path: Path, name: str, dtype: str) -> None:
    """RecurrentGemma's says that it is causal and lets its attention be stood in for."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(RECURRENT[name])
    for parameter in model.parameters():  # a leak of less than what bfloat16 rounds
        parameter.data.mul_(0.5 if parameter.dim() == 2 else 1.0)
    model.save_pretrained(tmp_path)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        read = load_causal_lm(str(tmp_path), dtype=dtype)
    assert not reads_packed(read)
    assert any("cannot read packed rows" in str(each.message) for each in told) == (
        name == "recurrent_gemma"
    )


@pytest.mark.parametrize("config", CONFIGS.values(), ids=list(CONFIGS))
def test_a_trial_in_float32_leaves_weights_in_bfloat16_as_they_are(config) -> None:
    model = model_of(config).bfloat16()
    before = {name: (each, each.data) for name, each in model.named_parameters()}
    copies = {name: each.clone() for name, (each, _) in before.items()}
    use_packed_attention(model)
    assert reads_packed(model)
    for name, (parameter, data) in before.items():
        assert model.get_parameter(name) is parameter
        assert parameter.data_ptr() == data.data_ptr()
        assert torch.equal(parameter, copies[name])


def test_a_deep_model_is_tried_in_its_first_layers_alone_and_stays_deep() -> None:
    deep: Any = {"num_hidden_layers": 12}
    layers = ("recurrent", "recurrent", "attention") * 4
    llama: Any = model_of(LlamaConfig(**GATED | deep)).float()
    mixed: Any = AutoModelForCausalLM.from_config(
        RecurrentGemmaConfig(**SIZES | deep, lru_width=32, block_types=layers)
    )
    for model in (llama, mixed):
        before = list(model.model.layers)
        with first_layers(model):
            assert len(model.model.layers) == 8
            assert torch.isfinite(model(torch.arange(3, 9)[None]).logits).all()
        assert all(a is b for a, b in zip(model.model.layers, before, strict=True))
    use_packed_attention(llama)
    assert reads_packed(llama)
    assert len(llama.model.layers) == 12
    with pytest.warns(UserWarning, match="RecurrentGemmaForCausalLM cannot read packed rows"):
        use_packed_attention(mixed)
    assert len(mixed.model.layers) == 12
