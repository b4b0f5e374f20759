"""Compiled norms, rotary embeddings and MLPs give the numbers of transformers' own."""

import sys
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    LlamaConfig,
    Qwen2MoeConfig,
    Qwen3Config,
)

from raypo.config import LoraSection
from raypo.models.compiled_layers import ROTARY, compile_layers
from raypo.models.lora import add_adapter
from tests.unit.models.test_packing import GATED

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
"""Dynamo looks at it, and a warning is an error here."""

CONFIGS: dict[str, Any] = {
    "llama": LlamaConfig(**GATED),
    "qwen3: normalised heads": Qwen3Config(**GATED, head_dim=8),
    "gemma2: norms of another formula": Gemma2Config(**GATED, head_dim=8),
}
MODULES = {"llama": 7, "qwen3: normalised heads": 11, "gemma2: norms of another formula": 11}


def model_of(config: Any) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(deepcopy(config), attn_implementation="sdpa")


def step_of(model: Any, tokens: int) -> list[Tensor]:
    """Logits and gradients."""
    ids = torch.arange(tokens)[None] % 40
    logits = model(input_ids=ids, use_cache=False).logits
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [logits.detach(), *torch.autograd.grad(logits.square().sum(), parameters)]


@pytest.fixture(autouse=True)
def rotary(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests of this process get transformers' own functions."""
    for name in ("llama", "qwen3", "gemma2", "qwen2_moe"):
        module = f"transformers.models.{name}.modeling_{name}"
        __import__(module)
        monkeypatch.setattr(sys.modules[module], ROTARY, getattr(sys.modules[module], ROTARY))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    """Equal logits and, except for rounding, equal gradients."""
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=1e-5)
    scale = max(float(each.abs().max()) for each in expected[1:])
    for mine, theirs in zip(found[1:], expected[1:], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6 * scale)


@pytest.mark.parametrize(
    ("name", "backend", "checkpointing"),
    [
        ("llama", "aot_eager", True),
        ("qwen3: normalised heads", "aot_eager", False),
        ("gemma2: norms of another formula", "aot_eager", False),
        ("llama", "inductor", False),
    ],
)
def test_logits_and_gradients_are_those_of_the_model_as_it_was(
    name: str, backend: str, checkpointing: bool
) -> None:
    """`aot_eager` runs the same operations as the model; `inductor` is what GPUs get."""
    model = model_of(CONFIGS[name])
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    expected = [step_of(model, tokens) for tokens in (9, 4)]
    assert compile_layers(model, backend=backend) == MODULES[name]
    function = getattr(sys.modules[type(model).__module__], ROTARY)
    assert hasattr(function, "_torchdynamo_orig_callable")
    for tokens, wanted in zip((9, 4), expected, strict=True):
        found = step_of(model, tokens)
        assert backend == "inductor" or torch.equal(found[0], wanted[0])
        assert_same(found, wanted)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 3, "something was compiled"


def test_all_layers_and_lengths_share_their_code() -> None:
    model = model_of(CONFIGS["llama"])
    compile_layers(model, backend="aot_eager")
    for tokens in (5, 9, 17, 30):
        step_of(model, tokens)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 4


def test_modules_with_adapters_and_of_experts_stay_as_they_are() -> None:
    model = add_adapter(model_of(CONFIGS["llama"]), LoraSection(rank=2))
    expected = step_of(model, 9)
    assert compile_layers(model, backend="aot_eager") == 2 * 2 + 1, "the norms alone"
    assert_same(step_of(model, 9), expected)
    sizes: dict[str, Any] = {
        "num_experts": 4,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    }
    experts = model_of(Qwen2MoeConfig(**GATED, **sizes))
    assert compile_layers(experts, backend="aot_eager") == 2 * 2 + 1
