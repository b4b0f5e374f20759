"""Adapters: what learns, what is pushed, and what peft and transformers load."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
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


@pytest.mark.parametrize("kind", [load_causal_lm, load_reward_model])
def test_merged_weights_are_the_model_and_leave_it_alone(folder: str, kind: Any, tmp_path: Path):
    plain = kind(folder, dtype="float32")
    names = [name for name, _ in plain.named_parameters(remove_duplicate=False)]
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


@pytest.mark.parametrize("kind", [load_causal_lm, load_reward_model])
def test_peft_loads_the_adapter_and_its_head(folder: str, kind: Any, tmp_path: Path):
    model = taught(kind(folder, dtype="float32"))
    weights = {weight.name: weight.merged() for weight in adapter_weights(model)}
    save_adapter(tmp_path, adapter_config(model, SECTION, base=folder), weights)
    assert ("base_model.model.score.weight" in weights) == (kind is load_reward_model)
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
    assert "learn" in words
