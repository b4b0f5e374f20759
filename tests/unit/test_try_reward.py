"""`raypo try-reward`, and the same trial at a run's start."""

import json
import sys
import threading
from pathlib import Path

import pytest

from raypo.models.loading import load_tokenizer
from raypo.rewards.scoring import RewardError
from raypo.rollout import reward_trial
from raypo.rollout.reward_trial import right_answer, trials, try_before_start
from raypo.types import Prompt, Rollout
from tests.command_line import exit_status
from tests.tiny import tiny_policy

FUNCTIONS = """
def exact(rollouts):
    return [
        {"score": float(r.response == r.label), "length": len(r.response), "why": "as the label"}
        for r in rollouts
    ]


def shared(prompts, completions, answer, **columns):
    return [float(a == b) for a, b in zip(completions, answer, strict=True)]


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return None if not solution_str else float(solution_str == ground_truth)


def first_number(rollouts):
    return [digit(r.response) for r in rollouts]


def digit(text):
    return float(text.split()[0])


def constant(rollouts):
    return [0.5] * len(rollouts)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("task")
    tiny_policy(folder / "policy")
    rows = [{"prompt": f"{a}+1=", "answer": str(a + 1)} for a in range(40)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "score.py").write_text(FUNCTIONS)
    return folder


def run_file(folder: Path, function: str, **data: str) -> Path:
    values = {
        "name": "run",
        "model": {"policy": str(folder / "policy")},
        "data": {"prompts": str(folder / "rows.jsonl"), "max_prompt_tokens": 8, **data},
        "reward": {"function": f"{folder}/score.py:{function}"},
    }
    path = folder / f"{function}.yaml"
    path.write_text(json.dumps(values))
    return path


def test_each_row_gets_its_label_an_empty_and_a_wrong_response(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    config = run_file(folder, "exact", label_key="answer")
    assert exit_status(monkeypatch, "try-reward", config, "--rows", 2) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "data.prompts, scored by score.py:exact"
    assert lines[1:5] == [
        "  row 0 of rows: '0+1='",
        "    right  score 1  length 1  why: 'as the label'  '1'",
        "    empty  score 0  length 0  why: 'as the label'  ''",
        "    wrong  score 0  length 1  why: 'as the label'  '2'",
    ]
    assert lines[5].startswith("  row 1 of")
    assert [line.split(":")[0].strip() for line in lines[9:]] == ["right", "empty", "wrong"]
    assert "s for a call with 2 responses" in lines[9]


@pytest.mark.parametrize("function", ["shared", "compute_score"])
def test_the_forms_of_trl_and_verl_are_called_as_the_run_calls_them(
    function: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    """The right answer of TRL's form is the column `answer`, without data.label_key."""
    label = {"label_key": "answer"} if function == "compute_score" else {}
    assert (
        exit_status(
            monkeypatch, "try-reward", run_file(folder, function, **label), "reward.processes=1"
        )
        == 0
    )
    out = capsys.readouterr().out
    assert "right  score 1  '1'" in out
    assert "wrong  score 0  '2'" in out
    assert ("empty  no score  ''" if label else "empty  score 0  ''") in out


@pytest.mark.parametrize("processes", [0, 1])
def test_an_error_is_told_by_the_users_lines_and_one_of_raypo(
    processes: int,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    config = run_file(folder, "first_number", label_key="answer")
    assert exit_status(monkeypatch, "try-reward", config, f"reward.processes={processes}") == 1
    *frames, line = capsys.readouterr().err.splitlines()
    assert [each.strip() for each in frames if "File" not in each and "^" not in each] == [
        "return [digit(r.response) for r in rollouts]",
        *(["return [digit(r.response) for r in rollouts]"] if sys.version_info < (3, 12) else []),
        "return float(text.split()[0])",
    ]
    assert all("score.py" in each for each in frames if "File" in each)
    assert "score.py:first_number raised IndexError: list index out of range (for 3 roll" in line
    assert line.endswith("to try the function on the first rows; these were empty.")


def test_a_function_that_cannot_tell_right_from_wrong_is_noted(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    assert (
        exit_status(monkeypatch, "try-reward", run_file(folder, "constant", label_key="answer"))
        == 0
    )
    assert "no right answer scores higher than a wrong one" in capsys.readouterr().out


def test_without_a_function_there_is_nothing_to_try(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    config = run_file(folder, "exact", label_key="answer")
    assert (
        exit_status(
            monkeypatch, "try-reward", config, "reward.function=null", "reward.url=http://no.where"
        )
        == 2
    )
    assert "there is no function to try" in capsys.readouterr().err


def prompts(*rows: dict[str, object]) -> list[Prompt]:
    import numpy as np

    ids = np.arange(2, dtype=np.int32)
    return [Prompt(n, "p", ids, row.get("label"), row=row) for n, row in enumerate(rows)]


@pytest.mark.parametrize(
    ("row", "answer"),
    [
        ({"label": "4"}, "4"),
        ({"label": 4.5}, "4.5"),
        ({"label": {"answer": "8", "metadata": {}}}, "8"),
        ({"label": "4", "reward_model": {"ground_truth": "5"}}, "5"),
        ({"solution": "6"}, "6"),
        ({"question": "?"}, None),
    ],
)
def test_the_right_answer_is_read_from_the_row(row: dict[str, object], answer: str | None):
    assert right_answer(prompts(row)[0]) == answer


def test_a_run_tries_its_function_and_ends_with_its_error(folder: Path):
    tokenizer = load_tokenizer(str(folder / "policy"))
    seen: list[list[str]] = []

    def counting(rollouts: list[Rollout]) -> list[float]:
        seen.append([each.response for each in rollouts])
        return [0.0] * len(rollouts)

    rows = prompts({"label": "1"}, {"label": "2"})
    try_before_start(counting, rows, tokenizer, pytest.fail)
    assert seen == [["1", "2"], ["", ""], ["2", "1"]]
    assert [each.kind for each in trials(counting, rows, tokenizer)] == ["right", "empty", "wrong"]

    def broken(rollouts: list[Rollout]) -> list[float]:
        raise KeyError("no such label")

    with pytest.raises(RewardError, match="raised KeyError: 'no such label'") as caught:
        try_before_start(broken, rows, tokenizer, pytest.fail)
    assert "in broken" in caught.value.user_frames
    assert "raypo/rewards" not in caught.value.user_frames


def test_a_run_does_not_wait_for_a_slow_function(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(reward_trial, "TRIAL_S", 0.05)
    tokenizer = load_tokenizer(str(folder / "policy"))
    released, said, calls = threading.Event(), list[str](), list[int]()

    def slow(rollouts: list[Rollout]) -> list[float]:
        calls.append(len(rollouts))
        released.wait(30)
        return [0.0] * len(rollouts)

    try_before_start(slow, prompts({"label": "1"}), tokenizer, said.append)
    released.set()
    assert "the run goes on" in said[0]
    assert calls == [1]
