"""What the trials of a sweep have in common, and when they have their own."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from raypo.config import ConfigError, PPOConfig
from raypo.config.sweep_config import SweepConfig, with_values
from raypo.run.shared_services import roles_with_different_deployments
from raypo.tuning.capacity import SweepPlan, describe, plan_sweep
from raypo.tuning.shared import Sharing

BASE: dict[str, Any] = {
    "name": "b",
    "model": {"policy": "p", "reward": "r"},
    "data": {"prompts": "d"},
}
ENGINE, REFERENCE, REWARD = "engine", "reference", "reward_0"
ROLES = {ENGINE, REFERENCE, REWARD}
MADE_FROM: dict[str, tuple[Any, set[str]]] = {
    "model.attention": ("eager", {REFERENCE, REWARD}),
    "model.policy": ("q", ROLES),
    "model.reference": ("q", {REFERENCE}),
    "model.reward": ("s", {REWARD}),
    "model.dtype": ("bfloat16", ROLES),
    "model.lora": ({"rank": 4}, set()),  # merged before it is pushed
    "rollout.engine.prefix_caching": (False, {ENGINE}),
    "rollout.max_new_tokens": (7, {ENGINE}),
    "rollout.temperature": (0.5, {REFERENCE}),
    "rollout.stop": (["Q:"], {ENGINE}),
    "data.max_prompt_tokens": (9, {ENGINE}),
    "learner.max_tokens_per_microbatch": (333, {REFERENCE, REWARD}),
    "seed": (3, set()),
    "ppo.kl.coef": (0.5, set()),
    "learner.policy_lr": (0.1, set()),
    "num_steps": (7, set()),
}
"""Key -> another value than the base's, and the roles that are made from it."""


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    base_of()


def sweep_of(space: Any = None, **changes: Any) -> SweepConfig:
    space = space or {"ppo.kl.coef": {"choice": [0.1, 0.2]}}
    return SweepConfig.parse({"name": "s", "base": "base.yaml", "space": space} | changes)


def base_of(changes: dict[str, Any] | None = None) -> PPOConfig:
    """It is in the file that sweeps name, too."""
    values = with_values(BASE, changes or {})
    Path("base.yaml").write_text(yaml.safe_dump(values))
    return PPOConfig.parse(values)


def sharing_of(sweep: SweepConfig, base: PPOConfig, *, use_gpu: bool = False) -> Sharing:
    trials = [trial for _, trial in sweep.trials()]
    return Sharing.of(base, trials, share=sweep.share, use_gpu=use_gpu)


def plan_of(node: dict[str, float], *, use_gpu: bool, **changes: Any) -> SweepPlan:
    return plan_sweep(sweep_of(num_samples=99, **changes), base_of(), [node], use_gpu=use_gpu)


def test_on_cpus_all_is_shared_and_takes_no_place():
    plan = plan_of({"CPU": 3.0}, use_gpu=False)
    assert plan.sharing == Sharing(("reference", "reward_0"), engines=True)
    assert plan.num_slots == 3
    lines = describe(sweep_of(), plan)
    assert "  all trials share reference, reward_0" in lines
    assert "  engines are reused from trial to trial" in lines


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
    def shared(key: str, *values: Any, **changes: Any) -> Sharing:
        return sharing_of(sweep_of({key: {"choice": list(values)}}, **changes), base_of())

    assert shared("rollout.temperature", 0.5, 1.0) == Sharing((REWARD,), engines=True)
    assert shared("rollout.engine.prefix_caching", True, False) == Sharing((REFERENCE, REWARD))
    assert shared("ppo.kl.coef", 0.0, 0.1) == Sharing((REFERENCE, REWARD), engines=True)
    assert shared("seed", 1, 2, share=[]) == Sharing()
    assert shared("seed", 1, 2, share="reward") == Sharing((REWARD,))


def test_trials_that_push_adapters_use_the_same_engines():
    lora = {"rank": 4, "push": "adapter"}
    base = base_of({"model.lora": lora, "placement.gpus": {"engine": 1}})

    def sharing(space: Any = None, *, use_gpu: bool = False, **changes: Any) -> Sharing:
        return sharing_of(sweep_of(space, **changes), base, use_gpu=use_gpu)

    assert sharing() == Sharing((REWARD,), pool=True), "the reference is the base below"
    assert "  all trials share reward_0, engine" in sharing().lines()
    assert not sharing({"model.lora.rank": {"choice": [4, 8]}}).pool
    assert not sharing(share="reward").pool
    on_gpus = sharing(use_gpu=True)
    assert on_gpus.pool
    assert str(on_gpus.bundles[0]) == "1 CPU, 1 GPU for engine:0"
    other_rank = base_of({"model.lora": {"rank": 8, "push": "adapter"}})
    assert ENGINE not in roles_with_different_deployments(base, base)
    assert ENGINE in roles_with_different_deployments(other_rank, base)


@pytest.mark.parametrize("key", MADE_FROM)
def test_a_deployment_does_for_a_trial_unless_it_is_made_from_something_else(key: str):
    value, roles = MADE_FROM[key]
    assert roles_with_different_deployments(base_of({key: value}), base_of()) == roles


def test_an_engine_for_episodes_has_room_for_a_whole_one():
    episodes = {"rollout.environment": "game.py:Game", "rollout.max_episode_tokens": 99}
    assert roles_with_different_deployments(base_of(episodes), base_of()) == {ENGINE}
