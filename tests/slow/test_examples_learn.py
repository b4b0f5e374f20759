"""Examples learn what they are said to learn."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from raypo.storage.run_files import RunFiles
from tests.documentation import copy_examples
from tests.integration.test_documentation import environment


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    copy_examples(tmp_path)
    return tmp_path


def run(folder: Path, *arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=folder,
        env=environment(folder),
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def learn(folder: Path, example: str) -> list[dict[str, Any]]:
    """The metrics of its PPO."""
    run(folder, f"examples.{example}.make_data")
    run(folder, "raypo.cli", "train", f"examples/{example}/sft.yaml")
    run(folder, "raypo.cli", "train", f"examples/{example}/ppo.yaml")
    return RunFiles.at(str(folder / "runs" / example)).metrics()


def test_the_calculator_is_called_when_it_pays_and_is_needed(folder: Path):
    rows = learn(folder, "calculator")
    silent = "rollout.environment_args.silent=true"
    run(folder, "raypo.cli", "eval", "runs/calculator", silent, "--to", "silent.json")
    before, after = rows[0]["eval/initial_score_mean"], rows[-1]["eval/score_mean"]
    (figures,) = json.loads((folder / "silent.json").read_text())["results"].values()
    assert after > before + 0.2
    assert after > figures["eval/score_mean"] + 0.3


def test_code_that_is_judged_by_running_it_gets_right(folder: Path):
    rows = learn(folder, "code")
    assert rows[0]["eval/initial_reward/solved"] < 0.8
    assert rows[-1]["eval/reward/solved"] > 0.9
