import json
from pathlib import Path
from typing import Any

from raypo.config import PPOConfig
from raypo.config.sweep_config import SweepConfig
from raypo.ray_internals import PastTrial, tell_past
from raypo.storage.run_files import RunFiles
from raypo.tuning.goal import VALUE, Goal
from raypo.tuning.schedule import reports_of, scheduler_of


def scheduler(kind: Any, **changes: Any) -> Any:
    space = {"ppo.gamma": {"choice": [0.9, 1.0]}}
    written = {"name": "s", "base": "b", "space": space, "scheduler": kind}
    sweep = SweepConfig.parse(written | changes)
    values = {"name": "b", "model": {"policy": "p"}, "data": {"prompts": "d"}, "num_steps": 8}
    base = PPOConfig.parse(values | {"eval": {"every": 2}})
    return scheduler_of(sweep, base)


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


def test_the_median_rule_is_told_of_trials_that_it_stopped():
    judge = scheduler("median")
    past = {f"past {number}": curve(0.5) for number in range(3)}
    tell_past(judge, {**past, "stopped": curve(0.1), "good": curve(0.9)})
    assert steps_until_stopped(judge, 0.1) == 2
    assert steps_until_stopped(judge, 0.9) == 8


def test_what_a_stopped_trial_did_after_its_stop_was_never_reported(tmp_path: Path):
    files = RunFiles(str(tmp_path), "trial")
    files.folder.mkdir()
    rows = [{"step": step, "eval/score_mean": step / 10} for step in (1, 2, 3)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (files.folder / "metrics.jsonl").write_text(text)
    goal = Goal(("eval/score_mean",), (1.0,))
    found = reports_of(files, goal, last_step=2)
    assert [report["eval/score_mean"] for report in found] == [0.1, 0.2]


def test_none_stops_nobody():
    judge = scheduler("none")
    tell_past(judge, {"past": curve(1.0)})
    assert steps_until_stopped(judge, 0.1) == 8
