"""Parts of the acceptance on a GPU, small and on this CPU: all of them but the GPU."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, Qwen2Config, Qwen2ForCausalLM

from raypo import PPOConfig
from raypo.cluster.hardware import parse_cluster
from raypo.models import packed_attention
from raypo.plan.fit import make_plan
from tests.gpu import parts, test_several_gpus
from tests.integration.task import write_task
from tests.integration.test_engine import learner_log_probs


def test_the_reward_model_of_the_run_has_fewer_layers_than_its_policy(
    monkeypatch: pytest.MonkeyPatch,
):
    """In transformers 5.17 the list of the policy's layer types stays, and saving refuses it."""
    sizes = {"hidden_size": 56, "intermediate_size": 64, "vocab_size": 128}
    monkeypatch.setattr(parts, "SIZES", sizes)
    with parts._model(layers=3, dtype="float32") as policy, parts._reward(policy) as reward:
        config = AutoConfig.from_pretrained(reward)
    assert config.num_hidden_layers == len(config.layer_types) == 2


def test_the_worst_microbatch_passes_forward_and_backward(monkeypatch: pytest.MonkeyPatch):
    sizes = {"hidden_size": 56, "intermediate_size": 64, "vocab_size": 128}
    monkeypatch.setattr(parts, "SIZES", sizes)
    small = parts.TOKENS | {"prompt": 8, "response": 16, "max_tokens_per_microbatch": 400}
    monkeypatch.setattr(parts, "TOKENS", small)
    figures = parts.microbatch("float32", layers=1, device="cpu")
    assert figures["tokens"] == 400
    assert figures["planned_gb"] > 0.0


def test_attention_agrees_and_windows_that_nobody_keeps_are_seen(monkeypatch: pytest.MonkeyPatch):
    figures = parts.attention("float32", device="cpu", lengths=3)
    assert max(value for name, value in figures.items() if name != "graphs") < 1e-4

    whole = packed_attention._attend
    blind: Any = lambda *qkv, window, **kind: whole(*qkv, window=None, **kind)  # noqa: E731
    monkeypatch.setattr(packed_attention, "_attend", blind)
    # Else the trial at load would see it.
    monkeypatch.setitem(packed_attention.MAX_GAP, torch.float32, 10.0)
    with pytest.raises(AssertionError, match="window_states"):
        parts.attention("float32", device="cpu", lengths=3)


def test_a_single_layer_with_other_weights_is_far_outside_the_bound_and_rounding_within():
    """Of a model as wide and deep as the acceptance's."""
    torch.manual_seed(0)
    values: dict[str, Any] = {**parts.SIZES, "vocab_size": 4096, "num_hidden_layers": 24}
    config = Qwen2Config(num_attention_heads=14, num_key_value_heads=2, **values)
    model: Any = Qwen2ForCausalLM(config).eval()
    parts._spread(model)
    prompt, response = np.arange(4, 20), np.random.default_rng(0).integers(4, 4000, 60)

    def log_probs(of: Any) -> np.ndarray:
        return learner_log_probs(of, prompt, response, 1.0)

    exact = log_probs(model)
    rounded = log_probs(copy.deepcopy(model).bfloat16())
    assert np.abs(rounded - exact).mean() < parts.GAP / 2
    for number in (0, 12, 23):
        stale = copy.deepcopy(model)
        with torch.no_grad():
            for weight in stale.model.layers[number].parameters():
                if weight.dim() == 2:
                    weight.copy_(torch.randn_like(weight) * weight.std())
        assert np.abs(log_probs(stale) - exact).mean() > 1.5 * parts.GAP, number


@pytest.mark.parametrize("keys", test_several_gpus.RUNS.values(), ids=list(test_several_gpus.RUNS))
def test_runs_on_several_gpus_are_possible_and_push_the_way_they_say(
    tmp_path: Path, keys: dict[str, Any]
):
    usual = {"learner.use_gpu": True, "rollout.engine.gpu_memory_fraction": 0.3}
    config = PPOConfig.load(write_task(tmp_path), usual | keys)
    plan = make_plan(config, parse_cluster("2xH100,16xCPU"))
    assert plan.fits, plan.problems
    assert plan.config.model.dtype == "bfloat16"
    kind = config.rollout.engine.resolved_transport(
        colocated=config.placement.group_of("engine") == "colocated", use_gpu=True
    )
    assert kind == keys.get("rollout.engine.transport", "ipc")
