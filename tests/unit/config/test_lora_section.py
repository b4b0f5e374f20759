"""`model.lora`: what its keys mean, and when another model is the reference."""

import pytest

from raypo.config import ConfigError, PPOConfig, RewardModelConfig

RUN = {"name": "run", "data": {"prompts": "prompts.jsonl"}}


def ppo(lora: object, **model: object) -> PPOConfig:
    return PPOConfig.parse(RUN | {"model": {"policy": "p", "lora": lora, **model}})


def test_the_policy_without_its_adapter_is_the_reference_unless_another_is_named():
    assert ppo(None).reference == "p"
    assert ppo({}).reference is None
    assert ppo({}, reference="r").reference == "r"
    without_kl = RUN | {"model": {"policy": "p"}, "ppo": {"kl": {"coef": 0.0}}}
    assert PPOConfig.parse(without_kl).reference is None


def test_a_reward_model_pushes_nothing():
    values = RUN | {"recipe": "reward_model", "model": {"policy": "p", "lora": {"push": "merged"}}}
    with pytest.raises(ConfigError, match=r"model.lora.push: there is no such key"):
        RewardModelConfig.parse(values)
