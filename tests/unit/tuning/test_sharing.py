"""What the trials of a sweep have in common, and when they have their own."""

from typing import Any

import pytest

from raypo.config import ConfigError, PPOConfig
from raypo.config.sweep_config import SweepConfig, with_values
from raypo.run.shared_services import roles_alike
from raypo.tuning.capacity import SweepPlan, describe, plan_sweep
from raypo.tuning.shared import MADE_FROM, Sharing

BASE: dict[str, Any] = {
    "name": "b",
    "model": {"policy": "p", "reward": "r"},
    "data": {"prompts": "d"},
}
ROLES = {"engine", "reference", "reward_0"}
OTHER_VALUES: dict[str, Any] = {
    "model.attention": "eager",
    "model.policy": "q",
    "model.reference": "q",
    "model.reward": "s",
    "model.dtype": "bfloat16",
    "model.lora": {"rank": 4},
    "rollout.engine": {"prefix_caching": False},
    "rollout.max_episode_tokens": 99,
    "rollout.max_new_tokens": 7,
    "rollout.temperature": 0.5,
    "rollout.stop": ["Q:"],
    "data.max_prompt_tokens": 9,
    "learner.max_tokens_per_microbatch": 333,
}
"""Of every key that a deployment is made from."""


def sweep_of(key: str = "ppo.kl.coef", **changes: Any) -> SweepConfig:
    space = {key: {"choice": [0.1, 0.2]}}
    return SweepConfig.parse({"name": "s", "base": "base.yaml", "space": space} | changes)


def base_of(changes: dict[str, Any] | None = None) -> PPOConfig:
    return PPOConfig.parse(with_values(BASE, changes or {}))


def plan_of(node: dict[str, float], *, use_gpu: bool, **changes: Any) -> SweepPlan:
    return plan_sweep(sweep_of(num_samples=99, **changes), base_of(), [node], use_gpu=use_gpu)


def test_on_cpus_all_is_shared_and_takes_no_place():
    plan = plan_of({"CPU": 3.0}, use_gpu=False)
    assert plan.sharing == Sharing(("reference", "reward_0"), engines=True)
    assert plan.num_slots == 3
    lines = describe(sweep_of(), base_of(), plan)
    assert "  all trials share reference, reward_0" in lines
    assert "  engines are handed on from trial to trial" in lines


def test_on_gpus_models_are_shared_where_no_trial_pays_for_it():
    assert plan_of({"CPU": 64.0, "GPU": 1.0}, use_gpu=True).sharing == Sharing()
    taken = plan_of({"CPU": 64.0, "GPU": 8.0}, use_gpu=True, share=["reward", "reference"])
    (bundle,) = taken.sharing.bundles
    assert str(bundle) == "1 CPU, 1 GPU for reference:0, reward_0:0"
    assert taken.num_slots == 7
    spare = plan_of({"CPU": 7.0, "GPU": 8.0}, use_gpu=True)
    assert spare.num_slots == 7, "the bundle's core is a trial's"
    assert spare.sharing == Sharing()
    with pytest.raises(ConfigError, match=r"share \(reference, reward_0\): .* no trial fits"):
        plan_of({"CPU": 64.0, "GPU": 1.0}, use_gpu=True, share=["reward", "reference"])


def test_models_are_shared_where_all_trials_fit_beside_them():
    """Four trials leave four of eight GPUs: a bundle for the models costs none of them."""
    sweep = sweep_of(num_samples=4)
    plan = plan_sweep(sweep, base_of(), [{"CPU": 64.0, "GPU": 8.0}], use_gpu=True)
    assert plan.sharing.models == ("reference", "reward_0")
    assert plan.num_slots == 4
    few = sweep_of(num_samples=99, max_concurrent=7)
    assert plan_sweep(few, base_of(), [{"CPU": 64.0, "GPU": 8.0}], use_gpu=True).sharing.models


def test_what_the_space_changes_is_each_trials_own():
    def shared(key: str, **changes: Any) -> Sharing:
        return Sharing.of(sweep_of(key, **changes), base_of(), use_gpu=False)

    assert shared("rollout.temperature") == Sharing(("reward_0",), engines=True)
    assert shared("rollout.engine.prefix_caching") == Sharing(("reference", "reward_0"))
    assert shared("seed", share=[]) == Sharing()
    assert shared("seed", share="reward") == Sharing(("reward_0",))


def test_trials_that_push_adapters_use_the_same_engines():
    base = base_of({"model.lora": {"rank": 4, "push": "adapter"}, "placement.gpus": {"engine": 1}})

    def sharing(key: str = "ppo.kl.coef", *, use_gpu: bool = False, **changes: Any) -> Sharing:
        return Sharing.of(sweep_of(key, **changes), base, use_gpu=use_gpu)

    assert sharing() == Sharing(("reward_0",), pool=True), "the reference is the base below"
    assert "  all trials share reward_0, engine" in sharing().lines()
    assert not sharing("model.lora.rank").pool
    assert not sharing(share="reward").pool
    on_gpus = sharing(use_gpu=True)
    assert on_gpus.pool
    assert str(on_gpus.bundles[0]) == "1 CPU, 1 GPU for engine:0"
    other_rank = base_of({"model.lora": {"rank": 8, "push": "adapter"}})
    assert "engine" in roles_alike(base, base)
    assert "engine" not in roles_alike(other_rank, base)


@pytest.mark.parametrize("key", sorted({key for keys in MADE_FROM.values() for key in keys}))
def test_a_deployment_does_for_a_trial_unless_it_is_made_from_something_else(key: str):
    other = {key: OTHER_VALUES[key]}
    if key == "rollout.max_episode_tokens":
        other["rollout.environment"] = "game.py:Game"
    alike = roles_alike(base_of(other), base_of())
    made_of_it = {role for role in ROLES if key in MADE_FROM[role.partition("_")[0]]}
    assert alike >= ROLES - made_of_it
    # A trained adapter is merged before it is pushed: the engine need not know of it.
    assert not alike & made_of_it or key == "model.lora"


def test_seeds_and_coefficients_do_not_matter_to_a_deployment():
    trial = base_of({"seed": 3, "ppo.kl.coef": 0.5, "learner.policy_lr": 0.1, "num_steps": 7})
    assert roles_alike(trial, base_of()) == ROLES
