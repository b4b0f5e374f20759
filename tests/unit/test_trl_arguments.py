"""The trainers take TRL's own config objects, and train as TRL says."""

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from raypo.config import ConfigError
from raypo.trainer import DPOTrainer, GRPOTrainer, RewardModelTrainer, SFTTrainer
from raypo.translation.foreign_arguments import defaults_of
from tests.tiny import tiny_policy

ROWS = [{"prompt": f"{n}+1=", "answer": n + 1} for n in range(16)]
PAIRS = [{"prompt": "1+1=", "chosen": "2", "rejected": "3"}] * 16


def exact(completions: list[str], answer: list[int], **columns: Any) -> list[float]:
    return [float(text == str(right)) for text, right in zip(completions, answer, strict=True)]


def brief(completions: list[str], **columns: Any) -> list[float]:
    return [-float(len(text)) for text in completions]


@pytest.fixture
def policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.chdir(tmp_path)
    return str(tiny_policy(tmp_path / "policy"))


def config_of_trl(kind: str, **fields: Any) -> Any:
    """A config of TRL: the installed one, or an object with the same fields."""
    try:
        trl = import_module("trl")
    except ImportError:
        values: dict[str, Any] = (
            defaults_of("TRL", kind) | {"output_dir": "trainer_output"} | fields
        )
        if kind == "GRPOConfig":
            values["steps_per_generation"] = values["gradient_accumulation_steps"]
            values["generation_batch_size"] = (
                values["per_device_train_batch_size"] * values["gradient_accumulation_steps"]
            )
        return type(kind, (), {"to_dict": lambda self: dict(values)})()
    return getattr(trl, kind)(bf16=False, **fields)


def grpo(policy: str, config: Any = None, **fields: Any) -> GRPOTrainer:
    args = config_of_trl("GRPOConfig", **{"max_completion_length": 6} | fields)
    return GRPOTrainer(
        config, model=policy, train_dataset=ROWS, reward_funcs=[exact, brief], args=args
    )


def test_a_grpo_config_of_trl_is_trained_as_trl_would(policy: str):
    trainer = grpo(
        policy,
        **{"num_generations": 4, "per_device_train_batch_size": 8},
        **{"learning_rate": 3e-4, "beta": 0.04, "reward_weights": [1.0, 0.5]},
    )
    made = trainer.config
    assert (made.rollout.prompts_per_step, made.rollout.samples_per_prompt) == (2, 4)
    assert (made.ppo.minibatch_size, made.rollout.max_new_tokens) == (8, 6)
    assert made.num_steps == 16 // 2 * 3, "TRL's three epochs"
    assert (made.learner.policy_lr, made.learner.lr_schedule) == (3e-4, "linear")
    assert (made.ppo.kl.coef, made.ppo.kl.placement) == (0.04, "loss")
    assert (made.ppo.aggregation, made.data.too_long) == ("token_mean", "error")
    weights = trainer.arguments_of_trials["reward_funcs"].weights
    assert list(weights) == [1.0, 0.5]


def test_keys_of_raypo_take_precedence_over_fields_of_trl(policy: str):
    own = {"learner.policy_lr": 1e-5, "ppo": {"minibatch_size": 4}, "data.max_prompt_tokens": 9}
    made = grpo(policy, own, num_generations=4, max_steps=3).config
    assert (made.learner.policy_lr, made.ppo.minibatch_size) == (1e-5, 4)
    assert (made.data.max_prompt_tokens, made.num_steps) == (9, 3)


def test_every_field_of_trl_is_in_one_report(policy: str):
    trainer = grpo(policy, num_generations=4, sapo_temperature_neg=2.0, max_steps=3)
    report = "\n".join(trainer._input.report)
    assert report.startswith("args (GRPOConfig):")
    assert "- sapo_temperature_neg (2.0): raypo's `sapo` has the paper's" in report
    assert "TODO" not in report


def test_a_field_of_trl_that_raypo_lacks_is_refused(policy: str):
    with pytest.raises(ConfigError) as error:
        grpo(policy, num_generations=4, scale_rewards="batch")
    assert "args (GRPOConfig): does not tell these keys" in str(error.value)
    assert "ppo.advantage: scale_rewards batch" in str(error.value)
    assert grpo(policy, {"ppo.advantage": "grpo"}, scale_rewards="batch").config


def test_the_config_of_another_trainer_is_refused(policy: str):
    with pytest.raises(ConfigError, match=r"args \(SFTConfig\): belongs to another trainer"):
        GRPOTrainer(model=policy, train_dataset=ROWS, args=config_of_trl("SFTConfig"))


def test_configs_of_examples(policy: str):
    rows = [{"prompt": "1+1=", "completion": "2"}] * 16
    sft = SFTTrainer(model=policy, train_dataset=rows, args=config_of_trl("SFTConfig")).config
    assert (sft.learner.lr, sft.learner.batch_size, sft.num_steps) == (2e-5, 8, 6)
    args = config_of_trl("DPOConfig", beta=0.2, max_steps=5)
    dpo = DPOTrainer(model=policy, train_dataset=PAIRS, args=args).config
    assert (dpo.dpo.beta, dpo.num_steps, dpo.learner.lr_schedule) == (0.2, 5, "linear")
    args = config_of_trl("RewardConfig", center_rewards_coefficient=0.01)
    made = RewardModelTrainer(model=policy, train_dataset=PAIRS, args=args).config
    assert (made.reward_model.centering_coef, made.learner.lr) == (0.01, 1e-4)
