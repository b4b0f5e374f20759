"""`raypo status`: what it says of runs in every state, from their files alone."""

import io
import os
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from raypo.storage.run_files import RunFiles
from raypo.storage.run_state import RunStatus, paragraph, run_status, table
from tests.recorded_run import write_run


def status_of(files: RunFiles, *, later_s: float = 0.0) -> RunStatus:
    """The status `later_s` seconds after the last step was written."""
    written = files.written_at("metrics.jsonl") or files.written_at("config.yaml")
    assert written is not None
    status = run_status(files, written + later_s)
    assert status is not None
    return status


def run_of(folder: Path, steps: int = 4, status: str | None = None) -> RunFiles:
    write_run(folder, steps=steps, with_rollouts=False, status=status)
    return RunFiles(str(folder), "recorded")


@pytest.mark.parametrize("ended", ["finished", "failed", "interrupted"])
def test_a_run_that_has_ended_says_how(tmp_path: Path, ended: str):
    assert status_of(run_of(tmp_path, status=ended), later_s=1e6).status == ended


def test_a_run_whose_lock_is_held_is_running_whatever_an_earlier_attempt_left(tmp_path: Path):
    files = run_of(tmp_path, status="interrupted")
    with files.lock():
        assert status_of(RunFiles(str(tmp_path), "recorded")).status == "running"


def test_a_run_without_an_end_that_nobody_holds_is_dead(tmp_path: Path):
    run = status_of(run_of(tmp_path))
    assert run.status == "dead"
    assert "it was killed" in paragraph(run)[-1]


def test_the_summary_of_an_attempt_before_the_last_one_does_not_count(tmp_path: Path):
    files = run_of(tmp_path)
    files.write_summary({"status": "interrupted", "steps": 2})
    assert status_of(files).status == "dead"
    files.write_summary({"status": "interrupted", "steps": 4})
    assert status_of(files).status == "interrupted"


@pytest.mark.parametrize(("later_s", "status"), [(599.0, "running"), (601.0, "dead")])
def test_at_a_uri_the_last_write_tells_whether_a_run_lives(
    tmp_path: Path, later_s: float, status: str
):
    """Steps of 2 s: ten minutes without a write are long."""
    run_of(tmp_path)
    files = RunFiles(tmp_path.as_uri(), "recorded")
    assert status_of(files, later_s=later_s).status == status


SLOW: dict[str, Any] = {"time/step_s": 100.0}


def test_a_run_of_slow_steps_may_be_silent_for_ten_of_them(tmp_path: Path):
    write_run(tmp_path, steps=4, with_rollouts=False, status=None, **SLOW)
    files = RunFiles(tmp_path.as_uri(), "recorded")
    assert status_of(files, later_s=999.0).status == "running"
    assert status_of(files, later_s=1001.0).status == "dead"


def test_one_run_is_told_in_a_paragraph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """8 of 12 steps of 2 s: 8 s are left. eval/score_mean of step 8 is 0.25 + 0.5 (1 - e^-8/6)."""
    monkeypatch.chdir(tmp_path)
    files = run_of(tmp_path / "runs", steps=8)
    with files.lock():
        lines = paragraph(status_of(files, later_s=34.0))
    assert lines == [
        "recorded: ppo, running, step 8 of 12",
        "  last step  34 s ago, 2 s per step, about 8 s left",
        "  scores     held-out score 0.6182, training score 0.6418",
        "  files      runs/recorded",
        "  log        runs/recorded/logs/worker_0.log",
        "  go on      raypo train runs/recorded",
    ]


def test_seconds_a_step_are_those_of_the_last_steps(tmp_path: Path):
    """The median of steps 5 to 14: 4 of 1 s, then 10 of 3 s, the last of them 100 s."""
    files = RunFiles(str(tmp_path), "run")
    files.write_config({"name": "run", "num_steps": 20})
    for step in range(1, 15):
        seconds = 1.0 if step < 5 else 100.0 if step == 14 else 3.0
        files.append_metrics(step, {"time/step_s": seconds})
    with files.lock():
        run = status_of(files)
    assert (run.step_s, run.left_s) == (3.0, 18.0)


def test_a_run_that_has_made_no_step_is_starting_and_shows_the_score_of_its_start(tmp_path: Path):
    files = run_of(tmp_path, steps=0)
    with files.lock():
        run = status_of(files, later_s=5.0)
    assert (run.status, run.done, run.step_s, run.left_s) == ("running", 0, None, None)
    assert paragraph(run)[-1] == "  It is starting: no step has ended yet."
    files.append_metrics(1, {"eval/initial_score_mean": 0.25})
    assert status_of(files).scores == (("held-out score", 0.25),)


def test_a_run_that_lives_and_is_silent_says_for_how_long(tmp_path: Path):
    files = run_of(tmp_path)
    with files.lock():
        assert (
            "  Its process is alive, but has written nothing for 50 min 00 s: see the log."
            in paragraph(status_of(files, later_s=3000.0))
        )


@pytest.mark.parametrize(
    ("function", "is_found"),
    [
        ("__main__:score", False),
        ("a_script_elsewhere:score", False),  # `raypo train` would refuse it
        ("tests.recorded_run:write_run.<locals>.score", False),
        ("raypo.rewards.verifiers:exact_match", True),
    ],
)
def test_a_reward_function_of_a_script_goes_on_with_the_script(
    tmp_path: Path, function: str, is_found: bool
):
    files = RunFiles(str(tmp_path), "run")
    files.write_config({"name": "run", "reward": {"function": function}})
    go_on = status_of(files).go_on
    assert go_on.startswith("raypo train" if is_found else "the same Python script")


def test_a_folder_that_holds_no_run_has_no_status(tmp_path: Path):
    assert run_status(RunFiles(str(tmp_path), "none"), 0.0) is None


def status(name: str, **changes: object) -> RunStatus:
    values = {
        "name": name,
        "location": f"runs/{name}",
        "recipe": "ppo",
        "status": "finished",
        "done": 60,
        "total": 60,
        "scores": (("score", 0.83571),),
        "age_s": 7200.0,
        "step_s": 17.2,
        "go_on": "",
    }
    return RunStatus(**(values | changes))  # type: ignore[arg-type]


def printed(*runs: RunStatus, width: int = 80) -> list[str]:
    console = Console(width=width, file=io.StringIO())
    with console.capture() as capture:
        console.print(table(runs))
    return [line.rstrip() for line in capture.get().splitlines()]


def test_several_runs_are_a_line_each_without_columns_that_no_run_fills():
    assert printed(status("a"), status("bc", done=6, recipe="sft", scores=())) == [
        "run  recipe  status    step   score   last        a step",
        "a    ppo     finished  60/60  0.8357  2 h 00 min  17.2 s",
        "bc   sft     finished  6/60           2 h 00 min  17.2 s",
    ]


def test_a_long_name_wraps_so_that_all_of_it_is_there():
    long = "a-run-with-a-name-" + "that-goes-on-" * 5
    lines = printed(status(long, recipe="rejection_sampling"), status("b"))
    assert all(len(line) <= 80 for line in lines)
    assert "".join(line.split()[0] for line in lines[1:-1]) == long
    assert "rejection_sampling" in lines[1]


def test_an_old_lock_file_is_no_running_process(tmp_path: Path):
    files = run_of(tmp_path, status="finished")
    with files.lock():
        pass
    os.utime(files.folder / "metrics.jsonl", (0.0, 0.0))
    assert status_of(files, later_s=1.0).status == "finished"
