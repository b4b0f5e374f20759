"""Whole PPO runs with LoRA: resumed to the same numbers, pushed merged or as an adapter."""

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from raypo import (
    PPOConfig,
    PPOTrainer,
    RewardModelConfig,
    RewardModelTrainer,
    SFTConfig,
    SFTTrainer,
)
from tests.integration.pipeline import reward_model_values, sft_values, write_examples
from tests.integration.task import (
    kill_at_work,
    read_metrics,
    write_task,
)

pytestmark = pytest.mark.usefixtures("local_ray")
LORA = {
    "num_steps": 3,
    "model.lora": {"rank": 4, "alpha": 16},
    "learner.policy_lr": 1e-2,
    "checkpoint.every": 1,
    "eval.every": 3,
}


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_task(tmp_path_factory.mktemp("task"))


@pytest.fixture(scope="module")
def first(task: Path, local_ray: None) -> SimpleNamespace:
    PPOTrainer(PPOConfig.load(task, LORA)).fit()
    folder = task.parent / "runs" / "tiny"
    return SimpleNamespace(folder=folder, metrics=read_metrics(folder))


def test_the_policy_with_its_adapter_off_is_the_reference(first: SimpleNamespace):
    kl = [row["kl/ref_response_mean"] for row in first.metrics]
    assert kl[0] == 0.0
    assert kl[-1] > 1e-3
    assert not list((first.folder / "logs").glob("reference*"))
    assert all(0.0 < row["mismatch/probe_gap_max"] < 1e-3 for row in first.metrics)


def test_plain_transformers_and_peft_load_what_it_leaves(first: SimpleNamespace, task: Path):
    base = AutoModelForCausalLM.from_pretrained(task.parent / "policy")
    merged = AutoModelForCausalLM.from_pretrained(first.folder / "policy")
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    with torch.no_grad():
        before = base(ids).logits
        adapted = PeftModel.from_pretrained(base, first.folder / "adapter")
        torch.testing.assert_close(adapted(ids).logits, merged(ids).logits, atol=1e-4, rtol=0)
        assert (merged(ids).logits - before).abs().max() > 0.01


def test_two_workers_and_an_engine_that_holds_the_adapter_make_the_same_step(
    first: SimpleNamespace, task: Path
):
    """The engine is killed in the second step, and loads base and adapter again."""
    changes = {
        "name": "held",
        "num_steps": 2,
        "eval.every": 2,
        "model.lora.push": "adapter",
        "learner.num_workers": 2,
        "learner.zero_stage": 3,
    }
    folder = task.parent / "runs" / "held"
    killed: list[int] = []

    def kill_the_engine() -> None:
        killed.append(kill_at_work("raypo:held:engine:0", folder, last_step=2))

    killer = threading.Thread(target=kill_the_engine, daemon=True)
    killer.start()
    PPOTrainer(PPOConfig.load(task, LORA | changes)).fit()
    killer.join(timeout=10)
    assert killed
    steps = read_metrics(folder)
    for name in ("rollout/score_mean", "ppo/policy_loss", "ppo/value_loss", "ppo/approx_kl"):
        assert steps[0][name] == pytest.approx(first.metrics[0][name], rel=1e-3, abs=1e-5), name
    assert all(0.0 < row["mismatch/probe_gap_max"] < 1e-3 for row in steps)
    assert steps[1]["kl/ref_response_mean"] > 1e-3
    assert steps[1]["mismatch/log_prob_gap_max"] < 1e-3


def test_a_reward_model_leaves_a_merged_classifier_and_an_adapter_with_its_head(tmp_path: Path):
    write_examples(tmp_path)
    values: Any = reward_model_values(tmp_path, batch_size=8) | {"num_steps": 3}
    values["model"]["lora"] = {"rank": 4}
    RewardModelTrainer(RewardModelConfig.parse(values)).fit()
    run = tmp_path / "runs" / "reward"
    merged = AutoModelForSequenceClassification.from_pretrained(run / "reward_model")
    start = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model", num_labels=1)
    adapted = PeftModel.from_pretrained(start, run / "adapter")
    ids = torch.tensor([[5, 6, 7, 8, 2]])
    with torch.no_grad():
        torch.testing.assert_close(adapted(ids).logits, merged(ids).logits, atol=1e-4, rtol=0)
        with adapted.disable_adapter():
            assert (adapted(ids).logits - merged(ids).logits).abs() > 1e-3


def test_sft_trains_an_adapter_and_leaves_the_merged_policy_that_the_engine_was_given(
    tmp_path: Path,
):
    write_examples(tmp_path)
    values = sft_values(tmp_path, lr=2e-2)
    values["model"]["lora"] = {"rank": 4}
    SFTTrainer(SFTConfig.parse(values)).fit()
    run = tmp_path / "runs" / "sft"
    rows = read_metrics(run)
    assert rows[-1]["eval/loss"] < rows[0]["eval/initial_loss"]
    assert 0.0 < rows[-1]["mismatch/probe_gap_max"] < 1e-3
    merged = AutoModelForCausalLM.from_pretrained(run / "policy")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    with torch.no_grad():
        before = base(ids).logits
        adapted = PeftModel.from_pretrained(base, run / "adapter")
        torch.testing.assert_close(adapted(ids).logits, merged(ids).logits, atol=1e-4, rtol=0)
        assert (merged(ids).logits - before).abs().max() > 0.01
