"""sft -> reward_model -> ppo as whole runs, each on what the one before has made."""

import json
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

from raypo import (
    PPOConfig,
    PPOTrainer,
    RewardModelConfig,
    RewardModelTrainer,
    SFTConfig,
    SFTTrainer,
)
from tests.integration.pipeline import reward_model_values, sft_values, write_examples


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pipeline")
    write_examples(path)
    return path


def outcome(folder: Path, name: str, result) -> SimpleNamespace:
    run = folder / "runs" / name
    summary = json.loads((run / "summary.json").read_text())
    return SimpleNamespace(run=run, rows=result.metrics_dataframe, summary=summary)


@pytest.fixture(scope="module")
def sft(folder: Path, local_ray: None) -> SimpleNamespace:
    result = SFTTrainer(SFTConfig.parse(sft_values(folder))).fit()
    return outcome(folder, "sft", result)


@pytest.fixture(scope="module")
def reward(folder: Path, local_ray: None) -> SimpleNamespace:
    config = RewardModelConfig.parse(reward_model_values(folder))
    return outcome(folder, "reward", RewardModelTrainer(config).fit())


@pytest.fixture(scope="module")
def ppo(folder: Path, sft: SimpleNamespace, reward: SimpleNamespace) -> SimpleNamespace:
    config = PPOConfig.parse(
        {
            "name": "ppo",
            "num_steps": 2,
            "storage_path": f"{folder}/runs",
            "model": {
                "policy": str(sft.run / "policy"),
                "reward": str(reward.run / "reward_model"),
            },
            "data": {
                "prompts": f"{folder}/train.jsonl",
                "label_key": "response",
                "max_prompt_tokens": 16,
            },
            "rollout": {"prompts_per_step": 8, "samples_per_prompt": 4, "max_new_tokens": 8},
            "reward": {
                "function": "tests.integration.task:digit_share",
                "weights": {"function": 2.0, "model": 0.5},
            },
            "ppo": {"minibatch_size": 16},
            "learner": {"policy_lr": 1e-3, "critic_lr": 1e-3, "max_tokens_per_microbatch": 128},
            "eval": {"prompts": f"{folder}/held_out.jsonl", "every": 2},
        }
    )
    return outcome(folder, "ppo", PPOTrainer(config).fit())


def test_sft_lowers_the_loss_and_asks_the_engine_for_answers(sft: SimpleNamespace):
    assert sft.summary["status"] == "finished"
    assert sft.summary["recipe"] == "sft"
    first, last = sft.rows.iloc[0], sft.rows.iloc[-1]
    assert last["eval/loss"] < first["eval/initial_loss"] - 0.5
    assert 0.0 <= last["eval/score_mean"] <= 1.0
    assert last["mismatch/probe_gap_max"] < 1e-3
    assert list(sft.rows["train/learning_rate"])[:2] == pytest.approx([5e-3, 5e-3 * 5 / 6])


def test_the_sft_policy_is_a_hugging_face_folder(sft: SimpleNamespace, folder: Path):
    policy = AutoModelForCausalLM.from_pretrained(sft.run / "policy")
    start = AutoModelForCausalLM.from_pretrained(folder / "model")
    name, weight = next(iter(policy.named_parameters()))
    assert not torch.equal(weight, dict(start.named_parameters())[name])
    assert AutoTokenizer.from_pretrained(sft.run / "policy").eos_token == "<eos>"


def test_the_reward_model_learns_the_order_of_held_out_pairs(reward: SimpleNamespace):
    assert reward.summary["status"] == "finished"
    assert reward.summary["eval/accuracy"]["last"] > 0.9
    assert reward.summary["eval/loss"]["last"] < reward.summary["eval/loss"]["first"]


def test_plain_transformers_loads_the_reward_model(reward: SimpleNamespace):
    folder = reward.run / "reward_model"
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model.config.num_labels == 1
    batch = tokenizer(
        ["1+1=2<eos>", "1+1=xx<eos>"], return_tensors="pt", padding=True, add_special_tokens=False
    )
    better, worse = model(**batch).logits.flatten().tolist()
    assert better > worse


def test_ppo_adds_its_judges_by_weight(ppo: SimpleNamespace):
    assert ppo.summary["status"] == "finished"
    rows = pd.read_parquet(ppo.run / "rollouts" / "step_00001.parquet")
    for row in rows.to_dict("records"):
        source = dict(row["scores_by_source"])
        total = 2.0 * source["function"] + 0.5 * source["model"]
        assert row["score"] == pytest.approx(total, abs=1e-4)
    assert "eval/reward_model_mean" in ppo.summary


def test_the_critic_starts_from_the_reward_model(ppo: SimpleNamespace):
    first = ppo.rows.iloc[0]
    assert abs(first["ppo/value_mean"]) > 1e-3  # a head of zeros would say 0
