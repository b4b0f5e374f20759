from typing import Any

from raypo.config import PPOConfig
from raypo.config.sweep import SweepConfig
from raypo.tuning.goal import VALUE
from raypo.tuning.schedule import PastTrial, scheduler_of, tell_past


def scheduler(kind: Any) -> Any:
    space = {"ppo.gamma": {"choice": [0.9, 1.0]}}
    sweep = SweepConfig.parse({"name": "s", "base": "b", "space": space, "scheduler": kind})
    values = {"name": "b", "model": {"policy": "p"}, "data": {"prompts": "d"}, "num_steps": 8}
    return scheduler_of(sweep, PPOConfig.parse(values | {"eval": {"every": 2}}))


def curve(value: float) -> list[dict[str, float]]:
    return [{"step": step, VALUE: value} for step in range(1, 9)]


def steps_until_stopped(judge: Any, value: float) -> int:
    trial: Any = PastTrial(f"new {value}")
    judge.on_trial_add(None, trial)
    for report in curve(value):
        if judge.on_trial_result(None, trial, report) == "STOP":
            return int(report["step"])
    return 8


def test_asha_stops_who_is_worse_than_trials_of_an_earlier_attempt():
    judge = scheduler({"kind": "asha", "reduction_factor": 2})
    tell_past(judge, {f"past {value}": curve(value) for value in (0.4, 0.5, 0.6)})
    assert steps_until_stopped(judge, 0.1) == 2  # the first rung: eval.every of the base
    assert steps_until_stopped(judge, 0.9) == 8


def test_the_median_rule_stops_who_is_worse_than_the_median():
    judge = scheduler("median")
    tell_past(judge, {f"past {value}": curve(value) for value in (0.4, 0.5, 0.6)})
    assert steps_until_stopped(judge, 0.1) == 2
    assert steps_until_stopped(judge, 0.9) == 8


def test_none_stops_nobody():
    judge = scheduler("none")
    tell_past(judge, {"past": curve(1.0)})
    assert steps_until_stopped(judge, 0.1) == 8
