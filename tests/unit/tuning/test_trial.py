"""Knowledge of a trial that resumes. Neither Tune nor a run is started."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raypo.ray_internals import CHECKPOINTS
from raypo.storage.checkpoints import STATE
from raypo.storage.run_files import RunFiles
from raypo.tuning import trial
from raypo.tuning.goal import STEP, VALUE, Goal
from raypo.tuning.record import TrialRecord
from raypo.tuning.sweep_file import past_reports
from raypo.tuning.sweep_folder import TRIALS_FOLDER
from raypo.tuning.trial import TrialReports, TrialSetup, run_trial

SCORE = "eval/score_mean"
GOAL = Goal((SCORE,), (1.0,))
BASE = {"model": {"policy": "p"}, "data": {"prompts": "d"}, "num_steps": 8, "name": "base"}


@pytest.fixture
def files(tmp_path: Path) -> RunFiles:
    """A trial that was killed after step 5, with a checkpoint of step 3."""
    files = RunFiles(str(tmp_path / "sweep" / TRIALS_FOLDER), "s-00000")
    for step in range(1, 6):
        files.append_metrics(step, {SCORE: step / 10})
    files.write(f"checkpoint_3/{STATE}", json.dumps({"step": 3}).encode())
    newest = {"checkpoint_dir_name": "checkpoint_3", "metrics": {"step": 3}}
    files.write(CHECKPOINTS, json.dumps({"latest_checkpoint_result": newest}).encode())
    return files


def test_a_resumed_trial_does_not_report_what_steps_that_it_repeats_had_scored(
    files: RunFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    last: list[Any] = []

    def run_nothing(run: Any, setup: TrialSetup, reports: TrialReports, segment: Any) -> Any:
        last.append(dict(reports._metrics))
        return SimpleNamespace(fit=lambda: None)

    monkeypatch.setattr(trial, "trial_trainer_class", lambda run: run_nothing)
    context = SimpleNamespace(get_trial_name=lambda: files.name)
    monkeypatch.setattr(trial.tune, "get_context", lambda: context)
    run_trial({}, TrialSetup(BASE, str(Path(files.location).parent), str(tmp_path), GOAL))
    assert [(metrics[STEP], metrics[SCORE]) for metrics in last] == [(3, 0.3)]


@pytest.mark.parametrize(("status", "last"), [("running", 3), ("failed", 3), ("stopped", 4)])
def test_a_scheduler_gets_the_reports_that_a_trial_will_not_repeat(
    files: RunFiles, tmp_path: Path, status: Any, last: int
):
    record = TrialRecord(files.name, {}, status, step=4)
    reports = past_reports(record, RunFiles(str(tmp_path), "sweep"), GOAL)
    assert [report[STEP] for report in reports] == list(range(1, last + 1))
    assert reports[-1][VALUE] == last / 10
