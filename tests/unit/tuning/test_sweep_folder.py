"""`raypo status` of sweeps and their trials."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer import Exit

from raypo.checks import input_checks
from raypo.checks.resume_checks import check_run_folder
from raypo.cli.sweep import sweep as sweep_command
from raypo.cluster.placement import PlacementError
from raypo.config import ConfigError, PPOConfig
from raypo.config.sweep_config import SweepConfig
from raypo.storage.run_files import RunFiles
from raypo.storage.run_state import paragraph, run_status
from raypo.tuning import sweep_file as driver
from raypo.tuning.goal import Goal
from raypo.tuning.record import TrialRecord, read_trials, write_trials
from raypo.tuning.sweep_folder import (
    TRIALS_FOLDER,
    recorded_config,
    sweep_status,
    with_trial_status,
)
from tests.unit.tuning.test_report import BASE, SCORE


def trial(number: int, status: str, score: float) -> TrialRecord:
    step = 40 if status == "finished" else 10
    name = f"s-{number:05d}"
    return TrialRecord(name, {"ppo.kl.coef": 0.1}, status, step, {SCORE: score})  # type: ignore[arg-type]


@pytest.fixture
def files(tmp_path: Path) -> RunFiles:
    (tmp_path / "base.yaml").write_text(BASE)
    space = {"ppo.kl.coef": {"loguniform": [1e-3, 3.0]}}
    values = {"name": "s", "base": str(tmp_path / "base.yaml"), "space": space}
    sweep = SweepConfig.parse(values | {"num_samples": 4})
    files = RunFiles(str(tmp_path), "s")
    files.write_config(recorded_config(sweep, sweep.base_config()))
    trials = [trial(0, "finished", 0.8), trial(1, "stopped", 0.3), trial(2, "running", 0.7)]
    write_trials(files, trials, Goal((SCORE,), (1.0,)))
    return files


def test_a_sweep_counts_trials_and_names_the_best(files: RunFiles):
    written = files.written_at("trials.parquet")
    assert written is not None
    with files.lock():
        run = sweep_status(files, written + 7.0)
    assert run is not None
    assert paragraph(run) == [
        "s: sweep, running, trial 2 of 4",
        "  last trial 7 s ago",
        f"  scores     {SCORE} 0.8",
        f"  files      {files.location}",
        f"  go on      raypo sweep {files.location}",
        f"  Its trials: 1 finished, 1 running, 1 stopped; raypo status {files.location}/trials",
        "  The best so far is s-00000.",
    ]


def test_a_sweep_that_was_killed_is_dead_and_one_that_grew_too(files: RunFiles):
    def status() -> str:
        run = sweep_status(files, 0.0)
        assert run is not None
        return run.status

    assert status() == "dead"
    files.write_summary({"status": "finished", "num_trials": 3})
    assert status() == "dead"
    files.write_summary({"status": "finished", "num_trials": 4})
    assert status() == "finished"


def test_a_trial_that_the_scheduler_stopped_is_not_dead(files: RunFiles):
    told = {}
    for number in range(3):
        run_files = RunFiles(f"{files.location}/{TRIALS_FOLDER}", f"s-{number:05d}")
        run_files.write_config({"name": run_files.name, "num_steps": 40})
        run_files.append_metrics(10, {"time/step_s": 1.0})
        run = run_status(run_files, 0.0)
        assert run is not None
        trial = with_trial_status(run, run_files)
        told[number] = (trial.status, trial.go_on.split()[1])
    assert told == {0: ("finished", "report"), 1: ("stopped", "report"), 2: ("dead", "sweep")}


@pytest.mark.parametrize(
    "values",
    [
        [{}, {"most": 4}],
        [["a"], [{"path": "b", "weight": 2.0}]],
        ["a", ["a", "b"]],
        [1, 2.5],
        ["auto", 3],
    ],
)
def test_values_of_any_kind_have_a_column(tmp_path: Path, values: list[object]):
    files = RunFiles(str(tmp_path), "s")
    trials = [
        TrialRecord(f"s-{number:05d}", {"key": value}, "finished")
        for number, value in enumerate(values)
    ]
    for known in (trials[:1], trials):
        write_trials(files, known, Goal((SCORE,), (1.0,)))
        assert [trial.point["key"] for trial in read_trials(files)] == values[: len(known)]


@pytest.fixture
def start_over(files: RunFiles, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Returns the exit status of `raypo sweep --fresh` on a cluster that is too small."""

    def refuse(*arguments: Any, **others: Any) -> None:
        raise PlacementError("no room")

    monkeypatch.setattr(input_checks, "check_inputs", lambda base: [])
    monkeypatch.setattr(driver, "connected", lambda *arguments, **others: nullcontext())
    monkeypatch.setattr(driver, "alive_nodes", list)
    monkeypatch.setattr(driver, "takes_gpus", lambda base, nodes: False)
    monkeypatch.setattr(driver, "plan_sweep", refuse)

    def start() -> int:
        with pytest.raises(Exit) as ended:
            sweep_command(files.folder, None, dry_run=False, fresh=True)
        return ended.value.exit_code

    return start


def test_fresh_keeps_the_sweep_if_no_trial_has_a_place(
    files: RunFiles, start_over: Callable[[], int], capsys: pytest.CaptureFixture[str]
):
    recorded = files.config()
    assert start_over() == 2
    assert "no room" in capsys.readouterr().err
    assert (files.config(), len(read_trials(files))) == (recorded, 3)


def test_fresh_removes_the_trials_once_they_have_a_place(
    files: RunFiles, start_over: Callable[[], int], monkeypatch: pytest.MonkeyPatch
):
    def run(*arguments: Any) -> Any:
        return SimpleNamespace(status="interrupted", lines=())

    monkeypatch.setattr(driver, "plan_sweep", lambda *arguments, **others: None)
    monkeypatch.setattr(driver, "_run", run)
    monkeypatch.setattr(driver, "describe", lambda *arguments: [])
    monkeypatch.setattr(driver, "dashboard_url", lambda: "")
    files.write(f"{TRIALS_FOLDER}/s-00000/metrics.jsonl", b"")
    assert start_over() == 130
    assert files.names() == ["config.yaml", "inputs.json"]


def test_fresh_refuses_a_base_in_the_sweeps_own_folder(
    files: RunFiles, start_over: Callable[[], int], capsys: pytest.CaptureFixture[str]
):
    files.write("best.yaml", BASE.encode())
    files.write_config((files.config() or {}) | {"base": f"{files.location}/best.yaml"})
    assert start_over() == 2
    assert "base (" in (told := capsys.readouterr().err)
    assert "best.yaml): starting over removes" in told
    assert len(read_trials(files)) == 3


def test_a_run_does_not_take_the_folder_of_a_sweep(files: RunFiles):
    run = PPOConfig.load(Path(files.location).parent / "base.yaml", overrides={"name": "s"})
    with pytest.raises(ConfigError, match=r"name \(s\): .* holds a sweep, not a run\."):
        check_run_folder(run, files)
