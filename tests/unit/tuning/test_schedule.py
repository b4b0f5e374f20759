import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray import tune

from raypo.config import PPOConfig
from raypo.config.sweep_config import SweepConfig
from raypo.storage.run_files import RunFiles
from raypo.tuning.goal import VALUE, Goal
from raypo.tuning.population import POINTER
from raypo.tuning.schedule import PastTrial, reports_of, scheduler_of, tell_past


def scheduler(kind: Any, **changes: Any) -> Any:
    space = {"ppo.gamma": {"choice": [0.9, 1.0]}}
    written = {"name": "s", "base": "b", "space": space, "scheduler": kind}
    sweep = SweepConfig.parse(written | changes)
    values = {"name": "b", "model": {"policy": "p"}, "data": {"prompts": "d"}, "num_steps": 8}
    base = PPOConfig.parse(values | {"eval": {"every": 2}})
    return scheduler_of(sweep, base, storage_path="runs")


def test_a_population_leaves_alone_who_is_at_the_end_and_makes_nobody_wait():
    judge = scheduler({"kind": "pbt", "perturb_every": 2, "quantile": 0.5}, searcher="random")
    trials: list[Any] = [RunningTrial(name) for name in ("worse", "better")]
    controller: Any = SimpleNamespace(
        search_alg=None,
        get_trials=lambda: [*trials, SimpleNamespace(status="PENDING")],
        _schedule_trial_save=lambda trial, result: None,
    )
    for each in trials:
        judge.on_trial_add(controller, each)
    for step in (2, 4, 8):
        for each, value in zip(trials, (0.1, 0.9), strict=True):
            report = {"step": step, VALUE: value}
            assert judge.on_trial_result(controller, each, report) == "CONTINUE"
    states = [judge._trial_state[each] for each in trials]
    assert [state.last_train_time for state in states] == [4, 4]


def test_a_trial_goes_on_as_it_is_where_the_checkpoint_to_copy_is_gone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    judge = scheduler({"kind": "pbt", "perturb_every": 2, "quantile": 0.5}, searcher="random")
    worse, better = (RunningTrial(name) for name in ("worse", "better"))
    for each in (worse, better):
        judge.on_trial_add(SimpleNamespace(search_alg=None), each)
    gone = {"trial": "better", "checkpoint": str(tmp_path / "gone"), "known": {}}
    (tmp_path / POINTER).write_text(json.dumps(gone))
    judge._trial_state[better].last_checkpoint = tune.Checkpoint.from_directory(str(tmp_path))
    judge._exploit(SimpleNamespace(), worse, better)  # a controller that can pause nobody
    assert "better is not copied into worse" in caplog.text


class RunningTrial:
    """As much of a Tune trial as pbt looks at."""

    status, experiment_tag = "RUNNING", ""

    def __init__(self, name: str) -> None:
        self.trial_id, self.config = name, {"point": {"ppo.gamma": 0.9}}
        keeps_all = SimpleNamespace(checkpoint_config=SimpleNamespace(num_to_keep=None))
        self.run_metadata = SimpleNamespace(checkpoint_manager=keeps_all)

    def __str__(self) -> str:
        return self.trial_id

    def is_finished(self) -> bool:
        return False


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
