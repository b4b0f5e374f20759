import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cloudpickle
import pytest
from ray.tune.schedulers import ASHAScheduler, MedianStoppingRule

from raypo.config import PPOConfig
from raypo.config.sweep_config import SweepConfig
from raypo.ray_internals import PastTrial, replay_past_trials
from raypo.storage.run_files import RunFiles
from raypo.tuning.goal import SCORED_STEP, UNKNOWN, VALUE, Goal
from raypo.tuning.schedule import reports_of, scheduler_of, with_score_gate

CONTROLLER: Any = SimpleNamespace(search_alg=None, get_live_trials=list)


def scheduler(kind: Any, *, past: Any = None, **changes: Any) -> Any:
    space = {"ppo.gamma": {"choice": [0.9, 1.0]}}
    written = {"name": "s", "base": "b", "space": space, "scheduler": kind}
    sweep = SweepConfig.parse(written | changes)
    values = {"name": "b", "model": {"policy": "p"}, "data": {"prompts": "d"}, "num_steps": 8}
    base = PPOConfig.parse(values | {"eval": {"every": 2}})
    return scheduler_of(sweep, base, past=past or {})


def curve(value: float) -> list[dict[str, float]]:
    return [{"step": step, VALUE: value} for step in range(1, 9)]


def steps_until_stopped(judge: Any, value: float) -> int:
    trial: Any = PastTrial(f"new {value}")
    judge.on_trial_add(None, trial)
    for report in curve(value):
        if judge.on_trial_result(None, trial, report) == "STOP":
            return int(report["step"])
    return 8


@pytest.mark.parametrize("kind", ["asha", "median"])
def test_no_trial_is_stopped_by_a_score_from_before_the_first_update(kind: str):
    """With grace_steps below eval.every, seven of nine trials were stopped at step 1."""
    judge = scheduler({"kind": kind, "grace_steps": 1})
    trials: Any = [PastTrial(f"trial {number}") for number in range(9)]
    for trial in trials:
        judge.on_trial_add(CONTROLLER, trial)

    def decided(report: dict[str, float]) -> set[str]:
        return {
            judge.on_trial_result(CONTROLLER, trial, {VALUE: -number / 10, **report})
            for number, trial in enumerate(trials)
        }

    assert decided({"step": 1, SCORED_STEP: 0}) == {"CONTINUE"}
    assert decided({"step": 2, VALUE: UNKNOWN}) == {"CONTINUE"}
    assert "STOP" in decided({"step": 4, SCORED_STEP: 4})


@pytest.mark.parametrize("kind", [ASHAScheduler, MedianStoppingRule])
def test_a_scheduler_of_the_users_waits_for_scores_too(kind: Any):
    own: Any = kind(time_attr="step", metric="eval/loss", mode="min", grace_period=1)
    judge: Any = cloudpickle.loads(cloudpickle.dumps(with_score_gate(own)))
    assert isinstance(judge, kind)
    trials: Any = [PastTrial(f"trial {number}") for number in range(9)]
    for trial in trials:
        judge.on_trial_add(CONTROLLER, trial)

    def decided(step: int, scored_step: int) -> set[str]:
        report = {"step": step, SCORED_STEP: scored_step}
        return {
            judge.on_trial_result(CONTROLLER, trial, {**report, "eval/loss": float(number)})
            for number, trial in enumerate(trials)
        }

    assert decided(1, 0) == decided(3, 0) == {"CONTINUE"}
    assert judge.on_trial_result(CONTROLLER, trials[0], {"step": 4}) == "CONTINUE"
    assert "STOP" in decided(4, 4)


def test_asha_stops_who_is_worse_than_trials_of_an_earlier_attempt():
    judge = scheduler({"kind": "asha", "reduction_factor": 2})
    replay_past_trials(judge, {f"past {value}": curve(value) for value in (0.4, 0.5, 0.6)})
    assert steps_until_stopped(judge, 0.1) == 2  # the first rung: eval.every of the base
    assert steps_until_stopped(judge, 0.9) == 8


Report = tuple[str, int, float]
"""Trial, step and value."""


def decisions(judge: Any, reports: Sequence[Report], *, ids: str) -> dict[tuple[str, int], str]:
    """Add the trials, and return the decision on each report by trial and step."""
    trials: Any = {name: PastTrial(f"{ids} {name}") for name, _, _ in reports}
    for trial in trials.values():
        judge.on_trial_add(CONTROLLER, trial)
    return {
        (name, step): judge.on_trial_result(CONTROLLER, trials[name], {"step": step, VALUE: value})
        for name, step, value in reports
    }


def resumed_and_whole(
    kind: Any, reports: Sequence[Report], *, until: int, newest: Mapping[str, int]
) -> tuple[dict[tuple[str, int], str], dict[tuple[str, int], str]]:
    """Decisions of a resumed sweep, and those on the same reports of one that was never killed.

    Args:
        kind: The scheduler.
        reports: All reports in the order of time.
        until: Number of reports before the kill.
        newest: Step of each trial's newest checkpoint at the kill.
    """
    past = {
        f"new {name}": [
            {"step": step, VALUE: value}
            for of, step, value in reports[:until]
            if of == name and step <= newest[name]
        ]
        for name in newest
    }
    left = [(name, step, value) for name, step, value in reports if step > newest[name]]
    got = decisions(scheduler(kind, past=past), left, ids="new")
    expected = decisions(scheduler(kind), reports, ids="old")
    return got, {report: expected[report] for report in got}


def test_asha_does_not_compare_with_what_a_resumed_trial_scored_later():
    """The first trial resumes beyond the rungs 2 and 4; the second is better at every step."""
    first = [("first", step, step / 10) for step in range(1, 9)]
    second = [("second", step, step / 10 + 0.05) for step in range(1, 9)]
    worse = [("worse", step, step / 10 - 0.05) for step in range(1, 3)]
    reports = [*first[:6], *second[:1], *first[6:], *second[1:], *worse]
    kind, newest = {"kind": "asha", "reduction_factor": 2}, {"first": 5, "second": 0, "worse": 0}
    got, whole = resumed_and_whole(kind, reports, until=7, newest=newest)
    assert got == whole
    assert [report for report, decision in got.items() if decision == "STOP"] == [("worse", 2)]


def test_the_median_rule_knows_the_best_score_of_a_resumed_trial():
    others = [(name, step, 0.5) for step in range(1, 9) for name in ("a", "b", "c")]
    early = [("early", step, 0.9 if step < 4 else 0.1) for step in range(1, 9)]
    newest = {"a": 7, "b": 7, "c": 7, "early": 4}
    got, whole = resumed_and_whole(
        "median", [*early[:4], *others, *early[4:]], until=28, newest=newest
    )
    assert got == whole
    assert set(got.values()) == {"CONTINUE"}


def test_the_median_rule_compares_with_ended_trials_also_those_that_it_stopped():
    judge = scheduler("median")
    past = {f"past {number}": curve(0.5) for number in range(3)}
    replay_past_trials(judge, {**past, "stopped": curve(0.1), "good": curve(0.9), "removed": []})
    assert steps_until_stopped(judge, 0.1) == 2
    assert steps_until_stopped(judge, 0.9) == 8


def test_what_a_stopped_trial_did_after_its_stop_was_never_reported(tmp_path: Path):
    files = RunFiles(str(tmp_path), "trial")
    files.folder.mkdir()
    rows = [{"step": step, "eval/score_mean": step / 10} for step in (1, 2, 3)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (files.folder / "metrics.jsonl").write_text(text)
    goal = Goal(("eval/score_mean",), (1.0,))
    reports = reports_of(files, goal, last_step=2)
    assert [report["eval/score_mean"] for report in reports] == [0.1, 0.2]
