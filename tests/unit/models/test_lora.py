"""Adapters: what learns, what is pushed, and what peft and transformers load."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    Gemma3Config,
    GPT2Config,
    GPT2LMHeadModel,
)

from raypo.config import ConfigError, LoraSection, PolicyLoraSection
from raypo.models.critic import Critic, CriticStart
from raypo.models.loading import load_causal_lm, load_reward_model
from raypo.models.lora import (
    adapter_config,
    adapter_off,
    adapter_weights,
    add_adapter,
    check_targets,
    merged_weights,
    save_adapter,
)
from tests.tiny import tiny_policy

SECTION = LoraSection(rank=4, alpha=6.0)
IDS = torch.tensor([[5, 6, 7, 8, 9, 10]])

pytestmark = [
    pytest.mark.usefixtures("no_gradients"),
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning"),
]


@pytest.fixture
def no_gradients():
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_policy(tmp_path_factory.mktemp("tiny")))


def taught(model: Any, section: LoraSection = SECTION) -> Any:
    """The model with an adapter that has moved far."""
    add_adapter(model, section)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and "lora_A" not in name:
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model.eval()


def new_reward_model(folder: str, *, dtype: str) -> Any:
    """A reward model with a new head, always the same."""
    torch.manual_seed(0)
    return load_reward_model(folder, dtype=dtype, new_head=True)


def logits(model: Any) -> Tensor:
    return model(input_ids=IDS).logits


def test_a_fresh_adapter_changes_nothing_and_alone_learns(folder: str):
    model = load_causal_lm(folder, dtype="float32")
    before = logits(model)
    add_adapter(model, SECTION)
    assert torch.equal(logits(model), before)
    learning = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert len(learning) == 2 * 2 * 7  # A and B of seven layers in two blocks
    assert all("lora_" in name for name in learning)


def test_adapter_off_is_the_base_bit_for_bit_and_on_again_the_taught_model(folder: str):
    base = load_causal_lm(folder, dtype="float32").eval()
    model = taught(load_causal_lm(folder, dtype="float32"))
    on = logits(model)
    with adapter_off(model):
        assert torch.equal(logits(model), logits(base))
    assert torch.equal(logits(model), on)
    assert (on - logits(base)).abs().max() > 1.0
    assert sum(parameter.requires_grad for parameter in model.parameters()) == 28


@pytest.mark.parametrize("kind", [load_causal_lm, new_reward_model])
def test_merged_weights_are_the_model_and_leave_it_alone(folder: str, kind: Any, tmp_path: Path):
    plain = kind(folder, dtype="float32")
    names = [name for name in plain.state_dict() if name != "lm_head.weight"]  # tied
    model = taught(kind(folder, dtype="float32"))
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    weights = {weight.name: weight.merged() for weight in merged_weights(model)}
    assert list(weights) == names
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name])

    model.save_pretrained(tmp_path, state_dict=weights)
    auto: Any = AutoModelForSequenceClassification
    if kind is load_causal_lm:
        auto = AutoModelForCausalLM
    torch.testing.assert_close(
        logits(auto.from_pretrained(tmp_path)), logits(model), atol=1e-4, rtol=0
    )


@pytest.mark.parametrize("kind", [load_causal_lm, new_reward_model])
def test_peft_loads_the_adapter_and_its_head(folder: str, kind: Any, tmp_path: Path):
    model = taught(kind(folder, dtype="float32"))
    weights = {weight.name: weight.merged() for weight in adapter_weights(model)}
    save_adapter(tmp_path, adapter_config(model, SECTION, base=folder), weights)
    assert ("base_model.model.score.weight" in weights) == (kind is new_reward_model)
    loaded = PeftModel.from_pretrained(kind(folder, dtype="float32"), tmp_path).eval()
    torch.testing.assert_close(logits(loaded), logits(model), atol=1e-5, rtol=0)


def test_gpt2_keeps_its_weights_the_other_way_round(tmp_path: Path):
    config = GPT2Config(vocab_size=40, n_embd=32, n_layer=1, n_head=2, n_positions=16)
    config.bos_token_id = config.eos_token_id = 0
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "base")
    model = taught(load_causal_lm(str(tmp_path / "base"), dtype="float32"))
    weights = {weight.name: weight.merged() for weight in merged_weights(model)}
    model.save_pretrained(tmp_path / "merged", state_dict=weights)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(merged), logits(model), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("lm_head",), "lm_head shares its weight with the embedding.* Leave it out"),
        (("embed_tokens",), "model.embed_tokens is a Embedding.* Leave it out"),
        (("nope",), ".*'nope'.* Name linear layers of LlamaForCausalLM, or set it to all-linear"),
    ],
)
def test_targets_that_cannot_work_are_refused(folder: str, names: tuple[str, ...], message: str):
    with pytest.raises(ConfigError, match=rf"model.lora.target_modules \({names[0]}\): {message}"):
        add_adapter(load_causal_lm(folder, dtype="float32"), LoraSection(target_modules=names))


def test_named_targets_alone_get_adapters(folder: str):
    section = LoraSection(rank=4, target_modules=("q_proj", "v_proj"))
    model = add_adapter(load_causal_lm(folder, dtype="float32"), section)
    assert adapter_config(model, section, base=folder)["target_modules"] == ["q_proj", "v_proj"]
    assert len(list(adapter_weights(model))) == 2 * 2 * 2


@pytest.mark.parametrize(("kind", "count"), [("adapter", 28 + 2), ("head", 2)])
def test_a_critic_learns_its_head_and_perhaps_an_adapter(folder: str, kind: str, count: int):
    section = PolicyLoraSection.model_validate({"rank": 4, "critic": kind})
    critic, words = Critic.load(CriticStart(folder), dtype="float32", lora=section)
    learning = [name for name, parameter in critic.named_parameters() if parameter.requires_grad]
    assert len(learning) == count
    assert {"value_head.weight", "value_head.bias"} <= set(learning)
    assert "trained" in words


MOE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_experts_per_tok": 2,
    "shared_expert_intermediate_size": 16,
    "pad_token_id": 0,
}
LATENT = {  # attention of DeepSeek
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
LINEAR = {"layer_types": ["linear_attention", "full_attention"]}
MIXTURES: dict[str, dict[str, Any]] = {
    "qwen2_moe": {},
    "qwen3_moe": {},
    "mixtral": {},
    "olmoe": {},
    "phimoe": {},
    "granitemoe": {},
    "gpt_oss": {},
    "glm4_moe": {},
    "llama4_text": {"interleave_moe_layer_step": 1},
    "deepseek_v3": LATENT,
    "minimax": LINEAR,
    "qwen3_next": LINEAR
    | {
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
}


def mixture(folder: Path, kind: str) -> str:
    """The folder of a tiny mixture of experts."""
    config = CONFIG_MAPPING[kind](**MOE | MIXTURES[kind])
    config.save_pretrained(folder)
    return str(folder)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", MIXTURES)
def test_experts_are_refused_before_weights_are_read_and_the_remedy_works(
    kind: str, tmp_path: Path
):
    path = mixture(tmp_path, kind)
    with pytest.raises(ConfigError) as caught:
        check_targets(path, AutoModelForCausalLM, SECTION)
    told = str(caught.value)
    assert told.startswith("model.lora.target_modules (all-linear): the experts of ")
    names = tuple(re.findall(r"\[(.*)\]", told)[0].split(", "))
    section = LoraSection(rank=4, target_modules=names)
    check_targets(path, AutoModelForCausalLM, section)

    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind].from_pretrained(path))
    before = logits(model.eval())
    names = [name for name in model.state_dict() if name not in model.all_tied_weights_keys]
    model = taught(model, section)
    assert not torch.allclose(logits(model), before)
    weights = {weight.name: weight.merged() for weight in merged_weights(model)}
    assert list(weights) == names
    plain = AutoModelForCausalLM.from_config(model.config).eval()
    plain.load_state_dict(weights, strict=False)
    torch.testing.assert_close(logits(plain), logits(model), atol=1e-3, rtol=1e-3)


@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern:RuntimeWarning")
@pytest.mark.parametrize(
    ("kind", "names", "message"),
    [
        ("qwen3_moe", ("gate_proj", "up_proj", "down_proj"), "experts is a ParamWrapper, but adap"),
        ("mixtral", ("experts",), "MixtralExperts is no linear layer"),
        (
            "phimoe",
            ("router",),
            r"mlp\.router is a PhimoeTopKRouter, but adapters need plain linear",
        ),
        ("gpt_oss", ("router",), "GptOssTopKRouter is no linear layer"),
    ],
)
def test_targets_in_a_mixture_that_cannot_work_are_refused(
    kind: str, names: tuple[str, ...], message: str, tmp_path: Path
):
    with pytest.raises(ConfigError, match=rf"target_modules \({', '.join(names)}\): .*{message}"):
        check_targets(
            mixture(tmp_path, kind), AutoModelForCausalLM, LoraSection(target_modules=names)
        )


def test_experts_beside_shared_ones_that_learn_are_told(tmp_path: Path):
    section = LoraSection(target_modules=("up_proj",))
    with pytest.warns(UserWarning, match=r"shared experts get adapters, but the others \(model\."):
        check_targets(mixture(tmp_path, "qwen2_moe"), AutoModelForCausalLM, section)


def test_a_vision_tower_that_no_text_passes_gets_no_adapter():
    text = {name: MOE[name] for name in list(MOE)[:8] if name != "moe_intermediate_size"}
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    vision = sizes | {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    model = AutoModelForCausalLM.from_config(config)
    towers = {name for name, _ in model.named_modules() if "vision" in name and "proj" in name}
    assert towers
    for targets in ("all-linear", ("q_proj", "v_proj")):
        model = AutoModelForCausalLM.from_config(config)
        add_adapter(model, LoraSection(rank=2, target_modules=targets))
        learning = [name for name, each in model.named_parameters() if each.requires_grad]
        assert len(learning) == 2 * 2 * (7 if targets == "all-linear" else 2)
        assert all(".language_model." in name for name in learning)
