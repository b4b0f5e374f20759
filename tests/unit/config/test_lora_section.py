"""`model.lora`: what its keys mean, and when another model is the reference."""

from raypo.config import PPOConfig

RUN = {"name": "run", "data": {"prompts": "prompts.jsonl"}}


def ppo(lora: object, **model: object) -> PPOConfig:
    return PPOConfig.parse(RUN | {"model": {"policy": "p", "lora": lora, **model}})


def test_the_policy_without_its_adapter_is_the_reference_unless_another_is_named():
    assert ppo(None).reference == "p"
    assert ppo({}).reference is None
    assert ppo({}, reference="r").reference == "r"
    without_kl = RUN | {"model": {"policy": "p"}, "ppo": {"kl": {"coef": 0.0}}}
    assert PPOConfig.parse(without_kl).reference is None
