from pathlib import Path
from typing import Any

import pytest
import yaml

from raypo.cluster.placement import takes_gpus
from raypo.config import ConfigError, PPOConfig
from raypo.config.sweep_config import SweepConfig
from raypo.tuning.capacity import describe, grid_points, plan_sweep
from raypo.tuning.shared import Sharing


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


SPACE = {"ppo.kl.coef": {"loguniform": [1e-4, 1.0]}}


def sweep_of(**changes: Any) -> SweepConfig:
    return SweepConfig.parse({"name": "s", "base": "base.yaml", "space": SPACE} | changes)


def base_of(**learner: Any) -> PPOConfig:
    """It is in the file that sweeps name, too."""
    values = {
        "name": "b",
        "model": {"policy": "p"},
        "data": {"prompts": "d"},
        "placement": {"strategy": learner.pop("strategy", "PACK")},
        "learner": learner,
    }
    Path("base.yaml").write_text(yaml.safe_dump(values))
    return PPOConfig.parse(values)


def slots(nodes: list[dict[str, float]], *, use_gpu: bool = False, **learner: Any) -> int:
    sweep = sweep_of(num_samples=100)
    return plan_sweep(sweep, base_of(**learner), nodes, use_gpu=use_gpu).num_slots


def test_as_many_trials_as_fit_side_by_side():
    two_cores = [{"CPU": 2.0}]
    assert slots(two_cores, cpus_per_worker=2) == 1
    assert slots(two_cores, cpus_per_worker=1) == 2
    assert slots([{"CPU": 64.0, "GPU": 8.0}], num_workers=2, use_gpu=True) == 4
    assert slots([{"CPU": 3.0}, {"CPU": 3.0}], cpus_per_worker=2, num_workers=2) == 1


def dedicated(mode: Any = "dedicated", **rollout: Any) -> tuple[SweepConfig, PPOConfig]:
    """A sweep of any number of trials that sample ahead, each on an engine of its own."""
    values = {
        "name": "b",
        "model": {"policy": "p", "reward": "r"},
        "data": {"prompts": "d"},
        "rollout": {"mode": "async", **rollout},
        "placement": {"mode": mode},
    }
    Path("base.yaml").write_text(yaml.safe_dump(values))
    return sweep_of(num_samples=100), PPOConfig.parse(values)


def test_a_trial_holds_its_dedicated_group_too():
    plan = plan_sweep(*dedicated(), [{"CPU": 5.0}], use_gpu=False)
    assert plan.num_slots == 2
    assert plan.num_devices == 2.0, "a worker and an engine"
    assert plan.sharing == Sharing(), "all of it is each trial's own"
    assert "each trial takes 2 x (1 CPU); 2 at a time" in "\n".join(describe(dedicated()[0], plan))
    on_gpus = [{"CPU": 64.0, "GPU": 8.0}]
    assert plan_sweep(*dedicated(), on_gpus, use_gpu=True).num_slots == 2  # 4 GPUs each
    two = {"tensor_parallel": 2}
    apart = plan_sweep(*dedicated({"engine": "dedicated"}, engine=two), on_gpus, use_gpu=True)
    assert apart.num_devices == 3.0
    assert apart.num_slots == 2
    assert apart.sharing.models == ("reference", "reward_0"), "in the two that are left"


def test_groups_that_fit_only_one_after_the_other_do_not_count():
    """Two engines on two GPUs each fit; then one worker is left without."""
    sweep, base = dedicated({"engine": "dedicated"}, engine={"tensor_parallel": 2})
    nodes = [{"CPU": 8.0, "GPU": 3.0}, {"CPU": 8.0, "GPU": 2.0}]
    assert plan_sweep(sweep, base, nodes, use_gpu=True).num_slots == 1


def test_the_placement_strategy_decides_what_fits():
    nodes = [{"CPU": 3.0}, {"CPU": 3.0}]
    assert slots(nodes, num_workers=2) == 3
    assert slots(nodes, num_workers=2, strategy="STRICT_PACK") == 2
    assert slots(nodes, num_workers=2, strategy="STRICT_SPREAD") == 3
    lopsided = [{"CPU": 5.0}, {"CPU": 1.0}]
    assert slots(lopsided, num_workers=2, strategy="STRICT_SPREAD") == 1


def test_the_sweep_file_may_take_less_than_fits():
    nodes, base = [{"CPU": 8.0}], base_of(cpus_per_worker=2)
    assert plan_sweep(sweep_of(max_concurrent=3), base, nodes, use_gpu=False).num_slots == 3
    assert plan_sweep(sweep_of(max_concurrent=99), base, nodes, use_gpu=False).num_slots == 4
    assert plan_sweep(sweep_of(num_samples=2), base, nodes, use_gpu=False).num_slots == 2


def test_a_trial_that_never_fits_is_refused_with_the_key_in_the_sweep_file():
    with pytest.raises(ConfigError, match=r"num_workers \(1\): .* overrides\.learner\.num_workers"):
        slots([{"CPU": 2.0}], cpus_per_worker=4)


def test_elastic_trials_are_refused():
    with pytest.raises(ConfigError, match=r"learner.min_workers \(1\): every trial .* overrides"):
        slots([{"CPU": 8.0}], num_workers=[1, 4])


def test_a_grid_is_every_combination():
    sweep = sweep_of(
        searcher="grid", space={"ppo.gamma": {"grid": [0.9, 1.0]}, "seed": {"grid": [0, 1]}}
    )
    assert grid_points(sweep) == [
        {"ppo.gamma": 0.9, "seed": 0},
        {"ppo.gamma": 0.9, "seed": 1},
        {"ppo.gamma": 1.0, "seed": 0},
        {"ppo.gamma": 1.0, "seed": 1},
    ]
    plan = plan_sweep(sweep, base_of(), [{"CPU": 2.0}], use_gpu=False)
    lines = describe(sweep, plan)
    assert "4 trials of base.yaml" in lines[0]
    assert "each trial takes 1 CPU; 2 at a time" in "\n".join(lines)
    assert lines[-1] == "  s-00003: ppo.gamma=1.0, seed=1"


def test_a_population_runs_all_at_once_or_not_at_all():
    pbt = {"scheduler": "pbt", "searcher": "random"}
    two_cores = [{"CPU": 2.0}]
    plan = plan_sweep(sweep_of(**pbt, num_samples=2), base_of(), two_cores, use_gpu=False)
    assert plan.num_slots == 2
    with pytest.raises(ConfigError, match=r"num_samples \(4\): pbt .* 2 of 1 CPU fit here"):
        plan_sweep(sweep_of(**pbt, num_samples=4), base_of(), two_cores, use_gpu=False)


def test_workers_take_gpus_where_a_node_has_some_and_the_config_says_nothing_else():
    with_gpus, without = [{"CPU": 3.0}, {"CPU": 3.0, "GPU": 2.0}], [{"CPU": 3.0, "GPU": 0.0}]
    assert takes_gpus(base_of(), with_gpus)
    assert not takes_gpus(base_of(use_gpu=False), with_gpus)
    assert not takes_gpus(base_of(), without)
